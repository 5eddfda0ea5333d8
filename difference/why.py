"""Why: what a wrong tensor is, found by algebra.

    T, what a rank has, and R, what it should have. In float64 few formulas can fit by accident:

    T = c R                         a factor, which is named where it is a ratio of sizes
    T = sum c_k P_k, R = sum P_k    the weights of parts: a sum is missing, a part counts twice
    T = R of another batch, step, place, tensor

Hypotheses are tried in the order of HYPOTHESES; the first that fits gives the sentence.
"""

from itertools import chain, combinations

import torch
from torch import Tensor

from difference.algebra import FITS, ranges, same, size_named, weights_of
from difference.attention import keys_seen, rotation
from difference.first import TOLERANCE, Compared
from difference.parts import Context, Part, parts_of
from difference.places import Here, take


def explain(one: Compared, context: Context) -> str:
    for hypothesis in HYPOTHESES:
        if sentence := hypothesis(one, context):
            return sentence
    return _region(one, context)


def _unlike(one: Compared, context: Context) -> str:
    got, right = one.got, one.right
    if one.key.phase == "built":
        return f"its (pp, dp, cp, tp) are {got.tolist()}, and should be {right.tolist()}"
    if got.shape != right.shape:
        text = f"its shape is {tuple(got.shape)}, and should be {tuple(right.shape)}"
        for dim, (a, b) in enumerate(zip(got.shape, right.shape, strict=False)):
            if a != b and b and got.ndim == right.ndim:
                text += f": dim {dim} is {_times(a / b, context)} as long"
        return text
    if bad := int((~got.isfinite()).sum()):
        return f"{bad} of its {got.numel()} numbers are NaN or infinite"
    return "it is zero everywhere" if not got.any() else ""


def _times(c: float, context: Context) -> str:
    name = size_named(c, context)
    return f"{c:.6g}{name and f' ({name})'} times"


def _factor(one: Compared, context: Context) -> str:
    c = weights_of(one.got, [one.right])
    # Any number is some factor times any other.
    if not c or c[0] == 1 or (one.got.numel() == 1 and not size_named(c[0], context)):
        return ""
    # Initial weights do not depend on a size of the layout.
    times = f"{c[0]:.6g} times" if one.key.phase == "initial" else _times(c[0], context)
    return f"it is {times} what it should be"


def _parts(one: Compared, context: Context) -> str:
    got, right, what = one.got, one.right, "it"
    if one.key.phase in ("loss", "gradient norm"):  # from a mean to a sum
        got, right = (t * context.num_targets(one.key.step) for t in (got, right))
    if one.key.phase == "gradient norm":
        got, right, what = got.square(), right.square(), "its square"
    parts = parts_of(one, context)
    if len(parts) < 2 or not same(_sum(parts), right):
        return ""
    c = weights_of(got, [part.tensor for part in parts])
    return f"{what} {_weights_read(c, parts, one.at)}" if c else ""


def _own_part(one: Compared, context: Context) -> str:
    """A part of a sum: what the ranks of an axis have adds up to what each should have."""
    for axis in ("tp", "cp", "dp"):
        mine = one.at._replace(**{axis: 0})[1:5]
        others = [o for o in context.wrong if o.at._replace(**{axis: 0})[1:5] == mine]
        row = [o.got for o in others if o.key.micro_batch == one.key.micro_batch]
        is_row = len(row) == getattr(context.trial.layout, axis) > 1
        if is_row and len({t.shape for t in row}) == 1 and same(sum(row), one.right):
            return f"it is this rank's own part of a sum over {axis}: the sum is missing"
    return ""


def _sum(parts: list[Part]) -> Tensor:
    return torch.stack([part.tensor for part in parts]).sum(0)


def _weights_read(c: list[float], parts: list[Part], at: Here) -> str:
    """Weights as a function of the fewest coordinates of the parts, in words."""
    axes = [a for a in parts[0].label if len({part.label[a] for part in parts}) > 1]
    for chosen in chain.from_iterable(combinations(axes, n) for n in range(1, len(axes) + 1)):
        groups: dict[tuple, list[float]] = {}
        for weight, part in zip(c, parts, strict=True):
            groups.setdefault(tuple(part.label[a] for a in chosen), []).append(weight)
        if all(max(of) - min(of) < 1e-7 for of in groups.values()):
            break
    weights = {values: min(of) for values, of in groups.items()}
    others = [values for values, weight in weights.items() if weight]
    if len(others) == len(weights) or len({weights[values] for values in others}) > 1:
        wrong = [f"{_part(chosen, v)} {w:.6g} times" for v, w in weights.items() if w != 1]
        return f"counts {', '.join(wrong[:6])}"
    times = weights[others[0]]
    again = "" if times == 1 else f", {times:.6g} times"
    if others == [tuple(getattr(at, a, None) for a in chosen)]:
        over = " and ".join(chosen)
        return f"is this rank's own part of a sum over {over}: the sum is missing{again}"
    if 2 * len(others) <= len(weights):
        return f"is {' and '.join(_part(chosen, v) for v in others)} alone{again}"
    return f"lacks {' and '.join(_part(chosen, v) for v, w in weights.items() if not w)}{again}"


def _part(axes: tuple, values: tuple) -> str:
    if axes == ("which",):
        return values[0]
    return f"the part of {', '.join(f'{a} {v}' for a, v in zip(axes, values, strict=True))}"


def _sequences(one: Compared, context: Context) -> str:
    """Other sequences of the step's data, by their places in the global batch."""
    if one.key.name not in ("tokens", "targets"):
        return ""
    keys = [one.key._replace(micro_batch=m, dp=d) for m, d in context.trial.micro_batches]
    rows = torch.cat([take(context.whole[key], [range(10**9), *one.indices[1:]]) for key in keys])
    found = (one.got[:, None] == rows).all(-1)  # [sequences, those of the global batch]
    first = keys.index(one.key) * len(one.got)
    right = range(first, first + len(one.got))
    if not found.any(1).all():
        return ""
    places = ranges(found.int().argmax(1).tolist())
    return f"its sequences are {places} of the global batch, and should be {ranges(right)}"


def _mixture(one: Compared, context: Context) -> str:
    """Another micro-batch, or the sum of some: a buffer is used again, or was not emptied."""
    if one.key.phase not in ("forward", "backward") or not one.indices:
        return ""
    keys = [one.key._replace(micro_batch=m, dp=d) for m, d in context.trial.micro_batches]
    c = weights_of(one.got, [take(context.whole[key], one.indices) for key in keys])
    terms = {key: x for x, key in zip(c or [], keys, strict=bool(c)) if x}
    said = {k: f"micro-batch {k.micro_batch}{f' of dp {k.dp}' * (k.dp != one.at.dp)}" for k in keys}
    if [*terms.values()] == [1]:
        return f"it is the tensor of {said[next(iter(terms))]}, not of {said[one.key]}"
    if 1 < len(terms) <= 3:
        text = " + ".join(f"{x:.4g} x {said[key]}" for key, x in terms.items())
        return f"it is {text}, and should be {said[one.key]} alone"
    return ""


def _earlier(one: Compared, context: Context) -> str:
    """Something of the step before: its weights, its tensor, or what is left in a buffer."""
    key = one.key
    if key.phase == "weights":
        before = take(context.weight(key.name, key.step), one.indices)
        c = weights_of(one.got - before, [one.right - before, before])
        if c and c[0] == 1:
            return f"it is what it should be, plus {c[1]:.4g} x itself before the update"
        return f"its update is {_times(c[0], context)} what it should be" if c else ""
    if not key.step:
        return ""
    parts = parts_of(one, context, weights_of_step=key.step - 1)
    if key.phase == "forward" and parts and same(one.got, _sum(parts)):
        return "it is computed with the weights of the step before"
    old = take(context.whole[key._replace(step=key.step - 1)], one.indices)
    if same(one.got, old):
        return "it is the tensor of the step before"
    c = weights_of(one.got - one.right, [old]) if one.got.numel() > 1 else None
    return f"it is what it should be, plus {c[0]:.4g} x it in the step before" if c else ""


def _places(one: Compared, context: Context) -> str:
    """Whether each slice along a dim is another slice of the whole tensor."""
    if not one.indices:
        return ""
    whole = context.whole[one.key]
    for dim, name in enumerate(_dim_names(one)):
        others = [range(whole.shape[d]) if d == dim else i for d, i in enumerate(one.indices)]
        slices = _lines(take(whole, others), dim)
        mine = _lines(one.got, dim)
        if len(mine) < 2 or len(mine) * slices.numel() > 5e7:
            continue
        near = torch.cdist(mine, slices, p=torch.inf) <= FITS * whole.abs().max()
        right = torch.tensor([*one.indices[dim]])
        found = near.int().argmax(1).where(~near[range(len(right)), right], right)
        wrong = right != found
        if near.any(1).all() and wrong.any():
            pair = ranges(right[wrong].tolist()), ranges(found[wrong].tolist())
            return f"{name} {pair[0]} are those of {pair[1]}{_owner(dim, found, one, context)}"
    return ""


def _lines(tensor: Tensor, dim: int) -> Tensor:
    return tensor.movedim(dim, 0).reshape(tensor.shape[dim], -1).double()


def _owner(dim: int, found: Tensor, one: Compared, context: Context) -> str:
    if {*found.tolist()} <= {*one.indices[dim]}:
        return ""  # only in another order
    for other in context.ranks:
        if {*found.tolist()} <= {*context.indices(one.key, other)[dim]} and other != one.at:
            for axis in ("tp", "cp", "etp"):
                if getattr(other, axis) != getattr(one.at, axis):
                    return f": they are the part of {axis} {getattr(other, axis)} ({other})"
    return ""


DIMS = {3: ("sequences", "positions", "columns"), 4: ("sequences", "heads", "positions", "columns")}


def _dim_names(one: Compared) -> tuple[str, ...]:
    is_activation = one.key.phase in ("forward", "backward")
    names = DIMS.get(one.right.ndim, ("sequences", "positions")) if is_activation else ()
    return (names or ("rows", "columns", "dim 2"))[: one.right.ndim]


def _region(one: Compared, context: Context) -> str:
    """Where it is wrong, if not everywhere; and by how much."""
    largest = context.whole.get(one.key, one.right).abs().max().clamp(min=1e-300)
    error = (one.got - one.right).abs() / largest
    for dim, name in enumerate(_dim_names(one)):
        is_wrong = _lines(error, dim).amax(1) > TOLERANCE
        if not is_wrong.all():
            where = is_wrong.nonzero()[:, 0]
            listed = ranges(one.indices[dim][i] for i in where) if one.indices else ranges(where)
            how = "wrong" if _lines(one.got, dim)[where].any() else "zero"
            return f"{name} {listed} are {how}, and the others are right"
    if one.got.numel() == 1:
        return f"it is {float(one.got):.10g}, and should be {float(one.right):.10g}"
    if error.max() < 3e-7:
        return f"it differs by {error.max():.1e} of its largest number: rounding of float32"
    if num_right := int((error <= TOLERANCE).sum()):
        share = f"{num_right / error.numel():.0%} ({num_right} of {error.numel()})"
        what = f"what is wrong is spread over all of it, and {share} of its numbers are right: off"
    else:
        what = "all of it is wrong,"
    return f"{what} by up to {error.max():.2g} of its largest number"


HYPOTHESES = [_unlike, _factor, keys_seen, rotation, _parts, _own_part]
HYPOTHESES += [_mixture, _sequences, _earlier, _places]
