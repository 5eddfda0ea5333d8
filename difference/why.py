"""Why: what a wrong tensor is, found by algebra.

    T, what a rank has, and R, what it should have. In float64 few formulas can fit by accident:

    T = c R                         a factor, which is named where it is a ratio of sizes
    T = sum c_k P_k, R = sum P_k    the weights of parts: a sum is missing, a part counts twice
    T = sum c_k R_k, R is one R_k   of other micro-batches, or of the step before
    T = S, another tensor           a step between them is left out, or run twice
    T = softmax(q K) V              of other keys, or other key heads
    T = sum c_e expert_e(x)         of other experts, or with other weights
    each slice of T is one of R     other places

Hypotheses are tried in the order of HYPOTHESES; the first that fits gives the sentence.
"""

import math
from itertools import combinations, product

from torch import Tensor

from difference.algebra import REDUCTIONS, same, scaled_by_parts, weights_of
from difference.compare import Compared, Comparison
from difference.experts import experts_of_tokens
from difference.logits import logits_gradient, summed_vocabulary
from difference.parts import REST, Parts, parts_of, products, squares, with_other_lse
from difference.places import Here, along, take
from difference.reads import (
    are,
    counted,
    drawn,
    key_heads,
    keys_seen,
    places,
    region,
    rotation,
    rows_scaled,
    rows_seen,
)


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
        return f"{bad} of its {got.numel()} numbers {are(bad)} NaN or infinite"
    return "it is zero everywhere" if not got.any() else ""


def times(c: float, both: Comparison) -> str:
    name = size_named(c, both)
    return f"{_shown(c)}{name and f' ({name})'} times"


def _shown(c: float) -> str:
    return text if (text := f"{c:.6g}") != "1" else f"{c:.12g}"


def size_named(c: float, both: Comparison) -> str:
    """The sizes of the run that a factor is, or is one part of; "" if there is none."""
    layout, m = both.trial.layout, both.trial.workload.num_micro_batches
    sizes = {axis: getattr(layout, axis) for axis in ("tp", "cp", "pp", "dp", "ep", "etp")}
    products = {"dp x cp": layout.dp * layout.cp, "dp x micro-batches": layout.dp * m}
    targets = both.num_targets(step=0)
    products |= {"ranks": layout.world_size, "targets of the step": targets}
    products["targets of a micro-batch"] = targets / (layout.dp * m)
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
    factor = f"{_shown(c[0])} times" if one.key.phase == "initial" else times(c[0], both)
    if one.key.phase == "weights" and not size_named(c[0], both) and (of := _parts(one, both)):
        return of
    usual = USUAL.get((one.key.phase, size_named(c[0], both)[:2]), "")
    factors = {o.at: weights_of(o.got, [o.right]) for o in both.first if o.key == one.key}
    factors = {at: x[0] for at, x in factors.items() if x}
    if not all(math.isclose(x, c[0]) for x in factors.values()):
        rows = {axes: [factors[at] for at in row] for axes, row in along(one.at, factors)}
        whys = (f": {why} over {axes}" for axes, of in rows.items() if (why := scaled_by_parts(of)))
        usual = f", and another number of times on other ranks{next(whys, '')}"
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
    if not c or (one.key.phase == "weights" and 1 not in c):  # three numbers fit too much
        return ""
    return f"{what} {_weights_read(c, [*parts], one, both)}"


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
    few, form = (kept, "is {} alone") if len(kept) <= len(lost) else (lost, "lacks {}")
    return form.format(" and ".join(map(_named, few))) + again


def _named(label: tuple) -> str:
    if not label[0][0]:
        return " of ".join([label[0][1], *(f"{axis} {place}" for axis, place in label[1:])])
    return f"the part of {', '.join(f'{axis} {place}' for axis, place in label)}"


def _own_part(one: Compared, both: Comparison) -> str:
    """A part of a sum: what the ranks of an axis have adds up to what each should have."""
    rest, alike = parts_of(one, both).get(REST), _on_ranks(one, both)
    for axes, ranks in along(one.at, alike):
        row = [alike[at] for at in ranks]
        are_equal = all(same(one.got, got) for got in row)
        whats = (("it", one.right), ("what your extension adds", rest))
        for (what, of), (name, reduce) in product(whats, REDUCTIONS.items()):
            if (
                of is not None
                and not (are_equal and "root" in name)  # 1 / sqrt(n) on n ranks fits anyway
                and all(t.shape == of.shape for t in row)
                and same(reduce([got - (one.right - of) for got in row]), of)
            ):
                if name == "mean" and one.key.phase == "summed gradient":  # no gradient is a mean
                    what, name = f"{what} is {times(len(row), both)}", "sum"
                else:
                    what = f"{what} is"
                own = f"this rank's own part of a {name} over {axes}"
                return f"{what} {own}: the {name.split()[0]} is missing"
    return ""


def _on_ranks(one: Compared, both: Comparison) -> dict[Here, Tensor]:
    of = one.key.name, one.key.micro_batch
    return {o.at: o.got for o in both.first if (o.key.name, o.key.micro_batch) == of}


def _another(one: Compared, both: Comparison) -> str:
    """Of another micro-batch or step, or a sum with it: a buffer was used again, or not emptied."""
    key, names = one.key, {}
    if not one.indices or key.phase in ("initial", "weights"):
        return ""
    is_activation = key.phase in ("forward", "backward")
    for m, d in both.trial.micro_batches if is_activation else [key[3:]]:
        other = f"micro-batch {m}" + f" of dp {d}" * (both.trial.layout.dp > 1)
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
    right, others = both.whole[one.key], (o for o in both.all if o.at.pp != one.at.pp)
    for o in others:  # of another stage, where it is wrong, too
        if o.key._replace(name=one.key.name) == one.key and same(one.got, o.got):
            return f"it is {o.key.name} of {o.at}"
    for key, tensor in both.whole.items():
        is_beside = key._replace(name=one.key.name) == one.key and tensor is not right
        if is_beside and tensor.shape == right.shape and same(one.got, take(tensor, one.indices)):
            return f"it is {key.name}, another tensor"
    return ""


def _another_parameter(one: Compared, both: Comparison) -> str:
    """A sum with another parameter's gradient, which has its place in another rank's bucket."""
    if one.key.phase != "summed gradient":
        return ""
    rights = {o.at: o.right for o in both.all if o.key == one.key}
    for axes, ranks in along(one.at, rights):
        row = [rights[at] for at in ranks]
        if len({t.shape for t in row}) == 1 and same(one.got, sum(row)):
            return f"it is summed over {axes}, whose ranks have other parts of it"
    rest, right = one.got - one.right, both.whole[one.key]
    for key, tensor in both.whole.items():
        is_other = key._replace(name=one.key.name) == one.key and tensor is not right
        if is_other and tensor.shape == right.shape and same(rest, take(tensor, one.indices)):
            return f"it is added to the gradient of {key.name}"
    return ""


def _old_weights(one: Compared, both: Comparison) -> str:
    parts = products(one.key, both, one.key.step - 1) if one.key.step else {}
    is_old = bool(parts) and same(one.got, take(sum(parts.values()), one.indices))
    return "it is computed with the weights of the step before" * is_old


def _order(one: Compared, both: Comparison) -> str:
    got, right = one.got.flatten(), one.right.flatten()
    is_alike = got.numel() > 2 and same(got.sort().values, right.sort().values)
    return "it has the right numbers in other places" * is_alike


def _other_rows(one: Compared, both: Comparison) -> str:
    """A sum over tp whose parts belong to other ranks' rows: they were sent to a wrong rank."""
    rows = {tuple(map(tuple, o.indices)): o for o in both.all if o.key == one.key}
    parts = products(one.key, both, one.key.step) if 1 < len(rows) <= 4 else {}
    of_rows = [(label, o.at) for label in parts for o in rows.values()]
    mine = [take(parts[label], o.indices) for label in parts for o in rows.values()]
    c = weights_of(one.got, mine) if len(parts) > 1 else None
    used = [(label, at) for (label, at), x in zip(of_rows, c or [], strict=bool(c)) if x == 1]
    if not c or len(used) != sum(x != 0 for x in c):
        return ""
    own = rows[tuple(map(tuple, one.indices))].at
    others = [f"{_named(label)} for {at}" for label, at in used if at != own]
    return f"it adds {', '.join(others)}: these are other ranks' rows" if others else ""


def _other_lse(one: Compared, both: Comparison) -> str:
    guesses = with_other_lse(one, both).items()
    name = next((name for name, found in guesses if same(one.got, found)), "")
    return name and f"its backward has {name} in place of all keys' log-sum-exp"


HYPOTHESES = [_unlike, _factor, keys_seen, key_heads, rows_seen, rotation, _parts, _own_part]
HYPOTHESES += [_another, _another_name, _another_parameter, _old_weights, _other_rows, _other_lse]
HYPOTHESES += [logits_gradient, counted, summed_vocabulary, places, _order, rows_scaled, drawn]
HYPOTHESES += [experts_of_tokens, region]
