"""A linear's three products, the queue of weight gradients, and sums where they lie."""

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from picotron_min.extensions.overlap.linear import (
    WeightGradients,
    apply_copies,
    apply_queue,
    linears,
)
from tests.training import new_linear


def two_layers() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(new_linear(6, 10), nn.Tanh(), new_linear(10, 4)).double()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return model


def forward_and_backward(model: nn.Module) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    x = torch.randn(2, 3, 6, dtype=torch.float64, requires_grad=True)
    y = model(x)
    y.backward(torch.randn_like(y))
    return y, x.grad


@pytest.mark.quick
@pytest.mark.parametrize("hold", [False, True])
@pytest.mark.parametrize("split", [False, True])
def test_the_queue_gives_autograds_gradients_when_it_is_run(hold, split):
    expected, model, queue = two_layers(), two_layers(), WeightGradients()
    queue.hold, queue.split = hold, split
    apply_queue(model, queue)
    arrived, taken = [], []  # names of layers whose weight's gradient has grown, and queues
    for name, linear in linears(model).items():
        linear.gradient_arrived = partial(arrived.append, name)
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


# Where they lie: in float32, against sums in float64.

OUT, IN, TOKENS = 8, 16, 40


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
        x, dy = (torch.randn(TOKENS, size).to(dtype) for size in (IN, OUT))
        linear(x.requires_grad_()).backward(dy)
        expected[:-5] += (dy.double().T @ x.detach().double()).flatten()
    assert len(arrived) == 3 and linear.weight.grad.data_ptr() == storage
    assert linear.copy is None or linear.copy.grad is None, "a gradient of the copy"
    # On a CPU a bfloat16 product is rounded before it is added.
    tolerance = 1e-6 if dtype == torch.float32 else 2**-8
    torch.testing.assert_close(buffer.double(), expected, rtol=0, atol=tolerance * 60)
    assert torch.equal(buffer[-5:].double(), expected[-5:]), "what lies behind it is another's"
