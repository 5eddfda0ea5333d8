"""Experts computed together: against the loop over them, and in 8 bits against rounded rows.

That N ranks train what one does is in test_layouts.py, sharded runs in test_pairs.py.
"""

from functools import partial

import pytest
import torch
from torch import Tensor

from picotron_min.dry_run.device import GPU, as_on_a_gpu
from picotron_min.extensions.experts.grouped import (
    Float8Stack,
    apply_grouped_experts,
    compute_together,
    has_kernel,
    replace_linears,
    run_together,
)
from picotron_min.extensions.experts.moe import MoE, apply_moe
from picotron_min.extensions.experts.router import RoutingCounts
from picotron_min.extensions.overlap.linear import (
    WeightGradients,
    apply_copies,
    apply_queue,
    linears,
    take_apart,
)
from picotron_min.extensions.precision.float8_rows import RowProducts
from picotron_min.extensions.settings import ModelConfig, Routing
from picotron_min.model import Llama

CONFIG = ModelConfig(61, 32, 48, 1, 4, 4, num_local_experts=4, moe_intermediate_size=16)
CPU = torch.device("cpu")
SIZES = [0, 9, 3, 2]


def make_experts(dtype: torch.dtype, grouped: bool, device: torch.device) -> MoE:
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


def output_and_gradients(sizes: list[int], *kind) -> list[Tensor]:
    moe, generator = make_experts(*kind), torch.Generator().manual_seed(1)
    dtype, _, device = kind
    rows = torch.randn(sum(sizes), 32, generator=generator).to(device, dtype).requires_grad_()
    weights = torch.rand(sum(sizes), generator=generator).to(device).requires_grad_()
    for _ in range(2):  # the second micro-batch adds to the first
        out = moe.run(rows, sizes, weights)
        out.backward(torch.randn(out.shape, generator=generator).to(device, dtype))
    return [out, rows.grad, weights.grad, *(x.weight.grad for x in linears(moe.experts).values())]


DTYPES = {torch.float32: (1e-5, 1e-6), torch.bfloat16: (0.02, 0.02)}  # rtol, atol


@pytest.mark.parametrize("sizes", [SIZES, [0, 0, 0, 0]], ids=str)
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


# In 8 bits.


def rounded(x: Tensor) -> Tensor:
    """What 8 bits leave of rows."""
    amax = x.abs().amax(-1, keepdim=True)
    scale = 2.0 ** (torch.frexp(448 / amax).exponent - 1)
    return (x * scale).to(torch.float8_e4m3fn).double() / scale


class Reference(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return rounded(x) @ rounded(weight).T

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        return rounded(dy) @ rounded(weight.T.contiguous()).T, dy.T @ x


@pytest.mark.parametrize("sizes", [SIZES, [0, 0, 0, 0]], ids=str)
def test_rows_and_new_weights_are_rounded_and_weight_gradients_are_not(sizes):
    moe, kind = MoE(CONFIG, Routing(), RoutingCounts(CONFIG, CPU), 0), torch.float64
    replace_linears(moe)
    options = {"queue": WeightGradients(), "has_kernel": False, "rows": RowProducts("cpu", kind)}
    compute_together(moe.double(), partial(Float8Stack, **options))
    torch.manual_seed(0)
    rows, weights, dy = (torch.randn(sum(sizes), n, dtype=kind) for n in (32, 1, 32))
    moe.run(rows, sizes, weights[:, 0])  # rounds the weights of before
    members = linears(moe.experts).values()
    for member in members:
        torch.nn.init.normal_(member.weight)
        member.refresh()
    results = []
    for run in (moe.run, MoE.run.__get__(moe)):
        x, w = rows.clone().requires_grad_(), weights[:, 0].clone().requires_grad_()
        out = run(x, sizes, w)
        out.backward(dy)
        results.append([out, x.grad, w.grad, *(member.weight.grad for member in members)])
        for member in members:
            member.weight.grad = None
            member.forward = lambda x, weight=member.weight: Reference.apply(x, weight)
    torch.testing.assert_close(*results, rtol=0, atol=1e-12)


def test_gpus_kernels_take_the_rows():
    """Hopper's for all experts, and others' for each."""
    products, kind = RowProducts("cuda", torch.bfloat16), {"dtype": torch.bfloat16, "device": GPU}
    with as_on_a_gpu():
        x, w = torch.empty(sum(SIZES), 32, **kind), torch.empty(4, 48, 32, **kind)
        ends = torch.tensor(SIZES, device=GPU).cumsum(0).int()
        for weights in (w, torch.empty(4, 32, 48, **kind).mT):  # W, and the transpose of another
            pair = products.quantise(x), products.quantise(weights)
            for y in (products.in_groups(*pair, ends), products.one_by_one(*pair, SIZES)):
                assert y.shape == (sum(SIZES), 48) and y.dtype == torch.bfloat16


@pytest.mark.gpu
def test_a_gpu_multiplies_rows_as_a_cpu_does():
    """Also groups that begin at no multiple of 16, and empty ones."""
    products, kind = RowProducts("cuda", torch.bfloat16), {"dtype": torch.bfloat16}
    x, w = torch.randn(sum(SIZES), 64, **kind), torch.randn(4, 48, 64, **kind)
    pair = products.quantise(x), products.quantise(w)
    expected = RowProducts("cpu", torch.float32).one_by_one(*pair, SIZES)
    pair = products.quantise(x.cuda()), products.quantise(w.cuda())
    results = [products.one_by_one(*pair, SIZES)]
    if has_kernel(torch.device("cuda", 0), torch.bfloat16):
        ends = torch.tensor(SIZES).cumsum(0).int().cuda()
        results.append(products.in_groups(*pair, ends))
    for y in results:
        torch.testing.assert_close(y.cpu().float(), expected, rtol=0.01, atol=0.01)
