"""Gradient buckets against the obvious reference; benchmarks/ compares them with torch's DDP."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from picotron_min.collectives import Axis
from picotron_min.data_parallel import GradientBuckets
from picotron_min.extensions.settings import Layout, ModelConfig
from picotron_min.mesh import build_axes
from picotron_min.model import Llama
from picotron_min.optimizer import measure_gradient
from picotron_min.placement import Placement

CONFIG = ModelConfig(61, 32, 48, 2, 4, 2)


def make_model(dtype: torch.dtype = torch.float64, tied: bool = False) -> Llama:
    torch.manual_seed(0)
    model = Llama(CONFIG.override(tie_word_embeddings=tied)).to(dtype)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    return model


def backward(model: nn.Module, micro_batch: int) -> None:
    generator = torch.Generator().manual_seed(100 * dist.get_rank() + micro_batch)
    tokens, targets = torch.randint(CONFIG.vocab_size, (2, 2, 12), generator=generator)
    model(tokens, torch.arange(12), targets).backward()


def dp_axis() -> Axis:
    return build_axes(torch.device("cpu"), Layout(dp=dist.get_world_size())).dp_cp


def make_buckets(model: nn.Module, bucket_bytes: int = 10**7) -> GradientBuckets:
    return GradientBuckets(dict(model.named_parameters()), dp_axis(), bucket_bytes=bucket_bytes)


def difference_to_naive(tied: bool, bucket_bytes: int) -> tuple[float, int, int, float]:
    """To one blocking all-reduce per parameter after backward; and what a step sends."""
    naive, model, largest = make_model(tied=tied), make_model(tied=tied), 0.0
    buckets = make_buckets(model, bucket_bytes)
    ledger = buckets.axis.ledger
    for step in range(2):
        naive.zero_grad()
        buckets.begin(3)
        ledger.calls.clear(), ledger.bytes.clear()
        for micro_batch in range(3):
            assert ledger.calls["all_reduce"] == 0, "sent before the last micro-batch"
            backward(naive, 10 * step + micro_batch)
            backward(model, 10 * step + micro_batch)
        for parameter in naive.parameters():
            dist.all_reduce(parameter.grad, group=buckets.axis.group)
        buckets.wait()
        for ours, theirs in zip(model.parameters(), naive.parameters(), strict=True):
            assert ours.grad.abs().max() > 0
            largest = max(largest, (ours.grad - theirs.grad).abs().max().item())
    sent = ledger.bytes["all_reduce"] / sum(p.numel() for p in model.parameters())
    return largest, ledger.calls["all_reduce"], len(buckets.buckets), sent


@pytest.mark.parametrize(
    "n,bucket_bytes,tied",
    [(1, 20_000, True), (2, 1, True), (3, 20_000, False), (4, 10**9, True), (8, 20_000, True)],
)
def test_buckets_equal_one_all_reduce_per_parameter_and_send_each_gradient_once(
    pool, n, bucket_bytes, tied
):
    for largest, calls, count, sent in pool.run(n, difference_to_naive, tied, bucket_bytes):
        assert largest < 1e-10 and (count > 3) == (bucket_bytes < 10**9)
        assert n == 1 or (calls == count and sent == pytest.approx(2 * (n - 1) / n * 8))


def names_when_buckets_start() -> list[list[str]]:
    """For each bucket: the parameters whose gradients had not arrived when it was sent."""
    model, missing_when_started = make_model(), []
    buckets = make_buckets(model, 40_000)
    start = buckets._start_complete_buckets

    def observe():
        before = len(buckets.works)
        start()
        if len(buckets.works) > before:
            missing_when_started.append([name for name, n in buckets.missing.items() if n])

    buckets._start_complete_buckets = observe
    buckets.begin(1)
    backward(model, 0)
    buckets.wait()
    return missing_when_started


def test_buckets_are_sent_while_backward_still_runs(pool):
    for missing_when_started in pool.run(2, names_when_buckets_start):
        # The first is sent when the last layer is done and the first layer has not begun.
        assert "model.layers.0.mlp.down_proj.weight" in missing_when_started[0]
        assert not any("layers.1.mlp" in name for name in missing_when_started[1])
        assert missing_when_started[-1] == []


def missing_gradients() -> list[str]:
    model, messages = make_model(), []
    model.unused = nn.Linear(3, 3, dtype=torch.float64)
    buckets = make_buckets(model)
    for backwards in (1, 2):  # of two
        buckets.begin(2)
        for micro_batch in range(backwards):
            backward(model, micro_batch)
        with pytest.raises(RuntimeError) as error:
            buckets.wait()
        messages.append(str(error.value))
    with pytest.raises(AssertionError, match=r"unused.bias: torch.bfloat16"):
        make_buckets(model.bfloat16())
    return messages


def test_missing_gradients_are_named_and_bfloat16_parameters_refused(pool):
    for early, late in pool.run(2, missing_gradients):
        assert "lm_head.weight (1)" in early
        assert "for unused.bias (2), unused.weight (2): every parameter" in late


def error_of_the_norm() -> float:
    parameters = {str(i): nn.Parameter(torch.randn(500, 400)) for i in range(30)}
    GradientBuckets(parameters, dp_axis())
    for parameter in parameters.values():
        parameter.grad.normal_(std=1e-4)
    everywhere = Placement((), copies=(), sums=())
    norm = measure_gradient(parameters, dict.fromkeys(parameters, everywhere), {})[0].sqrt()
    exact = torch.cat([p.grad.flatten() for p in parameters.values()]).double().norm()
    return abs(norm / exact - 1).item()


def test_the_norm_of_the_gradients_of_a_large_model_is_exact_to_five_digits(pool):
    assert pool.run(1, error_of_the_norm)[0] < 1e-5  # over the flat buckets: 1.7e-4
