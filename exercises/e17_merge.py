"""17 merge: a mean of means needs its weights

target: attention:merge_blocks
train: distributed.cp_size=2 distributed.tp_size=1

Merge two blocks of attention of the same queries to different keys. Of each block you get the
weighted mean of its values, out [B, Q, S, D], and the logarithm of its summed weights, lse [B, Q,
S]. Return out and lse of both together, so that the result can be merged with a third block.
Read: attention.py.

? Each block's mean counts by its share of all weights; and the shares add up to 1.
? torch.logaddexp, exp, and [..., None] to bring [B, Q, S] to [B, Q, S, 1].
? The weights of both blocks together are exp(lse_1) + exp(lse_2); take the logarithm of that
  without computing either. A block's share is exp(its lse - the common lse).
! 1 number a row and head, the lse, is enough to merge blocks exactly. In production: flash
  attention does this for every block of keys.
"""

import torch

from exercises.exercise import Case, Dice, draw

B, Q, S, D = 1, 2, 3, 4


def cases(dice: Dice) -> list[Case]:
    lengths = [[dice.randint(1, 6) for _ in range(n)] for n in (1, 2, 3, 5)]
    some = [Case(1, keys=keys, scores_around=0) for keys in lengths]
    apart = Case(1, keys=lengths[1], scores_around=0, last_above=1000)
    return [*some, apart, Case(1, keys=lengths[2], scores_around=1000)]


def scores_and_values(case: Case):
    scores = draw(case, "scores", shape=(B, Q, S, sum(case.keys)))
    if case.scores_around:
        signs = torch.tensor([1.0, -1.0, 0.0]).double()  # each query has scores of its own size
        scores = 10 * scores + case.scores_around * signs[:, None]
    scores[..., -case.keys[-1] :] += getattr(case, "last_above", 0)  # the last block's
    return scores, draw(case, "values", shape=(B, Q, sum(case.keys), D))


def on_rank(rank, case: Case) -> dict:
    scores, values = scores_and_values(case)
    parts = zip(scores.split(case.keys, -1), values.split(case.keys, -2), strict=True)
    merged, *blocks = [(s.softmax(-1) @ v, s.logsumexp(-1)) for s, v in parts]
    # As a ring does: the third block meets what two have become.
    for block in blocks:
        merged = rank.course.attention.merge_blocks(*merged, *block)
    return dict(zip(("out", "lse"), merged, strict=True))


def expected(case: Case) -> list[dict]:
    scores, values = scores_and_values(case)  # all keys at once
    return [{"out": scores.softmax(-1) @ values, "lse": scores.logsumexp(-1)}]


MISTAKES = """
plain_mean: It is the plain mean of both blocks: a block with more weight must count more.
    (lse_1 - lse).exp()[..., None] * => 0.5 *
    (lse_2 - lse).exp()[..., None] * => 0.5 *
lse_not_merged: The lse that is returned is one block's: in the next merge two count as one.
    * out_2, lse => * out_2, lse_1
weights_swapped: Each block gets the weight of the other one.
    lse_1 - lse).exp()[..., None] * out_1 + (lse_2 => lse_2 - lse).exp()[..., None] * out_1 + (lse_1
lse_added: The two lse are added. They are logarithms: their exponentials must be added.
    torch.logaddexp(lse_1, lse_2) => lse_1 + lse_2
exp_first: exp() is computed before anything is subtracted: it overflows for large scores, and
    infinity divided by infinity is NaN.
    torch.logaddexp(lse_1, lse_2) => (lse_1.exp() + lse_2.exp()).log()
    (lse_1 - lse).exp() => (lse_1.exp() / (lse_1.exp() + lse_2.exp()))
    (lse_2 - lse).exp() => (lse_2.exp() / (lse_1.exp() + lse_2.exp()))
never_divided: The weighted sum is never divided by the sum of the weights: the result is no mean.
    lse_1 - lse => lse_1
    lse_2 - lse => lse_2
"""
