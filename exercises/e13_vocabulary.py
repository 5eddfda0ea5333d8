"""13 vocabulary: three numbers a token, instead of all logits

Each rank has the rows of lm_head for some of the vocabulary, the last one fewer of them. Some
targets do not count, and in one case scores are so large that exp(score) overflows.
"""

import random
from typing import TYPE_CHECKING

from exercises.exercise import Case, Exercise, Sent, Wrong, draw
from exercises.pictures import bars

if TYPE_CHECKING:
    from torch import Tensor

TASK = """
Return the cross entropy of each of N tokens, and its gradient with respect to this rank's logits,
[N, V/tp]: softmax - 1 at the target, softmax elsewhere. x is [N, E], weight [V/tp, E], this rank's
slice of the vocabulary, from id vocabulary.first on. vocabulary.maximum and vocabulary.total reduce
a tensor over the slices of all ranks: do not gather logits. A target IGNORE_INDEX has loss 0 and
gradient 0.
Read: loss.py, tensor_parallel.py (the head).
"""

HINTS = (
    "Of all other slices a token needs three numbers: the largest logit, the sum of exponentials,"
    " and its target's logit, which one rank knows.",
    "vocabulary.maximum(logits.amax(-1)), vocabulary.total(torch.stack([...])), gather, scatter_.",
    "Subtract the common maximum. Add up the exponentials of your slice, and take the logit of the"
    " target where it is here, else 0; sum both over the ranks in one message. The loss is the"
    " logarithm of the sum minus the target's logit; the gradient is exp / sum, minus 1 at a target"
    " that is here.",
)


def cases(dice: random.Random) -> list[Case]:
    rest = dice.randint(1, 3)  # of the last slice, the others have more
    vocab = {1: 5, 2: 4 + rest, 3: 10 + dice.randint(0, 1), 4: 13}
    some = [
        Case(n, vocab=vocab[n], tokens=dice.randint(5, 8), scores_around=1) for n in (1, 2, 3, 4)
    ]
    return [*some, Case(2, vocab=7, tokens=4, scores_around=1000)]


def data(case: Case) -> tuple["Tensor", "Tensor", "Tensor"]:
    x = draw(case, "x", shape=(case.tokens, 3))
    weight = draw(case, "weight", shape=(case.vocab, 3))
    # All logits are around this number.
    x[:, 0], weight[:, 0] = 1, weight[:, 0] + case.scores_around
    targets = (draw(case, "targets", shape=(case.tokens,)) * 1000).long() % case.vocab
    targets[1::3] = -100  # these do not count
    return x, weight, targets


def slice_of(case: Case, rank: int) -> slice:
    each = -(-case.vocab // case.ranks)
    return slice(rank * each, min((rank + 1) * each, case.vocab))


def on_rank(rank, case: Case) -> dict:
    from torch.distributed import ReduceOp

    axis, loss = rank.axis("tp"), rank.course.loss
    mine = slice_of(case, rank.number)

    def total(tensor, op=ReduceOp.SUM):
        return rank.course.collectives.all_reduce(tensor, axis, op)

    vocabulary = loss.Vocabulary(mine.start, lambda x: total(x, ReduceOp.MAX), total)
    x, weight, targets = data(case)
    losses, gradient = loss.stripe_loss(x, weight[mine], targets, vocabulary)
    return {"losses": losses, "gradient of the logits": gradient}


def expected(case: Case) -> list[dict]:
    import torch.nn.functional as F

    x, weight, targets = data(case)
    logits = (x @ weight.T).requires_grad_()
    losses = F.cross_entropy(logits, targets, reduction="none")  # ignores -100, as we do
    losses.sum().backward()
    return [
        {"losses": losses.detach(), "gradient of the logits": logits.grad[:, slice_of(case, rank)]}
        for rank in range(case.ranks)
    ]


def traffic(case: Case) -> list[dict[str, Sent]]:
    n = case.ranks
    if n == 1:
        return [{}]
    return [{"all_reduce": Sent(2, 2 * (n - 1) / n * 3 * case.tokens * 8)}] * n


def picture(runs) -> str:
    case, records = runs[3]
    sent = sum(size for _, size in records[0].sent.values()) / case.tokens
    share = (case.ranks - 1) / case.ranks * 8
    rows = {"yours": sent, "all logits, V = 13": share * 13, "all logits, V = 130": share * 130}
    return f"bytes that each of {case.ranks} ranks sends for a token\n" + bars(rows, "{:5.0f}")


MAXIMUM = "vocabulary.maximum(logits.amax(-1))"
SUMS = "vocabulary.total(torch.stack([exponentials.sum(-1), at_target * is_here]))"
HERE = "is_here.to(scale.dtype)"
LOGITS = "logits = wide(x @ weight.T)"
GATHERED = """end = torch.full_like(logits[0, :1], vocabulary.first + len(weight))
    whole = logits.new_zeros(len(x), int(vocabulary.maximum(end)))
    whole[:, vocabulary.first : vocabulary.first + len(weight)] = logits
    vocabulary.total(whole)
"""

EXERCISE = Exercise(
    __name__,
    target="loss:stripe_loss",
    task=TASK,
    hints=HINTS,
    cases=cases,
    on_rank=on_rank,
    expected=expected,
    traffic=traffic,
    picture=picture,
    layout={"tp_size": 2},
    remember="3 numbers a token are reduced, not V logits: for a vocabulary of 128k, 20000 times"
    " fewer bytes than to gather them. In production: `torch.distributed.tensor.parallel`'s"
    " loss_parallel.",
    wrong=(
        Wrong(
            "own_maximum",
            "Each slice subtracts its own maximum: the sums of their exponentials have different"
            " scales, and must not be added.",
            MAXIMUM,
            "logits.amax(-1)",
        ),
        Wrong(
            "no_maximum",
            "No maximum is subtracted: exp() overflows for large logits, and infinity divided by"
            " infinity is NaN.",
            f"logits -= {MAXIMUM}[:, None]",
            f"{MAXIMUM}",
        ),
        Wrong(
            "own_sum",
            "Each slice divides by the sum of its own exponentials: the softmax is over the whole"
            " vocabulary.",
            SUMS,
            "exponentials.sum(-1), vocabulary.total(torch.stack([at_target * is_here] * 2))[0]",
        ),
        Wrong(
            "target_added_by_all",
            "Every rank adds a logit for the target, also those whose slice does not have it.",
            "at_target * is_here]",
            "at_target * counts]",
        ),
        Wrong(
            "target_not_summed",
            "The target's logit is not summed: the ranks that do not have it get another loss.",
            SUMS,
            SUMS.replace("at_target * is_here", "exponentials.sum(-1)")
            + "[0], at_target * is_here",
        ),
        Wrong(
            "one_subtracted_everywhere",
            "Every rank subtracts 1 in the gradient of some logit: only the one that has the target"
            " must.",
            HERE,
            "counts.to(scale.dtype)",
        ),
        Wrong(
            "own_ids",
            "Targets are used as ids within the slice: they are of the whole vocabulary, of which"
            " this slice begins at `first`.",
            "ids = targets - vocabulary.first",
            "ids = targets",
        ),
        Wrong(
            "ignored_in_loss",
            "A target that is to be ignored has a loss.",
            "(sums.log() - target_logits) * counts",
            "(sums.log() - target_logits)",
        ),
        Wrong(
            "ignored_in_gradient",
            "A target that is to be ignored has a gradient.",
            "scale = counts / sums",
            "scale = 1 / sums",
        ),
        Wrong(
            "wrong_sign",
            "The gradient has the wrong sign: it is softmax minus 1 at the target, so that a step"
            " against it makes the target more probable.",
            "return losses, gradient",
            "return losses, -gradient",
        ),
        Wrong(
            "logits_gathered",
            "All logits are sent to all ranks: right, but three numbers a token are enough.",
            LOGITS,
            f"{LOGITS}\n    {GATHERED}",
            MAXIMUM,
            "whole.amax(-1)",
            SUMS,
            "(whole - whole.amax(-1)[:, None]).exp().sum(-1), (whole.gather(1, targets.clamp(0)"
            "[:, None])[:, 0] - whole.amax(-1)) * counts",
        ),
        Wrong(
            "three_messages",
            "The sum and the target's logit are sent one by one: stacked, they are one message.",
            SUMS,
            "vocabulary.total(exponentials.sum(-1)), vocabulary.total(at_target * is_here)",
        ),
    ),
    also_right=(
        """
def stripe_loss(x, weight, targets, vocabulary=Vocabulary()):
    logits, N = x @ weight.T, len(x)
    logits = logits - vocabulary.maximum(logits.max(1).values).unsqueeze(1)
    onehot = torch.zeros_like(logits)
    for row in range(N):
        place = int(targets[row]) - vocabulary.first
        if targets[row] != IGNORE_INDEX and 0 <= place < len(weight):
            onehot[row, place] = 1
    both = vocabulary.total(torch.stack([logits.exp().sum(1), (logits * onehot).sum(1)], 1))
    counts = (targets != IGNORE_INDEX).double()
    losses = counts * (both[:, 0].log() - both[:, 1])
    return losses, counts[:, None] * logits.exp() / both[:, :1] - onehot
""",
    ),
)
