"""Experts computed together against the loop over them."""

import pytest
import torch

from picotron_min.extensions.experts.grouped import (
    apply_grouped_experts,
    has_kernel,
    run_together,
)
from picotron_min.extensions.experts.moe import apply_moe, mixtures
from picotron_min.extensions.experts.router import RoutingCounts
from picotron_min.extensions.overlap.linear import (
    WeightGradients,
    apply_copies,
    apply_queue,
    linears,
    take_apart,
)
from picotron_min.extensions.settings import ModelConfig, Routing
from picotron_min.model import Llama
from tests.assembled import make_training
from tests.rows import row

CONFIG = ModelConfig(61, 32, 48, 1, 4, 4, num_local_experts=4, moe_intermediate_size=16)
CPU = torch.device("cpu")


def make_experts(dtype: torch.dtype, grouped: bool, device: torch.device):
    torch.manual_seed(0)
    with device:
        model = Llama(CONFIG)
        apply_moe(model, Routing(), RoutingCounts(CONFIG, device))
    moe, queue = model.model.layers["0"].mlp, WeightGradients()
    take_apart(model)
    if dtype == torch.bfloat16:
        apply_copies(model, dtype)
    values = {name: linear.weight.data.clone() for name, linear in linears(model).items()}
    if grouped:
        apply_grouped_experts(model, dtype, 1, queue)
        assert moe.run.func is run_together
    apply_queue(model, queue)
    for name, linear in linears(model).items():
        linear.weight.data.copy_(values[name])
        linear.weight.grad = torch.zeros_like(linear.weight)
        if linear.copy is not None:
            linear.copy.data.copy_(linear.weight)
    return moe


def output_and_gradients(sizes: list[int], *kind) -> list[torch.Tensor]:
    moe, generator = make_experts(*kind), torch.Generator().manual_seed(1)
    dtype, _, device = kind
    rows = torch.randn(sum(sizes), 32, generator=generator).to(device, dtype).requires_grad_()
    weights = torch.rand(sum(sizes), generator=generator).to(device).requires_grad_()
    for _ in range(2):  # the second micro-batch adds to the first
        out = moe.run(rows, sizes, weights)
        out.backward(torch.randn(out.shape, generator=generator).to(device, dtype))
    return [out, rows.grad, weights.grad, *(x.weight.grad for x in linears(moe.experts).values())]


DTYPES = {torch.float32: (1e-5, 1e-6), torch.bfloat16: (0.02, 0.02)}  # rtol, atol


@pytest.mark.parametrize("sizes", [[0, 9, 3, 2], [0, 0, 0, 0]], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_grouped_experts_equal_the_loop(dtype, sizes):
    loop, ours = (output_and_gradients(sizes, dtype, grouped, CPU) for grouped in (False, True))
    rtol, atol = DTYPES[dtype]
    for a, b in zip(ours, loop, strict=True):
        torch.testing.assert_close(a, b, rtol=rtol, atol=atol)
    assert any(gradient.any() for gradient in ours[3:]) == any(sizes)


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [[40, 0, 5, 83], [0, 0, 0, 16]], ids=str)
def test_grouped_experts_equal_the_loop_on_a_gpu(sizes):
    device, dtype = torch.device("cuda", 0), torch.bfloat16
    if not has_kernel(device, dtype):
        pytest.skip("this GPU runs the loop")
    results = [output_and_gradients(sizes, dtype, grouped, device) for grouped in (False, True)]
    for loop, ours in zip(*results, strict=True):
        assert (ours.double() - loop.double()).norm() <= 0.02 * loop.double().norm()  # 0: is 0


def losses_and_weights(text: str, with_groups: bool) -> tuple[list[float], dict]:
    training = make_training(*row(text))
    for moe in mixtures(training.chunks[0].model):
        assert moe.run.func is run_together
        if not with_groups:
            del moe.run  # the loop, of the class
    losses = [training.step(step).loss for step in range(3)]
    return losses, {name: p.data.clone() for name, p in training.parameters.items()}


def test_a_run_with_grouped_experts_equals_one_with_the_loop(pool):
    text = "experts: dp=2 model=softmax dtype=float32 sharding=parameters"
    (ours, weights), (losses, expected) = (
        pool.run(2, losses_and_weights, text, use)[0] for use in (True, False)
    )
    assert ours == pytest.approx(losses, rel=1e-6)
    torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-6)
