"""Experts computed together against the loop over them."""

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from picotron_min.extensions.experts import grouped as grouped_experts
from picotron_min.extensions.experts.grouped import (
    LEAST_IN_PLACE,
    apply_grouped_experts,
    has_kernel,
    joined_view,
    run_together,
)
from picotron_min.extensions.experts.moe import apply_moe
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
from tests.extensions.test_experts import MODELS, make_expert_config

CONFIG = ModelConfig(61, 32, 48, 1, 4, 4, num_local_experts=4, moe_intermediate_size=16)
TOLERANCE = {torch.float32: 1e-7, torch.bfloat16: 0.0}
CPU = torch.device("cpu")


def make_experts(dtype: torch.dtype, grouped: bool, device: torch.device = CPU):
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


class GroupedProducts(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += "grouped_mm" in str(function)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("least", [LEAST_IN_PLACE, 1])
@pytest.mark.parametrize("sizes", [[3, 4, 2, 5], [0, 9, 0, 2], [0, 0, 0, 0]], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_experts_equal_the_loop(monkeypatch, dtype, sizes, least):
    monkeypatch.setattr(grouped_experts, "LEAST_IN_PLACE", least)
    results = []
    for grouped in (False, True):
        moe, generator = make_experts(dtype, grouped), torch.Generator().manual_seed(1)
        rows = torch.randn(sum(sizes), 32, generator=generator).to(dtype).requires_grad_()
        weights = torch.rand(sum(sizes), generator=generator).requires_grad_()
        out = moe.run(rows, sizes, weights)
        dy = torch.randn(out.shape, generator=generator).to(dtype)
        with GroupedProducts() as products:
            out.backward(dy)
        gradients = [x.weight.grad for x in linears(moe.experts).values()]
        results.append([out, rows.grad, weights.grad, *gradients])
    for theirs, ours in zip(*results, strict=True):
        # The order of a sum depends on the shape: seen in float32, hidden by 16 bits.
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=TOLERANCE[dtype])
    # For dx, and for weights where torch cannot add a product in place, or matrices are small.
    assert products.count == (3 if dtype == torch.float32 and least == 1 else 6)
    assert any(gradient.any() for gradient in gradients) == any(sizes)


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [[40, 0, 5, 83], [0, 0, 0, 16]], ids=str)
def test_grouped_experts_equal_the_loop_on_a_gpu(sizes):
    device, dtype, results = torch.device("cuda", 0), torch.bfloat16, []
    if not has_kernel(device, dtype):
        pytest.skip("this GPU runs the loop")
    for grouped in (False, True):
        moe, generator = make_experts(dtype, grouped, device), torch.Generator().manual_seed(1)
        rows = torch.randn(sum(sizes), 32, generator=generator).to(device, dtype).requires_grad_()
        out = moe.run(rows, sizes, torch.rand(sum(sizes), generator=generator).to(device))
        out.backward(torch.randn(out.shape, generator=generator).to(device, dtype))
        gradients = [x.weight.grad for x in linears(moe.experts).values()]
        results.append([out, rows.grad, *gradients])
    for loop, ours in zip(*results, strict=True):
        assert (ours.double() - loop.double()).norm() <= 0.02 * loop.double().norm()  # 0: is 0


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0), (12, 0)])
def test_only_hopper_multiplies_groups_and_only_in_bfloat16(monkeypatch, capability):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    dtypes = torch.bfloat16, torch.float32, torch.float64
    on_gpu = [has_kernel(torch.device("cuda", 0), dtype) for dtype in dtypes]
    assert on_gpu == [capability == (9, 0), False, False]
    assert [has_kernel(CPU, dtype) for dtype in dtypes] == [True, True, False]


def losses_and_weights(config, with_groups: bool) -> tuple[list[float], dict]:
    training = make_training(config, MODELS["softmax"])
    layers = training.chunks[0].model.model.layers.values()
    for moe in (layer.mlp for layer in layers):
        assert moe.run.func is run_together
        if not with_groups:
            del moe.run  # the loop, of the class
    losses = [training.step(step).loss for step in range(3)]
    if config.distributed.sharding == "none":  # one addition for all experts
        for moe in (layer.mlp for layer in layers):
            gradients = [expert.up_proj.weight.grad for expert in moe.experts.values()]
            joined = joined_view(gradients)
            assert len(joined) == len(gradients) > 1
            assert all(map(torch.equal, joined, gradients))
    return losses, {name: p.data.numpy() for name, p in training.parameters.items()}


@pytest.mark.parametrize(
    "dtype,sharding",
    [
        ("float32", "none"),
        ("bfloat16", "none"),
        ("bfloat16", "optimizer"),
        ("float32", "parameters"),
    ],
)
def test_a_run_with_grouped_experts_equals_one_with_the_loop(pool, dtype, sharding):
    config = make_expert_config(dp=2, dtype=dtype, sharding=sharding)
    grouped, loop = (pool.run(2, losses_and_weights, config, use)[0] for use in (True, False))
    assert grouped[0] == pytest.approx(loop[0], rel=1e-6)
    for name, weight in loop[1].items():
        np.testing.assert_allclose(grouped[1][name], weight, rtol=1e-5, atol=1e-6, err_msg=name)
