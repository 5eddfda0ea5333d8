"""Experts in 8 bits beside a reference that rounds rows; GPUs' kernels on fake tensors.

That N ranks train what one does is in test_layouts.py.
"""

import pytest
import torch
from torch import Tensor

from picotron_min.dry_run.device import GPU, as_on_a_gpu
from picotron_min.extensions.experts.float8_experts import replace_linears, run_in_8_bits
from picotron_min.extensions.experts.grouped import has_kernel
from picotron_min.extensions.experts.moe import MoE, mixtures
from picotron_min.extensions.experts.router import RoutingCounts
from picotron_min.extensions.overlap.linear import WeightGradients, linears
from picotron_min.extensions.precision.float8_rows import row_products
from picotron_min.extensions.settings import ModelConfig, Routing
from tests.assembled import make_training
from tests.rows import row

CONFIG = ModelConfig(61, 32, 48, 1, 4, 4, num_local_experts=4, moe_intermediate_size=16)
SIZES = [0, 9, 3, 2]


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


@pytest.mark.parametrize("sizes", [[0, 9, 3, 2], [0, 0, 0, 0]], ids=str)
def test_rows_and_weights_are_rounded_and_weight_gradients_are_not(sizes):
    moe, kind = MoE(CONFIG, Routing(), RoutingCounts(CONFIG, torch.device("cpu")), 0), torch.float64
    replace_linears(moe)
    run_in_8_bits(moe.double(), WeightGradients(), kind, row_products("cpu", kind), False)
    torch.manual_seed(0)
    members = linears(moe.experts).values()
    for member in members:
        torch.nn.init.normal_(member.weight)
        member.refresh()
    rows, weights, dy = (torch.randn(sum(sizes), n, dtype=kind) for n in (32, 1, 32))
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


def bytes_and_new_bytes(text: str) -> list[tuple[Tensor, Tensor]]:
    training, pairs = make_training(*row(text)), []
    training.step(0)
    training.evaluate()  # with the new weights
    for stack in mixtures(training.chunks[0].model)[0].run.args:
        weights = torch.stack([member.weight for member in stack.linears]).detach()
        pairs.append((stack.rounded[0].bytes, stack.rows.quantise(weights).bytes))
    return pairs


def test_an_update_rounds_the_weights_again(pool):
    for text in (
        "precision: fp8_experts model=softmax",
        "precision: fp8_experts dp=2 sharding=optimizer model=softmax",
    ):
        for ours, new in pool.run(1 + ("dp=2" in text), bytes_and_new_bytes, text)[0]:
            assert torch.equal(ours, new)


def test_gpus_kernels_take_the_rows():
    """Hopper's for all experts, and others' for each."""
    products, kind = row_products("cuda", torch.bfloat16), {"dtype": torch.bfloat16, "device": GPU}
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
    products, kind = row_products("cuda", torch.bfloat16), {"dtype": torch.bfloat16}
    x, w = torch.randn(sum(SIZES), 64, **kind), torch.randn(4, 48, 64, **kind)
    pair = products.quantise(x), products.quantise(w)
    expected = row_products("cpu", torch.float32).one_by_one(*pair, SIZES)
    pair = products.quantise(x.cuda()), products.quantise(w.cuda())
    results = [products.one_by_one(*pair, SIZES)]
    if has_kernel(torch.device("cuda", 0), torch.bfloat16):
        ends = torch.tensor(SIZES).cumsum(0).int().cuda()
        results.append(products.in_groups(*pair, ends))
    for y in results:
        torch.testing.assert_close(y.cpu().float(), expected, rtol=0.01, atol=0.01)
