"""Our cross entropies against torch's, whole and with the vocabulary split over ranks."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from picotron_min.loss import IGNORE_INDEX, Vocabulary, cross_entropy, head_loss

N, E, V = 23, 8, 17


def inputs(dtype=torch.float64) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(N, E, generator=generator, dtype=dtype)
    weight = torch.randn(V, E, generator=generator, dtype=dtype)
    targets = torch.randint(V, (N,), generator=generator)
    targets[:V] = torch.arange(V)  # the first and the last id of every slice, whatever the split
    targets[[3, N - 1]] = IGNORE_INDEX
    upstream = torch.rand(N, generator=generator, dtype=dtype)  # a weight for each token
    return x, weight, targets, upstream


def gradients(loss: torch.Tensor, *of: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(loss, of)


def close(ours, theirs, atol=1e-12):
    torch.testing.assert_close(ours, theirs, rtol=0, atol=atol)


@pytest.mark.parametrize("chunk_rows", [1, 7, 23, 1000])
@pytest.mark.parametrize("form", [lambda loss: loss, lambda loss: 0.3 * loss, torch.square])
def test_head_loss_and_its_gradients_equal_torch(chunk_rows, form):
    x, weight, targets, _ = inputs()
    x.requires_grad_(), weight.requires_grad_()
    ours = head_loss(x, weight, targets, chunk_rows=chunk_rows)
    theirs = F.cross_entropy(x @ weight.T, targets, reduction="sum")
    close(ours, theirs)
    for a, b in zip(
        gradients(form(ours), x, weight), gradients(form(theirs), x, weight), strict=True
    ):
        close(a, b, atol=1e-10)


@pytest.mark.parametrize("in_place", [False, True])
def test_token_losses_and_their_gradients_equal_torch(in_place):
    x, weight, targets, upstream = inputs()
    # not contiguous: every second column of a wider matrix
    logits = (x @ weight.T).repeat_interleave(2, dim=1)[:, ::2].requires_grad_()
    theirs = F.cross_entropy(logits, targets, reduction="none")
    expected = gradients((theirs * upstream).sum(), logits)
    ours = cross_entropy(logits, targets, in_place=in_place)
    close(ours, theirs)
    close(gradients((ours * upstream).sum(), logits), expected)


def test_token_losses_leave_the_logits_alone_unless_told():
    x, weight, targets, _ = inputs()
    logits = x @ weight.T
    before = logits.clone()
    cross_entropy(logits, targets)
    assert torch.equal(logits, before)
    cross_entropy(logits, targets, in_place=True)
    assert not torch.equal(logits, before)


def test_large_logits_do_not_overflow_and_ignored_rows_have_no_gradient():
    logits = torch.tensor([[1e4, -1e4, 0.0], [88.0, 89.0, 90.0], [3.0, 2.0, 1.0]]).requires_grad_()
    targets = torch.tensor([1, 2, IGNORE_INDEX])
    losses = cross_entropy(logits, targets)
    close(losses, F.cross_entropy(logits, targets, reduction="none"), atol=1e-5)
    (gradient,) = gradients(losses.sum(), logits)
    assert gradient.isfinite().all() and gradient[2].abs().sum() == 0


def test_a_second_backward_is_refused():
    x, weight, targets, _ = inputs()
    loss = head_loss(x.requires_grad_(), weight, targets)
    loss.backward(retain_graph=True)
    with pytest.raises(AssertionError, match="one backward only"):
        loss.backward()


def test_nothing_is_kept_for_backward_without_gradients():
    x, weight, targets, _ = inputs()
    weight.requires_grad_()
    with torch.no_grad():
        loss = head_loss(x, weight, targets)
    assert not loss.requires_grad
    close(loss, F.cross_entropy(x @ weight.T, targets, reduction="sum"))


def test_bfloat16_statistics_are_in_float32():
    x, weight, targets, _ = inputs(torch.float32)
    weight.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        loss = head_loss(x, weight, targets, chunk_rows=8)
    assert loss.dtype == torch.float32
    logits = (x.bfloat16() @ weight.bfloat16().T).float()
    close(loss, F.cross_entropy(logits, targets, reduction="sum"), atol=1e-4)
    (gradient,) = gradients(loss, weight)
    assert gradient.dtype == torch.float32
    assert not torch.equal(gradient, gradient.bfloat16().float()), "the sum over chunks was rounded"


def reduced(op: dist.ReduceOp):
    def reduce(x: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(x, op)
        return x

    return reduce


def split_losses(chunk_rows: int) -> list[float]:
    """The largest differences of a rank's slice from the whole computed by torch."""
    x, weight, targets, upstream = inputs()
    rank, size = dist.get_rank(), dist.get_world_size()
    rows = torch.arange(V).chunk(size)[rank]
    vocabulary = Vocabulary(rows[0].item(), reduced(dist.ReduceOp.MAX), reduced(dist.ReduceOp.SUM))
    x.requires_grad_(), weight.requires_grad_()
    logits = x @ weight.T
    theirs = F.cross_entropy(logits, targets, reduction="none")
    dx, dw = gradients(theirs.sum().square(), x, weight)

    mine = weight.detach()[rows].requires_grad_()
    loss = head_loss(x, mine, targets, vocabulary, chunk_rows)
    my_dx, my_dw = gradients(loss.square(), x, mine)
    dist.all_reduce(my_dx)

    theirs = F.cross_entropy(logits, targets, reduction="none")
    (dlogits,) = gradients((theirs * upstream).sum(), logits)
    my_logits = logits.detach()[:, rows].requires_grad_()
    ours = cross_entropy(my_logits, targets, vocabulary)
    (my_dlogits,) = gradients((ours * upstream).sum(), my_logits)
    pairs = [(loss, theirs.sum()), (my_dx, dx), (my_dw, dw[rows]), (ours, theirs)]
    pairs.append((my_dlogits, dlogits[:, rows]))
    return [(a - b).abs().max().item() for a, b in pairs]


@pytest.mark.parametrize("chunk_rows", [5, 1000])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_split_vocabulary_gives_the_same_losses_and_gradients(pool, size, chunk_rows):
    for differences in pool.run(size, split_losses, chunk_rows):
        assert max(differences) < 1e-10
