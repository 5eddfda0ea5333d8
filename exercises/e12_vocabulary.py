"""12 vocabulary: three numbers a token, instead of all logits

Each rank has the rows of lm_head for some of the vocabulary, the last one fewer of them. Some
targets do not count. In one case scores are so large that exp(score) overflows.

target: loss:stripe_loss
train: distributed.tp_size=2

Return the cross entropy of each of N tokens, and its gradient with respect to this rank's logits,
[N, V/tp]: softmax - 1 at the target, softmax elsewhere. x is [N, E], weight [V/tp, E], this rank's
slice of the vocabulary, from id vocabulary.first on. vocabulary.maximum and vocabulary.total reduce
a tensor over the slices of all ranks, in place: do not gather logits; two messages are enough. A
target IGNORE_INDEX has loss 0 and gradient 0. Compute in float32 or better (`wide`), whatever the
dtype of x is; only the gradient is in the dtype of x.
Read: loss.py, tensor_parallel.py (the head).

? Over all slices a token needs three numbers: the largest logit, the sum of exponentials, and its
  target's logit, which is in the slice of one rank.
? vocabulary.maximum(logits.amax(-1)), vocabulary.total(torch.stack([...])), gather, scatter_.
? Subtract the common maximum. Add up the exponentials of your slice, and take the logit of the
  target where it is here, else 0; sum both over the ranks in one message. The loss is the logarithm
  of the sum minus the target's logit; the gradient is exp / sum, minus 1 at a target that is here.
! 3 numbers a token are reduced, not V logits: for a vocabulary of 128k, 20000 times fewer bytes
  than to gather them. In production: `torch.distributed.tensor.parallel`'s loss_parallel.
"""

from functools import partial

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from exercises.exercise import Case, Dice, Sent, draw


def cases(dice: Dice) -> list[Case]:
    # So that the first id of the last slice is no multiple of the rows of that slice.
    vocab = {1: 5, 2: 5 + dice.randint(0, 2), 3: 11 + 3 * dice.randint(0, 1), 4: 17}
    some = [(n, v, {"tokens": dice.randint(5, 8), "scores_around": 1}) for n, v in vocab.items()]
    some.append((2, 7, {"tokens": 6, "scores_around": 1000}))
    some.append((2, 8, {"tokens": 8, "scores_around": 1, "dtype": "bfloat16"}))
    return [Case(n, vocab=v, **sizes) for n, v, sizes in some]


def data(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    x = draw(case, "x", shape=(case.tokens, 3))
    weight = draw(case, "weight", shape=(case.vocab, 3))
    # All logits are around this number.
    x[:, 0], weight[:, 0] = 1, weight[:, 0] + case.scores_around
    x[:, 1] *= case.scores_around  # of a token some are far from others
    x[3, :2] = torch.tensor([-1, 0])  # all of this token are far below other tokens'
    targets = (draw(case, "targets", shape=(case.tokens,)) * 1000).long() % case.vocab
    each = -(-case.vocab // case.ranks)
    targets[0], targets[2] = each % case.vocab, each - 1  # on both sides of a cut
    targets[3] = case.vocab - 1
    targets[1::3] = -100  # these do not count
    x[2, 1], weight[targets[2], 1] = case.scores_around, -1  # its target is far below
    dtype = getattr(torch, getattr(case, "dtype", "float64"))
    return x.to(dtype), weight.to(dtype), targets


def slice_of(case: Case, rank: int) -> slice:
    each = -(-case.vocab // case.ranks)
    return slice(rank * each, min((rank + 1) * each, case.vocab))


def on_rank(rank, case: Case) -> dict:
    loss, mine = rank.course.loss, slice_of(case, rank.number)
    total = partial(rank.course.collectives.all_reduce, axis=rank.axis("tp"))
    vocabulary = loss.Vocabulary(mine.start, partial(total, op=ReduceOp.MAX), total)
    x, weight, targets = data(case)
    losses, gradient = loss.stripe_loss(x, weight[mine], targets, vocabulary)
    if hasattr(case, "dtype"):
        return {"dtype of losses and gradient": f"{losses.dtype}, {gradient.dtype}"}
    return {"losses": losses, "gradient of the logits": gradient}


def expected(case: Case) -> list[dict]:
    if hasattr(case, "dtype"):
        return [{"dtype of losses and gradient": "torch.float32, torch.bfloat16"}] * case.ranks
    x, weight, targets = data(case)
    # In one process, with all of the vocabulary.
    logits = (x @ weight.T).requires_grad_()
    losses = torch.nn.functional.cross_entropy(logits, targets, reduction="none")  # ignores -100
    losses.sum().backward()
    parts = [logits.grad[:, slice_of(case, rank)] for rank in range(case.ranks)]
    return [{"losses": losses.detach(), "gradient of the logits": part} for part in parts]


def traffic(case: Case, rank: int) -> dict[str, Sent]:
    n, size = case.ranks, 3 * case.tokens * (4 if hasattr(case, "dtype") else 8)
    return {"all_reduce": Sent(2, 2 * (n - 1) / n * size)}


MISTAKES = """
own_maximum: Each slice subtracts its own maximum: their sums have different scales.
    vocabulary.maximum(wide(logits.amax(-1))) => wide(logits.amax(-1))
own_sum: Each slice divides by its own sum of exponentials: softmax is over the whole vocabulary.
- sums, target_logits = vocabulary.total(torch.stack([exponentials.sum(-1), at_target * is_here]))
+ sums, target_logits = exponentials.sum(-1), vocabulary.total(at_target * is_here)
no_maximum: No maximum is subtracted: exp() overflows for large logits, and inf / inf is NaN.
    vocabulary.maximum(wide(logits.amax(-1))) => 0 * wide(logits.amax(-1))
own_ids: Targets are used as ids within the slice, which begins at `first`.
    ids = targets - vocabulary.first => ids = targets
ignored_in_gradient: A target that is to be ignored has a gradient.
    scale = counts / sums => scale = 1 / sums
not_wide: Logits stay in the dtype of x: in bfloat16 a sum of exponentials has three digits.
    vocabulary.maximum(wide(logits.amax(-1))) => vocabulary.maximum(logits.amax(-1))
"""
