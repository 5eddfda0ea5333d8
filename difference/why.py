"""Why: what a wrong tensor is, found by algebra.

    T, what a rank has, and R, what it should have. In float64 few formulas can fit by accident:

    T = c R                         a factor, which is named where it is a size of the run
    R = sum of T over an axis       this rank's own part of a sum
    T = sum c_k P_k, R = sum P_k    a micro-batch is missing in a sum, or counts twice
    T = another R                   of another micro-batch, or of the step before
    each slice of T is one of R     other places
    T = R but for a region          where it is wrong

Formulas are tried in this order; the first that fits gives the sentence.
"""

import math
from collections.abc import Iterable
from itertools import combinations, groupby, pairwise

import torch
from torch import Tensor

from difference.compare import AXES, TOLERANCE, Compared, Comparison, take

FITS = 1e-10  # of the largest number; less than what counts as wrong
MOST_COMPARED = 5e7  # numbers, of all pairs of slices
DIMS = [(), ("positions",), ("sequences", "positions"), ("sequences", "positions", "columns")]
DIMS += [("sequences", "heads", "positions", "columns")]


def explain(one: Compared, both: Comparison) -> str:
    return next(filter(None, (formula(one, both) for formula in FORMULAS)))


def same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are equal up to rounding in float64."""
    if a.shape != b.shape or not a.numel():
        return False
    return bool((a - b).abs().max() <= FITS * b.abs().max())


def _unlike(one: Compared, both: Comparison) -> str:
    if one.got.shape != one.right.shape:
        return f"its shape is {(*one.got.shape,)}, and should be {(*one.right.shape,)}"
    if bad := int((~one.got.isfinite()).sum()):
        return f"NaN or infinite: {bad} of its {one.got.numel()} numbers"
    return "" if one.got.any() else "it is zero everywhere"


def _factor(one: Compared, both: Comparison) -> str:
    c = float((one.got * one.right).sum() / one.right.square().sum())
    # Any number is some factor times any other.
    if not same(one.got, c * one.right) or (one.got.numel() == 1 and not size_named(c, both)):
        return ""
    return f"it is {times(c, both)} what it should be"


def times(c: float, both: Comparison) -> str:
    name = size_named(c, both)
    return f"{c:.10g}{name and f' ({name})'} times"


def size_named(c: float, both: Comparison) -> str:
    """The sizes of the run that a factor is, or is one part of; "" if there is none."""
    layout, work = both.trial.layout, both.trial.workload
    sizes = layout.sizes._asdict() | {"micro-batches": work.num_micro_batches}
    micro_batches = len(both.trial.micro_batches)
    sizes["tokens of the step"] = micro_batches * work.micro_batch_size * work.seq_length
    for before, factor in ("", c), ("1/", 1 / c if c else 0):
        fits = [name for name, n in sizes.items() if n > 1 and math.isclose(factor, n)]
        if fits:
            return before + " or ".join(fits)
    return ""


def _own_part(one: Compared, both: Comparison) -> str:
    """What the ranks of an axis have adds up to what each should have."""
    alike = [o for o in both.first if o.key._replace(dp=0) == one.key._replace(dp=0)]
    power = 2 if one.key.phase == "gradient norm" else 1  # the square of the norm is a sum
    for axes in [*combinations(AXES, 1), *combinations(AXES, 2)]:
        others = [axis for axis in AXES if axis not in axes]
        row = [o for o in alike if all(getattr(o.at, a) == getattr(one.at, a) for a in others)]
        is_sum = len({o.got.shape for o in row}) == 1
        if is_sum and same(sum(o.got**power for o in row), one.right**power):
            over = " and ".join(axes)
            return f"it is this rank's own part of a sum over {over}: the sum is missing"
    return ""


def _parts(one: Compared, both: Comparison) -> str:
    """Of a gradient, which is a sum over micro-batches: how often each is in it."""
    of = (one.key.step, "sum so far", one.key.name)
    sums = [t for k, t in both.whole.items() if k[:3] == of and one.key.phase == "summed gradient"]
    if len(sums) < 2 or one.got.numel() < 2 * len(sums):
        return ""
    parts = [b - a for a, b in pairwise([torch.zeros_like(sums[0]), *sums])]
    columns = torch.stack([take(part, one.indices).flatten() for part in parts], 1)
    c = torch.linalg.pinv(columns) @ one.got.flatten()  # lstsq fails if a part is zero
    if not same(one.got, (columns @ c).view_as(one.got)):
        return ""
    c = c.where(columns.any(0), 1)  # of a part that is zero nothing is known
    counts = [
        f"micro-batch {m} of dp {d} {times(round(x, 7) or 0.0, both)}"
        for (m, d), x in zip(both.trial.micro_batches, c.tolist(), strict=True)
        if abs(x - 1) > 1e-6
    ]
    return f"it counts {', '.join(counts)}"


def _another(one: Compared, both: Comparison) -> str:
    """The tensor of another micro-batch or step: a buffer was used again."""
    key = one.key
    names = {key._replace(step=key.step - 1): "the step before"}
    for m, d in both.trial.micro_batches:
        names[key._replace(micro_batch=m, dp=d)] = f"micro-batch {m} of dp {d}"
    for of, name in names.items():
        if of != key and of in both.whole and same(one.got, take(both.whole[of], one.indices)):
            return f"it is the tensor of {name}"
    return ""


def _moved(one: Compared, both: Comparison) -> str:
    """Whether each slice along a dim is another slice of the whole tensor."""
    whole = both.whole[one.key]
    for dim, name in enumerate(_dim_names(one)):
        others = [*one.indices]
        others[dim] = range(whole.shape[dim])
        slices, mine = lines_along(take(whole, others), dim), lines_along(one.got, dim)
        if len(mine) * slices.numel() > MOST_COMPARED:
            continue
        far = torch.cdist(mine, slices, p=torch.inf) / whole.abs().max()
        right = torch.tensor([*one.indices[dim]])
        far[range(len(right)), right] -= FITS  # of several that are equal, the right one
        found = far.argmin(1)
        wrong = right != found
        if far.amin(1).max() <= FITS and wrong.any():
            pair = ranges(right[wrong].tolist()), ranges(found[wrong].tolist())
            return f"{name} {pair[0]} are those of {pair[1]}"
    return ""


def _region(one: Compared, both: Comparison) -> str:
    """Where it is wrong, if not everywhere; and by how much."""
    if one.got.numel() == 1:
        return f"it is {float(one.got):.10g}, and should be {float(one.right):.10g}"
    error = (one.got - one.right).abs() / both.whole[one.key].abs().max()
    regions = {}  # by the part of it that is wrong
    for dim, name in enumerate(_dim_names(one)):
        where = (lines_along(error, dim).amax(1) > TOLERANCE).nonzero()[:, 0].tolist()
        places = ranges(one.indices[dim][i] for i in where)
        regions[len(where) / error.shape[dim]] = f"{name} {places} are wrong, and no others"
    if (least := min(regions)) < 1:
        return regions[least]
    return f"all of it is wrong, by up to {error.max():.2g} of its largest number"


def _dim_names(one: Compared) -> tuple[str, ...]:
    is_activation = one.key.phase in ("forward", "gradient")
    return DIMS[one.got.ndim] if is_activation else ("rows", "columns")[: one.got.ndim]


def lines_along(tensor: Tensor, dim: int) -> Tensor:
    """[..., n, ...] -> [n, all others]: a row for each place along `dim`"""
    return tensor[..., None].movedim(dim, 0).flatten(1).double()


def ranges(numbers: Iterable[int]) -> str:
    """0 1 2 3 12 13 -> 0-3 12-13"""
    groups = groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])
    runs = [[n for _, n in group] for _, group in groups]
    return " ".join(f"{run[0]}-{run[-1]}" if run[1:] else str(run[0]) for run in runs)


FORMULAS = _unlike, _factor, _own_part, _parts, _another, _moved, _region
