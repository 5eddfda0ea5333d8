"""Gradient buckets against the obvious reference; benchmarks/ compares them with torch's DDP."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from picotron_min.data_parallel import GradientBuckets
from picotron_min.extensions.settings import Layout
from picotron_min.mesh import build_axes


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    tied = nn.Linear(6, 6)
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), tied, nn.Tanh(), tied).double()


def backward(model: nn.Module, micro_batch: int) -> None:
    generator = torch.Generator().manual_seed(100 * dist.get_rank() + micro_batch)
    model(torch.randn(4, 6, generator=generator, dtype=torch.float64)).square().sum().backward()


def make_buckets(model: nn.Module, bucket_bytes: int = 10**7) -> GradientBuckets:
    axis = build_axes(torch.device("cpu"), Layout(dp=dist.get_world_size())).dp_cp
    return GradientBuckets(dict(model.named_parameters()), axis, bucket_bytes=bucket_bytes)


def compare_with_one_all_reduce_per_parameter(bucket_bytes: int) -> None:
    naive, model = make_model(), make_model()
    buckets = make_buckets(model, bucket_bytes)
    calls = buckets.axis.ledger.calls
    for step in range(2):
        naive.zero_grad()
        buckets.begin(2)
        calls.clear()
        for micro_batch in range(2):
            assert not calls["all_reduce"], "sent before the last micro-batch"
            backward(naive, 10 * step + micro_batch)
            backward(model, 10 * step + micro_batch)
        buckets.wait()
        for ours, theirs in zip(model.parameters(), naive.parameters(), strict=True):
            dist.all_reduce(theirs.grad)
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=1e-10)
        assert calls["all_reduce"] == len(buckets.buckets)
    assert (len(buckets.buckets) > 1) == (bucket_bytes < 10**9)


@pytest.mark.parametrize("n,bucket_bytes", [(1, 340), (2, 1), (3, 340), (2, 10**9)])
def test_buckets_equal_one_all_reduce_per_parameter(pool, n, bucket_bytes):
    pool.run(n, compare_with_one_all_reduce_per_parameter, bucket_bytes)


def missing_gradients() -> list[str]:
    model, messages = make_model(), []
    model[1].unused = nn.Linear(3, 3, dtype=torch.float64)
    buckets = make_buckets(model)
    for backwards in (1, 2):  # of two
        buckets.begin(2)
        for micro_batch in range(backwards):
            backward(model, micro_batch)
        with pytest.raises(RuntimeError) as error:
            buckets.wait()
        messages.append(str(error.value))
    with pytest.raises(AssertionError, match=r"2\.bias: torch\.bfloat16"):
        make_buckets(model.bfloat16())
    return messages


def test_missing_gradients_are_named_and_bfloat16_parameters_refused(pool):
    for early, late in pool.run(2, missing_gradients):
        assert "2.weight (1)" in early
        assert "for 1.unused.bias (2), 1.unused.weight (2): every parameter" in late
