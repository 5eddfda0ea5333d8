"""A linear's three products, and the queue of weight gradients."""

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
    torch.testing.assert_close(y2, 2 * y)
    torch.testing.assert_close(dx2, 3 * dx)
    torch.testing.assert_close(model.weight.grad, 5 * plain.weight.grad)


@pytest.mark.parametrize("with_queue", [False, True], ids=["autograd", "queue"])
def test_with_copies_products_are_in_bfloat16_and_gradients_in_float32(with_queue):
    model = two_layers(torch.float32)
    apply_copies(model, torch.bfloat16)
    if with_queue:
        apply_queue(model, WeightGradients())
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


def test_copies_follow_the_weights_when_they_are_refreshed():
    model = two_layers(torch.float32)
    apply_copies(model, torch.bfloat16)
    with torch.no_grad():
        model[0].weight += 1
    assert not torch.equal(model[0].copy.float(), model[0].weight.bfloat16().float())
    for linear in linears(model).values():
        linear.refresh()
    assert torch.equal(model[0].copy, model[0].weight.bfloat16())
