"""Weight gradients that are added where they lie, in float32, against sums in float64."""

import pytest
import torch
from torch import Tensor

from picotron_min.extensions.overlap.linear import (
    WeightGradients,
    apply_copies,
    apply_queue,
)
from tests.training import new_linear

OUT, IN, TOKENS = 8, 16, 40


def factors(dtype: torch.dtype, rows: int = TOKENS) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, IN).to(dtype), torch.randn(rows, OUT).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_micro_batches_are_added_to_what_is_there(dtype):
    torch.manual_seed(0)
    linear, arrived = new_linear(IN, OUT), []
    buffer = torch.randn(OUT * IN + 5)  # as a bucket, not zero, and with others behind it
    linear.weight.grad = buffer[:-5].view(OUT, IN)
    expected, storage = buffer.double(), linear.weight.grad.data_ptr()
    if dtype == torch.bfloat16:
        apply_copies(linear, dtype)
    linear.gradient_arrived = lambda: arrived.append(1)
    apply_queue(linear, WeightGradients())
    for _ in range(3):
        x, dy = factors(dtype)
        linear(x.requires_grad_()).backward(dy)
        expected[:-5] += (dy.double().T @ x.detach().double()).flatten()
    assert len(arrived) == 3 and linear.weight.grad.data_ptr() == storage
    assert linear.copy is None or linear.copy.grad is None, "a gradient of the copy"
    # On a CPU a bfloat16 product is rounded before it is added.
    tolerance = 1e-6 if dtype == torch.float32 else 2**-8
    torch.testing.assert_close(buffer.double(), expected, rtol=0, atol=tolerance * 60)
    assert torch.equal(buffer[-5:].double(), expected[-5:]), "what lies behind it is another's"


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
