"""The loss against torch's cross entropy; with a split vocabulary it is in test_layouts.py."""

import pytest
import torch
import torch.nn.functional as F

from picotron_min.layout import STRIPE_ROWS
from picotron_min.loss import IGNORE_INDEX, Vocabulary, head_loss, stripe_loss

N, E, V = 23, 8, 17


def inputs(dtype=torch.float64) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(N, E, generator=generator, dtype=dtype)
    weight = torch.randn(V, E, generator=generator, dtype=dtype)
    targets = torch.randint(V, (N,), generator=generator)
    targets[[3, N - 1]] = IGNORE_INDEX
    return x, weight, targets


def gradients(loss: torch.Tensor, *of: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(loss, of)


def close(ours, theirs, atol=1e-12):
    torch.testing.assert_close(ours, theirs, rtol=0, atol=atol)


@pytest.mark.quick
@pytest.mark.parametrize("stripe_rows", [1, 7, 1000])
@pytest.mark.parametrize("form", [lambda loss: 0.3 * loss, torch.square])
def test_head_loss_and_its_gradients_equal_torch(stripe_rows, form, monkeypatch):
    monkeypatch.setitem(STRIPE_ROWS, "cpu", stripe_rows)
    x, weight, targets = inputs()
    x.requires_grad_(), weight.requires_grad_()
    before = [t.clone() for t in (x, weight, targets)]
    ours = head_loss(x, weight, targets, stripe_loss)
    theirs = F.cross_entropy(x @ weight.T, targets, reduction="sum")
    close(ours, theirs)
    of_ours, of_theirs = (gradients(form(loss), x, weight) for loss in (ours, theirs))
    for a, b in zip(of_ours, of_theirs, strict=True):
        close(a, b, atol=1e-10)
    assert all(map(torch.equal, (x, weight, targets), before)), "inputs are not changed"


def test_large_logits_do_not_overflow_and_ignored_rows_have_no_gradient():
    logits = torch.tensor([[1e4, -1e4, 0.0], [88.0, 89.0, 90.0], [3.0, 2.0, 1.0]])
    targets = torch.tensor([1, 2, IGNORE_INDEX])
    losses, gradient = stripe_loss(logits, torch.eye(3), targets, Vocabulary())
    close(losses, F.cross_entropy(logits, targets, reduction="none"), atol=1e-5)
    assert gradient.isfinite().all() and gradient[2].abs().sum() == 0


def test_a_second_backward_is_refused_and_none_is_prepared_without_gradients():
    x, weight, targets = inputs()
    loss = head_loss(x.requires_grad_(), weight, targets, stripe_loss)
    loss.backward(retain_graph=True)
    with pytest.raises(AssertionError, match="one backward only"):
        loss.backward()
    with torch.no_grad():
        assert not head_loss(x, weight, targets, stripe_loss).requires_grad


def test_bfloat16_statistics_are_in_float32(monkeypatch):
    monkeypatch.setitem(STRIPE_ROWS, "cpu", 8)
    x, weight, targets = inputs(torch.float32)
    weight.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        loss = head_loss(x, weight, targets, stripe_loss)
    logits = (x.bfloat16() @ weight.bfloat16().T).float()
    close(loss, F.cross_entropy(logits, targets, reduction="sum"), atol=1e-4)
    (gradient,) = gradients(loss, weight)
    assert gradient.dtype == torch.float32
    assert not torch.equal(gradient, gradient.bfloat16().float()), "the sum over stripes is rounded"
