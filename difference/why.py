"""Why: what a wrong tensor is, found by algebra.

    T, what a rank has, and R, what it should have. In float64 few formulas can fit by accident:

    T = c R                         a factor, which is named where it is a ratio of sizes
    T = sum c_k P_k, R = sum P_k    the weights of parts: a sum is missing, a part counts twice
    T = sum c_k R_k, R is one R_k   of other micro-batches, or of the step before
    T = S, another tensor           a step between them is left out, or run twice
    T = softmax(q K) V              of other keys, or other key heads
    each slice of T is one of R     other places

Hypotheses are tried in the order of HYPOTHESES; the first that fits gives the sentence.
"""

import math
from itertools import chain, combinations, product
from math import inf

import torch
from torch import Tensor

from difference.algebra import FITS, ranges, same, weights_of
from difference.compare import TOLERANCE, Compared, Comparison
from difference.parts import REST, Parts, parts_of, products, squares
from difference.places import indices_of, take
from difference.reads import key_heads, keys_seen, rotation, rows_seen


def explain(one: Compared, both: Comparison) -> str:
    return next(filter(None, (hypothesis(one, both) for hypothesis in HYPOTHESES)))


def _unlike(one: Compared, both: Comparison) -> str:
    got, right = one.got, one.right
    if one.key.phase == "built":
        return f"its (pp, dp, cp, tp) are {got.tolist()}, and should be {right.tolist()}"
    if got.shape != right.shape:
        pairs = [*enumerate(zip(got.shape, right.shape, strict=False))] * (got.ndim == right.ndim)
        dims = [f": dim {i} is {times(a / b, both)} as long" for i, (a, b) in pairs if a != b and b]
        return f"its shape is {(*got.shape,)}, and should be {(*right.shape,)}{''.join(dims)}"
    if bad := int((~got.isfinite()).sum()):
        return f"{bad} of its {got.numel()} numbers {_are(bad)} NaN or infinite"
    return "it is zero everywhere" if not got.any() else ""


def _are(n: int) -> str:
    return "is" if n == 1 else "are"


def times(c: float, both: Comparison) -> str:
    name = size_named(c, both)
    return f"{c:.6g}{name and f' ({name})'} times"


def size_named(c: float, both: Comparison) -> str:
    """The sizes of the run that a factor is, or is one part of; "" if there is none."""
    layout, m = both.trial.layout, both.trial.workload.num_micro_batches
    sizes = {"tp": layout.tp, "cp": layout.cp, "pp": layout.pp, "dp": layout.dp}
    products = {"dp x cp": layout.dp * layout.cp, "dp x micro-batches": layout.dp * m}
    products |= {"ranks": layout.world_size, "targets of the step": both.num_targets(step=0)}
    for group in (sizes | {"micro-batches": m}, products):
        for factor, before in ((c, ""), (1 / c if c else 0, "1/")):
            fits = [name for name, n in group.items() if n > 1 and math.isclose(factor, n)]
            if name := " or ".join(fits):
                return before + (f"({name})" if before and " " in name else name)
    return ""


# What a factor mostly comes from, by phase: 1/n of a size n, or no size; a guess, as the words say.
USUAL = {
    ("gradient norm", "1/"): ": usually the targets, which divide it, are counted several times",
    ("summed gradient", ""): ": usually what scales it, such as a norm, is a part of a sum, or "
    "counts something several times",
    ("scaled gradient", ""): ": the sums before are right, and usually a norm that scales them "
    "lacks a part, or counts one several times",
}


def _factor(one: Compared, both: Comparison) -> str:
    c = weights_of(one.got, [one.right])
    # Any number is some factor times any other.
    if not c or c[0] == 1 or (one.got.numel() == 1 and not size_named(c[0], both)):
        return ""
    # Initial weights do not depend on a size of the layout.
    factor = f"{c[0]:.6g} times" if one.key.phase == "initial" else times(c[0], both)
    usual = USUAL.get((one.key.phase, size_named(c[0], both)[:2]), "")
    if one.key.phase == "scaled gradient":
        factors = [weights_of(o.got, [o.right]) for o in both.first if o.key == one.key]
        if any(x and not math.isclose(x[0], c[0]) for x in factors):
            usual = ", and another number of times on other ranks"
    return f"it is {factor} what it should be{usual}"


def _parts(one: Compared, both: Comparison) -> str:
    if one.key.phase != "gradient norm":
        return _of_parts("it", one.got, one.right, parts_of(one, both), one, both)
    squared, axes = (one.got.square(), one.right.square()), ("", "tp", "dp", "cp", "pp")
    tried = (_of_parts("its square", *squared, squares(one, both, a), one, both) for a in axes)
    return next(filter(None, tried), "")


def _of_parts(
    what: str, got: Tensor, right: Tensor, parts: Parts, one: Compared, both: Comparison
) -> str:
    if len(parts) < 2 or not same(sum(parts.values()), right):
        return ""
    c = weights_of(got, [*parts.values()])
    return f"{what} {_weights_read(c, [*parts], one, both)}" if c else ""


def _weights_read(c: list[float], labels: list[tuple], one: Compared, both: Comparison) -> str:
    """Weights as a function of one axis, else of all, in words."""
    n = len(labels[0])
    for axes in [*combinations(range(n), 1), tuple(range(n))]:
        groups: dict[tuple, set] = {}
        for weight, label in zip(c, labels, strict=True):
            groups.setdefault(tuple(label[a] for a in axes), set()).add(round(weight, 7))
        if all_one := max(map(len, groups.values())) == 1:
            break
    weights = {label: min(of) for label, of in groups.items()}
    kept = [label for label, weight in weights.items() if weight]
    lost = [label for label, weight in weights.items() if not weight]
    factors = {weights[label] for label in kept}
    if not lost or len(factors) > 1 or not all_one:
        wrong = [f"{_named(k)} {times(w, both)}" for k, w in weights.items() if w != 1]
        return f"counts {', '.join(wrong[:6])}"
    again = f", {min(factors):.6g} times" * (factors != {1})
    at, axes = one.at, [axis for axis, _ in kept[0]] if kept else []
    others = [o for o in both.first if any(getattr(o.at, a, 0) != getattr(at, a, 0) for a in axes)]
    is_own = kept == [tuple((axis, getattr(at, axis, None)) for axis in axes)]
    if is_own and not any(same(o.got, one.got) for o in others):  # theirs would be other parts
        over = " and ".join(axis for axis, _ in kept[0])
        return f"is this rank's own part of a sum over {over}: the sum is missing{again}"
    few, said = (kept, "is {} alone") if len(kept) <= len(lost) else (lost, "lacks {}")
    return said.format(" and ".join(map(_named, few))) + again


def _named(label: tuple) -> str:
    if not label[0][0]:
        return " of ".join([label[0][1], *(f"{axis} {place}" for axis, place in label[1:])])
    return f"the part of {', '.join(f'{axis} {place}' for axis, place in label)}"


def _own_part(one: Compared, both: Comparison) -> str:
    """A part of a sum: what the ranks of an axis have adds up to what each should have."""
    axes, rest = ("dp", "cp", "tp", "pp"), parts_of(one, both).get(REST)
    for some in chain.from_iterable(combinations(axes, n) for n in (1, 2, 3)):
        mine = one.at._replace(**dict.fromkeys(some, 0))[1:5]
        alike = [o for o in both.first if o.at._replace(**dict.fromkeys(some, 0))[1:5] == mine]
        row = [o.got for o in alike if o.key.micro_batch == one.key.micro_batch]
        if len(row) < 2 or len({t.shape for t in row}) > 1:
            continue
        for what, of in (("it", one.right), ("what your extension adds", rest)):
            if of is not None and same(sum(row) - len(row) * (one.right - of), of):
                over = " and ".join(some)
                return f"{what} is this rank's own part of a sum over {over}: the sum is missing"
    return ""


def _another(one: Compared, both: Comparison) -> str:
    """Of another micro-batch or step, or a sum with it: a buffer was used again, or not emptied."""
    key, names = one.key, {}
    if not one.indices or key.phase in ("initial", "weights"):
        return ""
    is_activation = key.phase in ("forward", "backward")
    for m, d in both.trial.micro_batches if is_activation else [key[3:]]:
        other = f"micro-batch {m}" + f" of dp {d}" * (d != one.at.dp)
        names[key._replace(micro_batch=m, dp=d)] = other if is_activation else "this step"
    if key.step:
        names[key._replace(step=key.step - 1)] = "the step before"
    c = weights_of(one.got, [take(both.whole[of], one.indices) for of in names])
    used = {name: x for name, x in zip(names.values(), c or [], strict=bool(c)) if x}
    if [*used.values()] == [1]:
        return f"it is the tensor of {next(iter(used))}, not of {names[key]}"
    if 1 < len(used) <= 3:
        text = " + ".join(f"{x:.4g} x {name}" for name, x in used.items())
        return f"it is {text}, and should be {names[key]} alone"
    return ""


def _another_name(one: Compared, both: Comparison) -> str:
    """Another tensor of the same micro-batch: something between them is left out, or run again."""
    if one.key.phase != "forward" or one.got.ndim != 3:
        return ""
    for o in both.all:  # of another stage, where it is wrong, too
        is_beside = o.key._replace(name=one.key.name) == one.key and o.at.pp != one.at.pp
        if is_beside and same(one.got, o.got):
            return f"it is {o.key.name} of {o.at}"
    right = both.whole[one.key]
    for key, tensor in both.whole.items():
        is_beside = key._replace(name=one.key.name) == one.key and tensor is not right
        if is_beside and tensor.shape == right.shape and same(one.got, take(tensor, one.indices)):
            return f"it is {key.name}, another tensor"
    return ""


def _another_parameter(one: Compared, both: Comparison) -> str:
    """A sum with another parameter's gradient, which has its place in another rank's bucket."""
    rest, right = one.got - one.right, both.whole[one.key]
    for key, tensor in both.whole.items() if one.key.phase == "summed gradient" else ():
        is_other = key._replace(name=one.key.name) == one.key and tensor is not right
        if is_other and tensor.shape == right.shape and same(rest, take(tensor, one.indices)):
            return f"it is added to the gradient of {key.name}"
    return ""


def _old_weights(one: Compared, both: Comparison) -> str:
    parts = products(one.key, both, one.key.step - 1) if one.key.step else {}
    is_old = bool(parts) and same(one.got, take(sum(parts.values()), one.indices))
    return "it is computed with the weights of the step before" * is_old


DIMS = {3: ("sequences", "positions", "columns"), 4: ("sequences", "heads", "positions", "columns")}


def _dim_names(one: Compared) -> tuple[str, ...]:
    is_activation = one.key.phase in ("forward", "backward")
    names = DIMS.get(one.right.ndim, ("sequences", "positions")) if is_activation else ()
    return (names or ("rows", "columns", "dim 2"))[: one.right.ndim]


def _places(one: Compared, both: Comparison) -> str:
    """Whether each slice along a dim is another slice of the whole tensor, or global batch."""
    if not one.indices or one.key.phase == "biases of routers":  # many of them are equal
        return ""
    keys, indices, before = [one.key], [*one.indices], inf
    if one.key.phase in ("forward", "backward"):
        keys = [one.key._replace(micro_batch=m, dp=d) for m, d in both.trial.micro_batches]
        first = keys.index(one.key) * len(indices[0])
        if one.key.name == "tokens" and one.key.step:  # data may be read again
            before = len(keys) * len(indices[0])
            keys += [key._replace(step=key.step - 1) for key in keys]
        indices[0] = [first + i for i in indices[0]]
    whole = torch.cat([both.whole[key] for key in keys])
    for dim, name in enumerate(_dim_names(one)):
        others = [range(whole.shape[d]) if d == dim else i for d, i in enumerate(indices)]
        slices, mine = lines_along(take(whole, others), dim), lines_along(one.got, dim)
        if len(mine) < 2 or len(mine) * slices.numel() > 5e7:
            continue
        near = torch.cdist(mine, slices, p=torch.inf) <= FITS * whole.abs().max()
        right = torch.tensor([*indices[dim]])
        found = near.int().argmax(1).where(~near[range(len(right)), right], right)
        wrong = right != found
        if near.any(1).all() and wrong.any():
            pair = ranges(right[wrong].tolist()), ranges(found[wrong].tolist())
            owner = " of the global batch" if name == "sequences" else ""
            if found[wrong].min() >= before:
                pair = pair[0], ranges((found[wrong] - before).tolist())
                owner += " of the step before"
            if not {*found.tolist()} <= {*indices[dim]}:  # else only in another order
                owner = owner or _owner({*found.tolist()}, dim, one, both)
            n = int(wrong.sum())
            name, those = (name, "those") if n > 1 else (name[:-1], "that")
            return f"{name} {pair[0]} {_are(n)} {those} of {pair[1]}{owner}"
    return ""


def lines_along(tensor: Tensor, dim: int) -> Tensor:
    return tensor.movedim(dim, 0).reshape(tensor.shape[dim], -1).double()


def _owner(found: set[int], dim: int, one: Compared, both: Comparison) -> str:
    shape, layout = both.whole[one.key].shape, both.trial.layout
    for axis, other in product(("tp", "cp", "etp"), both.ranks):
        its = {*indices_of(one.key, shape, other, layout)[dim]}
        if found <= its and getattr(other, axis) != getattr(one.at, axis):
            return f": they are the part of {axis} {getattr(other, axis)} ({other})"
    return ""


def _region(one: Compared, both: Comparison) -> str:
    """Where it is wrong, if not everywhere; and by how much."""
    largest = both.whole.get(one.key, one.right).abs().max().clamp(min=1e-300)
    error = (one.got - one.right).abs() / largest
    for dim, name in enumerate(_dim_names(one)):
        of_lines = lines_along(error, dim).amax(1)
        where = (of_lines > TOLERANCE).nonzero()[:, 0].tolist()
        is_clear = not ((of_lines > TOLERANCE / 1000) & (of_lines <= TOLERANCE)).any()
        if len(where) < error.shape[dim] and is_clear:
            how = "wrong" if lines_along(one.got, dim)[where].any() else "zero"
            places = [one.indices[dim][i] for i in where] if one.indices else where
            return f"{name} {ranges(places)} are {how}, and the others are right"
    if one.got.numel() == 1:
        return f"it is {float(one.got):.10g}, and should be {float(one.right):.10g}"
    if error.max() < 3e-7:
        how = ": rounding of float32" * same(one.got, one.right.float().double())
        return f"it differs by {error.max():.1e} of its largest number{how}"
    num_wrong, n = int((error > TOLERANCE).sum()), error.numel()
    how = "all of it is wrong" if num_wrong == n else f"{num_wrong} of its {n} numbers are wrong"
    return f"{how}, by up to {error.max():.2g} of its largest number"


HYPOTHESES = [_unlike, _factor, keys_seen, key_heads, rows_seen, rotation, _parts, _own_part]
HYPOTHESES += [_another, _another_name, _another_parameter, _old_weights, _places, _region]
