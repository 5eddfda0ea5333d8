"""Logits: what is wrong in the loss, or in the gradient of the logits."""

import torch
from torch import Tensor

from difference.algebra import ranges, same
from difference.compare import Compared, Comparison
from difference.parts import head_of, of_logits
from difference.places import chunk, positions, take


def summed_vocabulary(one: Compared, both: Comparison) -> str:
    """A loss in which a rank's part of the vocabulary stands for the whole one."""
    layout, of = both.trial.layout, one.key._replace(phase="forward")
    if one.key[1:3] != ("forward", "loss") or layout.tp == 1:
        return ""
    x, targets = both.whole[of._replace(name="model.norm")], both.whole[of._replace(name="targets")]
    logits = x @ head_of(both, one.key.step).T
    places = [positions(one.at, layout, targets.shape[1])]
    logits, targets = (take(t, [range(len(t)), *places]).flatten(0, 1) for t in (logits, targets))
    logits, targets = logits[targets >= 0], targets[targets >= 0]
    largest = logits.amax(1)
    logits -= largest[:, None]
    ids = [[*chunk(range(logits.shape[1]), t, layout.tp)] for t in range(layout.tp)]
    most = torch.stack([logits[:, i].amax(1) for i in ids])  # [tp, tokens]
    sums = torch.stack([logits[:, i].exp().sum(1) for i in ids])
    owner = torch.tensor([t for t, of_rank in enumerate(ids) for _ in of_rank])[targets]
    at_target = logits.gather(1, targets[:, None])[:, 0]
    mine = at_target * (owner == one.at.tp)
    of_owner = most.gather(0, owner[None])[0]
    whole, lengths = sums.sum(0).log(), torch.tensor([[len(i)] for i in ids])

    def counting(ids_of_slices: list[Tensor], here: Tensor | int = 1) -> Tensor:
        """What a loss is of which each slice counts one of its ids, where it is `here`."""
        counted = torch.stack([logits.gather(1, i[:, None])[:, 0] for i in ids_of_slices])
        return whole - (counted * here).sum(0)

    slices = torch.arange(layout.tp)[:, None]
    near = [targets.clamp(i[0], i[-1]) for i in ids]
    firsts = [targets.where(of, i[0]) for of, i in zip(owner == slices, ids, strict=True)]
    shifted = [(targets + i[0]).clamp(max=i[-1]) for i in ids]
    guesses = {
        "subtracts each rank's own largest logit": (sums / most.exp()).sum(0).log()
        - (at_target - of_owner),
        "sums the exponentials of this rank's logits alone": sums[one.at.tp].log() - at_target,
        "lacks a target's logit that another rank has": whole - mine,
        "subtracts the largest logit from the others alone, not from the target's": whole
        - (at_target + largest),
        "counts in other slices the id that is nearest to the target": counting(near),
        "counts in later slices their first id": counting(near, slices >= owner),
        "counts in earlier slices their last id": counting(near, slices <= owner),
        "counts in other slices their first id": counting(firsts),
        "takes a target for an id within each slice": counting(shifted, targets < lengths),
        "adds the log-sum-exps of slices, which are logarithms": (sums.log() + largest).sum(0)
        - (at_target + largest),
        "sums nothing over the ranks of the vocabulary": sums[one.at.tp].log() - mine,
    }
    return next((f"it {how}" for how, loss in guesses.items() if same(one.got, loss.sum())), "")


def logits_gradient(one: Compared, both: Comparison) -> str:
    """Of the last norm's gradient, a product with the head: where the logits' gradient is wrong."""
    if one.key[1:3] != ("backward", "model.norm"):
        return ""
    per_slice = sum(of_logits(one.key, both, per_slice=True).values())
    if same(one.got, take(per_slice, one.indices)):
        return "the gradient of the logits has a softmax over each rank's ids alone, not over all"
    weight, error = head_of(both, one.key.step), (one.got - one.right).flatten(0, 1)
    if len(weight) > len(weight[0]):
        return ""  # no single answer
    found = torch.linalg.lstsq(weight.T, error.T).solution.T  # [tokens, ids]
    if not same(found @ weight, error):
        return ""
    targets = both.whole[one.key._replace(phase="forward", name="targets")]
    at_target = take(targets, one.indices[:2]).flatten()[:, None] == torch.arange(len(weight))
    is_wrong, sentences = found.abs() > 1e-6 * found.abs().max(), []
    for where, name in ((is_wrong & at_target, "the target"), (is_wrong & ~at_target, "")):
        ids, values = where.any(0).nonzero()[:, 0].tolist(), found[where]
        if not ids:
            continue
        if not name and len(ids) > 3:
            return ""
        much = float(values.mean())
        is_one = bool((values - much).abs().max() <= 1e-6 * abs(much))
        how = f"is {abs(much):.6g} too {'large' if much > 0 else 'small'}" if is_one else "is wrong"
        at = name or f"id{'s' * (len(ids) > 1)} {ranges(ids)}"
        sentences.append(f"{how} at {at}, in {int(where.any(1).sum())} of {len(found)} tokens")
    return f"the gradient of the logits {', and '.join(sentences)}"
