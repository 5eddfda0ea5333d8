"""Cross entropy without the logits of a whole micro-batch, and with the vocabulary split or not.

With a vocabulary of 128k, the logits of 8k tokens are 4 GB in float32, and their gradient is as
much again: more than the rest of a small model. But a token's loss needs its own logits only. So
rows (tokens) are taken in chunks, and for each chunk, while its logits exist, everything is done
that will be needed of them: the loss, and the gradients of both factors of the product.

    for each chunk of rows:   logits = x w^T  ->  loss  ->  p - onehot  ->  dx = (p - onehot) w
                                                                             dw += (p - onehot)^T x

Backward then only multiplies by the upstream gradient. That is a trade: dw is kept from forward to
backward (4 bytes per element of w, and that for each micro-batch that is alive in a pipeline), and
no logit is computed twice.

The vocabulary may be split over ranks, each holding some rows of w. The softmax needs two numbers
of the other ranks per token, the largest logit and the sum of exponentials; the target's logit is
a third, which one rank knows. A `Vocabulary` says which rows are here and how to reach the others.

Source: the chunking, Hsu et al. 2024, "Liger Kernel", section 3.2; the split softmax, Shoeybi et
al. 2019, "Megatron-LM", section 3. In production: Liger's fused kernel on GPUs, and torch's own
`linear_cross_entropy` (since 2.13) or `loss_parallel`.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

IGNORE_INDEX = -100  # a target that counts for nothing, as in torch and Hugging Face

# Rows of a chunk. Each chunk reads and writes dw, 12 bytes an element of w, beside 6 FLOPs a row. A
# GPU does 230 FLOPs in the time of a byte, so that takes as long as 460 rows: 45% on top of the
# products of 1024 rows, 11% of 4096.
CHUNK_ROWS = {"cpu": 1024, "cuda": 4096}


def itself(x: Tensor) -> Tensor:
    return x


@dataclass(frozen=True)
class Vocabulary:
    """The slice of the vocabulary that is here, from id `first` on; by default all of it.

    `maximum` and `total` combine a tensor elementwise over the ranks that hold the other slices.
    """

    first: int = 0
    maximum: Callable[[Tensor], Tensor] = itself
    total: Callable[[Tensor], Tensor] = itself


WHOLE = Vocabulary()


def head_loss(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    vocabulary: Vocabulary = WHOLE,
    chunk_rows: int | None = None,
    of_chunk: Callable[..., tuple[Tensor, Tensor]] | None = None,
) -> Tensor:
    """Summed cross entropy of the logits x w^T, [], in float32 or better.

    x [N, E], weight [V/tp, E], targets [N] as ids of the whole vocabulary or IGNORE_INDEX. The
    gradient of x is this slice's share: with a split vocabulary, the caller sums it over the ranks.
    Under autocast both factors are cast, like those of any linear layer. chunk_rows is CHUNK_ROWS
    of the device by default; of_chunk is `chunk_loss`, which a caller may have compiled.
    """
    x = x.to(linear_dtype(x))
    chunk_rows, of_chunk = chunk_rows or CHUNK_ROWS[x.device.type], of_chunk or chunk_loss
    return _HeadLoss.apply(
        *(x, weight, targets, vocabulary, chunk_rows, of_chunk, torch.is_grad_enabled())
    )


def linear_dtype(x: Tensor) -> torch.dtype:
    """What a linear layer would compute in with x: autocast's dtype, or that of x without it."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def wide_dtype(x: Tensor) -> torch.dtype:
    """float32, or float64 if x is: losses and the statistics of a softmax need the digits."""
    return torch.promote_types(x.dtype, torch.float32)


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, targets, vocabulary, chunk_rows, of_chunk, wants_gradients):
        total = x.new_zeros((), dtype=wide_dtype(x))
        if wants_gradients:
            ctx.dx, ctx.dw = torch.empty_like(x), torch.zeros_like(weight, dtype=total.dtype)
        weight = weight.to(x.dtype)  # here, not before: autograd would cast dw to it and back
        for start in range(0, len(x), chunk_rows):
            rows = slice(start, start + chunk_rows)
            loss, gradient = of_chunk(x[rows], weight, targets[rows], vocabulary)
            total += loss
            if wants_gradients:
                ctx.dx[rows] = gradient @ weight
                ctx.dw += gradient.T @ x[rows]
            del gradient  # or it would lie beside the next chunk's logits
        return total

    @staticmethod
    def backward(ctx, upstream):
        assert hasattr(ctx, "dx"), "the gradients are scaled in place and let go: one backward only"
        dx, dw = ctx.dx.mul_(upstream), ctx.dw.mul_(upstream)
        del ctx.dx, ctx.dw
        return dx, dw, None, None, None, None, None


def chunk_loss(
    x: Tensor, weight: Tensor, targets: Tensor, vocabulary: Vocabulary
) -> tuple[Tensor, Tensor]:
    """The summed loss of some rows, [], and its gradient of their logits in the dtype of x."""
    logits = (x @ weight.T).to(wide_dtype(x))
    losses, gradient = losses_and_gradient(logits, targets, vocabulary, x.dtype)
    return losses.sum(), gradient


def cross_entropy(
    logits: Tensor, targets: Tensor, vocabulary: Vocabulary = WHOLE, in_place: bool = False
) -> Tensor:
    """The cross entropy of each token, [N], in float32 or better; 0 where the target is ignored.

    logits [N, V/tp], targets [N]. For what wants the tokens' losses apart, to weigh or to look at
    them; training uses `head_loss`. With `in_place` the memory of float32 logits is used for their
    gradient, and they must not be read again.
    """
    return _CrossEntropy.apply(logits, targets, vocabulary, in_place)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, targets, vocabulary, in_place):
        values = logits.detach().to(wide_dtype(logits), copy=not in_place)
        losses, gradient = losses_and_gradient(values, targets, vocabulary, values.dtype)
        ctx.save_for_backward(gradient)
        ctx.dtype = logits.dtype
        return losses

    @staticmethod
    def backward(ctx, upstream):
        (gradient,) = ctx.saved_tensors
        return (gradient * upstream[:, None]).to(ctx.dtype), None, None, None


def losses_and_gradient(
    logits: Tensor, targets: Tensor, vocabulary: Vocabulary, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The losses [N] and their gradient p - onehot [N, V/tp] in `dtype`; overwrites the logits.

    With s the sum over the vocabulary of exp(logit - max), a token's loss is log s - (its target's
    logit - max), and p = exp(logit - max) / s. Two small reductions over the ranks: the largest
    logit [N]; then s and the target's logit, which only one rank adds, together [2, N].
    """
    counts = targets != IGNORE_INDEX
    ids = targets - vocabulary.first
    is_here = counts & (ids >= 0) & (ids < logits.shape[1])
    ids = ids.where(is_here, 0)[:, None]

    logits -= vocabulary.maximum(logits.amax(-1))[:, None]
    at_target = logits.gather(1, ids)[:, 0]
    exponentials = logits.exp_()
    sums, target_logits = vocabulary.total(torch.stack([exponentials.sum(-1), at_target * is_here]))
    losses = (sums.log() - target_logits) * counts

    # p where the target counts, else 0; and there p - 1 at the target, subtracted before rounding
    scale = counts / sums
    gradient = exponentials.mul_(scale[:, None]).to(dtype)
    gradient_at_target = at_target.exp() * scale - is_here.to(scale.dtype)
    gradient.scatter_(1, ids, gradient_at_target[:, None].to(dtype))
    return losses, gradient
