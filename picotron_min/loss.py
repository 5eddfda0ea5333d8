"""Loss: cross entropy without storing the logits, also if the vocabulary is split over ranks.

The logits of 8k tokens and a vocabulary of 128k are 4 GB in float32, and so is their gradient. The
loss of a token needs only its own row of logits, however, so rows are taken in stripes, of
STRIPE_ROWS (layout.py):

              V = vocabulary
         +---------------------+
         | stripe 0            |   logits = x w^T -> loss -> p - onehot -> dx  = (p - onehot) w
    rows +---------------------+                                           dw += (p - onehot)^T x
         | stripe 1            |   in the same memory

Backward multiplies both by the upstream gradient: no logit is computed twice. The price is dw, kept
until backward: 4 bytes an element of w for each micro-batch alive in a pipeline. Where ranks hold
slices of w, they reduce each token's largest logit, sum of exponentials, and target's logit.

Source: the stripes, Hsu et al. 2024, "Liger Kernel", section 3.2; the split softmax, Shoeybi et al.
2019, "Megatron-LM", section 3. In production: Liger, torch's `linear_cross_entropy` (2.13).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from picotron_min.layout import STRIPE_ROWS

IGNORE_INDEX = -100  # a target that does not count, as in torch and Hugging Face


@dataclass(frozen=True)
class Vocabulary:
    """This rank's slice, from id `first` on, and how to reduce a tensor over all slices.

    The defaults are for a whole vocabulary; tensor_parallel.py has slices.
    """

    first: int = 0
    maximum: Callable[[Tensor], Tensor] = lambda x: x
    total: Callable[[Tensor], Tensor] = lambda x: x


def head_loss(x: Tensor, weight: Tensor, targets: Tensor, of_stripe: Callable) -> Tensor:
    """x [..., E], weight [V/tp, E], targets [...] -> the summed cross entropy [], wide.

    Targets: ids of the whole vocabulary, or IGNORE_INDEX. The caller sums x's gradient over ranks.
    `of_stripe` is stripe_loss for a vocabulary.
    """
    x, targets = x.to(linear_dtype(x)).flatten(0, -2), targets.flatten()  # [N, E], [N]
    wants_gradients = torch.is_grad_enabled()  # always False inside a Function's forward
    return _HeadLoss.apply(x, weight, targets, of_stripe, wants_gradients)


def linear_dtype(x: Tensor) -> torch.dtype:
    """The dtype a linear layer computes in, given x: autocast's, or without autocast x's."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def wide(x: Tensor) -> Tensor:
    """x in float32, or in float64 if it is: for losses, softmax statistics and their sums."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, targets, of_stripe, wants_gradients):  # computes gradients, too
        total, stripe_rows = wide(x.new_zeros(())), STRIPE_ROWS[x.device.type]
        if wants_gradients:
            ctx.dx, ctx.dw = torch.empty_like(x), torch.zeros_like(weight, dtype=total.dtype)
        weight = weight.to(x.dtype)  # here, not before: autograd would cast dw to it and back
        for start in range(0, len(x), stripe_rows):
            rows = slice(start, start + stripe_rows)
            losses, gradient = of_stripe(x[rows], weight, targets[rows])
            total += losses.sum()
            if wants_gradients:
                ctx.dx[rows] = gradient @ weight
                # In float32: many small terms. A GPU adds a stripe's product before it is rounded.
                if x.is_cuda and x.dtype != total.dtype:
                    torch.addmm(ctx.dw, gradient.T, x[rows], out_dtype=total.dtype, out=ctx.dw)
                else:
                    ctx.dw += gradient.T @ x[rows]
            del gradient  # it would take memory beside the next stripe's logits
        return total

    @staticmethod
    def backward(ctx, upstream):
        assert hasattr(ctx, "dx"), "one backward only: its gradients are scaled in place"
        dx, dw = ctx.dx.mul_(upstream), ctx.dw.mul_(upstream)
        del ctx.dx, ctx.dw
        return dx, dw, None, None, None  # one gradient for each argument of forward


def stripe_loss(
    x: Tensor, weight: Tensor, targets: Tensor, vocabulary: Vocabulary = Vocabulary()
) -> tuple[Tensor, Tensor]:
    """The losses of some rows, [N], and their gradient p - onehot [N, V/tp] in the dtype of x."""
    # With s the sum over the vocabulary of exp(logit - max), a token's loss is
    # log s - (its target's logit - max), and p = exp(logit - max) / s.
    logits = x @ weight.T
    counts = targets != IGNORE_INDEX
    ids = targets - vocabulary.first
    is_here = counts & (ids >= 0) & (ids < logits.shape[1])
    ids = ids.where(is_here, 0)[:, None]  # gather and scatter need a valid id in every row
    # A pass over the logits is dear: `out` widens as it subtracts, and below rounds as it scales.
    largest = vocabulary.maximum(wide(logits.amax(-1)))[:, None]  # exp cannot overflow below
    memory = logits if x.dtype == largest.dtype else torch.empty_like(logits, dtype=largest.dtype)
    shifted = torch.sub(logits, largest, out=memory)
    at_target = shifted.gather(1, ids)[:, 0]
    exponentials = shifted.exp_()
    # one message, [2, N]; a rank without the target adds 0
    sums, target_logits = vocabulary.total(torch.stack([exponentials.sum(-1), at_target * is_here]))
    losses = (sums.log() - target_logits) * counts
    scale = counts / sums
    gradient = torch.mul(exponentials, scale[:, None], out=logits)  # p; 0 where no target counts
    gradient_at_target = at_target.exp() * scale - is_here.to(scale.dtype)  # p - 1, not yet rounded
    return losses, gradient.scatter_(1, ids, gradient_at_target[:, None].to(x.dtype))
