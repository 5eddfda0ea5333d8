"""A linear's three products, the queue of weight gradients, and sums where they lie."""

import pytest
import torch
from torch import Tensor, nn

from picotron_min.extensions.overlap.linear import (
    Linear,
    WeightGradients,
    apply_copies,
    apply_queue,
    linears,
)
from tests.training import new_linear

X, DY = torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)


def two_layers(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(new_linear(6, 10), nn.Tanh(), new_linear(10, 4)).to(dtype)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return model


def forward_and_backward(model: nn.Module, dtype=torch.float64) -> tuple[Tensor, Tensor]:
    x = torch.randn(2, 3, 6, generator=X.manual_seed(1)).to(dtype).requires_grad_()
    y = model(x)
    y.backward(torch.randn(y.shape, generator=DY.manual_seed(2)).to(dtype))
    return y, x.grad


def arrivals(model: nn.Module) -> list[str]:
    """Names of layers, each when a gradient has been added to its weight's."""
    names = []
    for name, linear in linears(model).items():
        linear.gradient_arrived = lambda name=name: names.append(name)
    return names


@pytest.mark.quick
@pytest.mark.parametrize("hold", [False, True])
@pytest.mark.parametrize("split", [False, True])
def test_the_queue_gives_autograds_gradients_when_it_is_run(hold, split):
    expected, model, queue = two_layers(), two_layers(), WeightGradients()
    queue.hold, queue.split = hold, split
    apply_queue(model, queue)
    arrived, taken = arrivals(model), []
    for passes in (1, 2):  # the second adds to the first
        theirs, ours = forward_and_backward(expected), forward_and_backward(model)
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-14)
        assert len(queue) == (2 if hold or split else 0)
        queue.run_during_message()  # as tensor parallelism does
        assert len(queue) == (2 if split else 0)
        taken.append(queue.detach())
        assert not queue and arrived == ([] if split else ["2", "0"] * passes)
    for left in taken:
        left.run()  # outside of any backward
    assert arrived == ["2", "0"] * 2
    for a, b in zip(model.parameters(), expected.parameters(), strict=True):
        assert not a.grad.requires_grad, "it would keep what it was computed from"
        torch.testing.assert_close(a.grad, b.grad, rtol=0, atol=1e-14)


class Doubling(Linear):
    """Each product is replaced: what a user sees of it is twice as large, by another factor."""

    def product(self, x: Tensor) -> Tensor:
        return 2 * super().product(x)

    def input_gradient(self, dy: Tensor) -> Tensor:
        return 3 * super().input_gradient(dy)

    def add_weight_gradient(self, x: Tensor, dy: Tensor) -> None:
        super().add_weight_gradient(x, 5 * dy)


def test_each_of_the_three_products_can_be_replaced():
    plain, model = new_linear(6, 4), new_linear(6, 4, Doubling)
    for linear in (plain, model):
        nn.init.constant_(linear.weight, 0.5)
        linear.weight.grad = torch.zeros_like(linear.weight)
        apply_queue(linear, WeightGradients())
    (y, dx), (y2, dx2) = (forward_and_backward(m, torch.float32) for m in (plain, model))
    for ours, theirs in ((y2, 2 * y), (dx2, 3 * dx), (model.weight.grad, 5 * plain.weight.grad)):
        torch.testing.assert_close(ours, theirs)


def test_with_copies_products_are_in_bfloat16_and_gradients_in_float32():
    model = two_layers(torch.float32)
    apply_copies(model, torch.bfloat16)  # products are autograd's; with a queue, see below
    arrived = arrivals(model)
    exact = two_layers()
    for _ in range(2):  # the second adds to the first, once
        y, _ = forward_and_backward(model, torch.bfloat16)
        forward_and_backward(exact)
    assert y.dtype == torch.bfloat16 and arrived == ["2", "0"] * 2
    for ours, theirs in zip(model.parameters(), exact.parameters(), strict=True):
        assert ours.dtype == ours.grad.dtype == torch.float32
        error = (ours.grad - theirs.grad).norm() / theirs.grad.norm()
        assert 0 < error < 0.02
    assert set(dict(model.named_parameters())) == {"0.weight", "2.weight"}, "copies are not saved"


# Where they lie: in float32, against sums in float64.

OUT, IN, TOKENS = 8, 16, 40


def factors(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return torch.randn(TOKENS, IN).to(dtype), torch.randn(TOKENS, OUT).to(dtype)


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
