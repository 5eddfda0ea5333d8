"""Weight gradients that are added where they lie, in float32, against sums in float64."""

from itertools import accumulate, pairwise

import pytest
import torch
from torch import Tensor

from picotron_min.extensions.experts.grouped import Stack
from picotron_min.extensions.overlap.linear import (
    Linear,
    WeightGradients,
    apply_copies,
    apply_queue,
)
from tests.training import new_linear

OUT, IN, TOKENS = 8, 16, 40


def gradient_view(linears: list[Linear], dtype: torch.dtype) -> Tensor:
    """Let the gradients be views of a buffer, as in a bucket; it is not zero, and has an end."""
    size = OUT * IN
    buffer = torch.randn(len(linears) * size + 5).to(dtype)
    for linear, start in zip(linears, range(0, len(buffer) - 5, size), strict=True):
        linear.weight.grad = buffer[start : start + size].view(OUT, IN)
    return buffer


def factors(dtype: torch.dtype, rows: int = TOKENS) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, IN).to(dtype), torch.randn(rows, OUT).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_micro_batches_are_added_to_what_is_there(dtype):
    torch.manual_seed(0)
    linear, arrived = new_linear(IN, OUT), []
    buffer = gradient_view([linear], torch.float32)
    expected, storage = buffer.double(), linear.weight.grad.data_ptr()
    if dtype == torch.bfloat16:
        apply_copies(linear, dtype)
    linear.gradient_arrived = lambda: arrived.append(1)
    apply_queue(linear, WeightGradients())
    for _ in range(3):
        x, dy = factors(dtype)
        linear(x.requires_grad_()).backward(dy)
        expected[: OUT * IN] += (dy.double().T @ x.detach().double()).flatten()
    assert len(arrived) == 3 and linear.weight.grad.data_ptr() == storage
    assert linear.copy is None or linear.copy.grad is None, "a gradient of the copy"
    # On a CPU a bfloat16 product is rounded before it is added.
    tolerance = 1e-6 if dtype == torch.float32 else 2**-8
    torch.testing.assert_close(buffer.double(), expected, rtol=0, atol=tolerance * 60)
    assert torch.equal(buffer[-5:].double(), expected[-5:]), "what lies behind it is another's"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_without_tokens_add_nothing_and_arrive(dtype):
    torch.manual_seed(0)
    experts, arrived = [new_linear(IN, OUT) for _ in range(4)], []
    for number, expert in enumerate(experts):
        expert.gradient_arrived = lambda number=number: arrived.append(number)
    buffer = gradient_view(experts, torch.float32)
    expected = buffer.double()
    stack = Stack(experts, WeightGradients())
    for sizes in ([7, 0, 20, 13], [0, 0, 40, 0], [16, 8, 0, 16]):
        x, dy = factors(dtype)
        stops = [0, *accumulate(sizes)]
        stack.add_weight_gradient((x, torch.tensor(stops[1:]).int()), dy)
        for number, (first, stop) in enumerate(pairwise(stops)):
            product = dy[first:stop].double().T @ x[first:stop].double()
            expected[number * OUT * IN :][: OUT * IN] += product.flatten()
    assert arrived == [0, 1, 2, 3] * 3
    tolerance = 1e-6 if dtype == torch.float32 else 2**-8
    torch.testing.assert_close(buffer.double(), expected, rtol=0, atol=tolerance * 60)
    assert torch.equal(buffer[-5:].double(), expected[-5:])


@pytest.mark.gpu
def test_a_gpu_adds_a_product_of_bfloat16_to_float32():
    torch.manual_seed(0)
    linear = new_linear(IN, OUT).cuda()
    expected = torch.randn(OUT, IN).cuda()
    linear.weight.grad = expected.clone()
    for _ in range(3):
        x, dy = (t.cuda() for t in factors(torch.bfloat16))
        linear.add_weight_gradient(x, dy)
        expected = expected + (dy.double().T @ x.double())
    torch.testing.assert_close(linear.weight.grad.double(), expected, rtol=0, atol=1e-4)
