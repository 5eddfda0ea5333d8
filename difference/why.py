"""Why: what a wrong tensor is, found by algebra.

    T, what a rank has, and R, what it should have. In float64 few formulas can fit by accident:

    T = c R                         a factor, which is named where it is a ratio of sizes
    T = sum c_k P_k, R = sum P_k    the weights of parts: a sum is missing, a part counts twice
    T = R of another batch, step, place, tensor

Hypotheses are tried in the order of HYPOTHESES; the first that fits gives the sentence.
"""

from collections.abc import Callable

import torch

from difference import special
from difference.algebra import FITS, factor_of, ranges, same, size_named, weights_of
from difference.first import Compared
from difference.parts import Context, Part, old_output, parts_of
from difference.places import take


def explain(one: Compared, context: Context) -> str:
    for hypothesis in HYPOTHESES:
        if sentence := hypothesis(one, context):
            return sentence
    return _region(one, context)


def _unlike(one: Compared, context: Context) -> str:
    if one.got is None:
        return "it is never computed"
    got, right = one.got, one.right
    if got.shape != right.shape:
        text = f"its shape is {tuple(got.shape)}, and should be {tuple(right.shape)}"
        for dim, (a, b) in enumerate(zip(got.shape, right.shape, strict=False)):
            if a != b and b and got.ndim == right.ndim:
                name = size_named(a / b, context)
                text += f": dim {dim} is {a / b:.4g}{name and f' ({name})'} times as long"
        return text
    if bad := int((~got.isfinite()).sum()):
        return f"{bad} of its {got.numel()} numbers are NaN or infinite"
    return "it is zero everywhere" if not got.any() else ""


def _factor(one: Compared, context: Context) -> str:
    c = factor_of(one.got.double(), one.right.double())
    if c is None:
        return ""
    name = size_named(c, context) if one.key.phase != "initial" else ""
    if one.got.numel() == 1 and not name:  # any number is some factor times any other
        return ""
    return f"it is {c:.6g} times what it should be" + (f": {name}" if name else "")


def _parts(one: Compared, context: Context) -> str:
    parts = parts_of(one, context)
    whole = sum((part.tensor for part in parts), torch.zeros(()))
    if len(parts) < 2 or not same(whole.expand_as(one.right), one.right):
        return ""
    c = weights_of(one.got, [part.tensor for part in parts])
    return read_weights(c, parts, context) if c else ""


def read_weights(c: list[float], parts: list[Part], context: Context) -> str:
    """Weights as a function of one coordinate of the parts, else of two, else as they are."""
    axes = [a for a in parts[0].label if len({part.label[a] for part in parts}) > 1]
    for chosen in [*((a,) for a in axes), *((a, b) for a in axes for b in axes if a < b)]:
        groups: dict[tuple, set] = {}
        for weight, part in zip(c, parts, strict=True):
            groups.setdefault(tuple(part.label[a] for a in chosen), set()).add(weight)
        if all(max(of) - min(of) < 1e-7 for of in groups.values()):
            own = tuple(parts[0].own.get(a) for a in chosen)
            return _of_groups(chosen, {v: min(of) for v, of in groups.items()}, own, context)
    listed = [f"{weight:.4g} x {_label(part.label)}" for weight, part in zip(c, parts, strict=True)]
    return "it is " + " + ".join(listed[:6]) if len(listed) <= 6 else ""


def _label(label: dict) -> str:
    return ", ".join(str(v) if a == "which" else f"{a} {v}" for a, v in label.items())


def _of_groups(axes: tuple, groups: dict[tuple, float], own: tuple, context: Context) -> str:
    def called(values: tuple) -> str:
        return _label(dict(zip(axes, values, strict=True)))

    over = " and ".join(axes) if axes != ("which",) else "the parts"
    zero = [v for v, c in groups.items() if c == 0]
    others = [v for v in groups if v not in zero]
    if zero and len({groups[v] for v in others}) == 1:
        times = groups[others[0]]
        again = "" if times == 1 else f", {times:.6g} times"
        if others == [own]:
            return f"it is this rank's own part of a sum over {over}: the sum is missing{again}"
        if len(others) == 1:
            return f"it is the part of {called(others[0])} alone{again}"
        if len(zero) < len(groups) / 2 or len(zero) == 1:
            return f"it lacks the part of {'; '.join(map(called, zero))}{again}"
        return f"it has only the parts of {'; '.join(map(called, others))}{again}"
    wrong = {v: c for v, c in groups.items() if c != 1}
    if len(wrong) < len(groups) and len(wrong) <= 2:
        said = []
        for v, c in wrong.items():
            name = size_named(c, context) if c not in (0, 2) else ""
            how = "twice" if c == 2 else f"{c:.6g} times" + (f" ({name})" if name else "")
            said.append(
                f"it counts the part of {called(v)} {how}" if c else f"it lacks {called(v)}"
            )
        return ", and ".join(said)
    listed = [f"{c:.6g} x {called(v)}" for v, c in groups.items()]
    return "it is " + " + ".join(listed[:6])


def _mixture(one: Compared, context: Context) -> str:
    """A sum over micro-batches where there should be one: a buffer used again, or not emptied."""
    if one.key.phase not in ("forward", "backward"):
        return ""
    keys = [one.key._replace(micro_batch=m, dp=d) for m, d in context.trial.micro_batches]
    keys = [k for k in keys if k.dp == one.key.dp] + [k for k in keys if k.dp != one.key.dp]
    for of_keys in (keys[: context.trial.workload.num_micro_batches], keys):
        if len(of_keys) < 2:
            continue
        tensors = [take(context.whole[k], one.indices) for k in of_keys] if one.indices else []
        c = weights_of(one.got, tensors) if tensors else None
        if c and sum(x != 0 for x in c) <= 3:
            terms = [(x, k) for x, k in zip(c, of_keys, strict=True) if x]
            said = [f"{x:.4g} x {_batch(k, one)}" for x, k in terms]
            if [x for x, _ in terms] == [1]:
                return (
                    f"it is the tensor of {_batch(terms[0][1], one)}, not of {_batch(one.key, one)}"
                )
            return f"it is {' + '.join(said)}, and should be {_batch(one.key, one)} alone"
    return ""


def _batch(key, one: Compared) -> str:
    return f"micro-batch {key.micro_batch}" + (f" of dp {key.dp}" if key.dp != one.key.dp else "")


def _old(one: Compared, context: Context) -> str:
    old = old_output(one, context) if one.key.step and one.key.phase == "forward" else None
    if old is None or not same(one.got, old):
        return ""
    return "it is computed with the weights of the step before"


def _update(one: Compared, context: Context) -> str:
    if one.key.phase != "weights":
        return ""
    part, key = (lambda t: take(t, one.indices)), one.key
    before = part(context.weight(key.name, key.step))
    gradient = part(context.whole[key._replace(phase="scaled gradient")])
    if same(one.got, before):
        return "it has not been updated"
    if c := weights_of(one.got - before, [one.right - before]):
        named = size_named(c[0], context)
        return f"its update is {c[0]:.6g} times what it should be" + (f": {named}" if named else "")
    if context.trial.recipe.optimizer == "sgd" and (c := weights_of(one.got, [before, gradient])):
        recipe = context.trial.recipe
        decay = recipe.weight_decay * (before.ndim > 1)
        right = 1 - recipe.learning_rate * decay, -recipe.learning_rate
        return "it is {:.6g} x weight + {:.6g} x gradient, not {:.6g} and {:.6g}".format(*c, *right)
    return ""


def _stale(one: Compared, context: Context) -> str:
    key, whole = one.key, context.whole
    if key.step and same(one.got, take(whole[key._replace(step=key.step - 1)], one.indices)):
        return "it is the tensor of the step before"
    if key.step and one.got.dtype == torch.float64:
        for phase in dict.fromkeys((key.phase, "scaled gradient")):
            old = whole.get(key._replace(phase=phase, step=key.step - 1))
            if old is not None and (c := weights_of(one.got - one.right, [take(old, one.indices)])):
                what = f"the {phase} of the step before" if phase == "scaled gradient" else "it"
                when = "" if phase == "scaled gradient" else " in the step before"
                return f"it is what it should be, plus {c[0]:.4g} x {what}{when}"
    for other, tensor in whole.items():
        like = other._replace(name=key.name, phase=key.phase) == key
        if like and other != key and tensor.ndim == one.got.ndim:
            fits = all(
                len(i) == n and max(i, default=0) < size
                for i, n, size in zip(one.indices, one.got.shape, tensor.shape, strict=False)
            )
            if fits and same(one.got, take(tensor, one.indices)):
                of = f"{other.phase} of " if other.phase != key.phase else ""
                return f"it is {of}{other.name}"
    return ""


DIMS = {3: ("sequences", "positions", "columns"), 4: ("sequences", "heads", "positions", "columns")}


def dim_names(one: Compared) -> tuple[str, ...]:
    if one.key.phase in ("forward", "backward"):
        return DIMS.get(one.right.ndim, ("sequences", "positions"))
    return ("rows", "columns")


def _places(one: Compared, context: Context) -> str:
    """Whether each slice along a dim is another slice of the whole tensor."""
    whole = context.whole.get(one.key)
    if whole is None or not one.indices or one.got.shape != one.right.shape:
        return ""
    for dim, name in enumerate(dim_names(one)[: one.got.ndim]):
        others = [range(whole.shape[d]) if d == dim else i for d, i in enumerate(one.indices)]
        slices = take(whole, others).movedim(dim, 0).double()
        slices = slices.reshape(len(slices), -1)
        mine = one.got.movedim(dim, 0).double().reshape(one.got.shape[dim], -1)
        if mine.shape[0] < 2 or mine.shape[0] * slices.numel() > 5e7:
            continue
        near = (mine[:, None] - slices[None]).abs().amax(-1) <= FITS * max(
            1e-300, whole.abs().max()
        )
        if not near.any(1).all():
            continue
        right = torch.tensor([*one.indices[dim]])
        is_right = near[torch.arange(len(right)), right]
        found = torch.where(is_right, right, near.int().argmax(1)).tolist()
        pairs = [(a, b) for a, b in zip(right.tolist(), found, strict=True) if a != b]
        if pairs:
            a, b = ranges(a for a, _ in pairs), ranges(b for _, b in pairs)
            return f"{name} {a} are those of {b}{_owner(dim, found, one, context)}"
    if one.got.ndim == 2 and one.got.shape[0] == one.got.shape[1] and same(one.got.T, one.right):
        return "it is transposed"
    return ""


def _owner(dim: int, found: list[int], one: Compared, context: Context) -> str:
    for other in context.ranks:
        if other != one.at and set(found) <= {*context.indices(one, other)[dim]}:
            axis = next(
                (a for a in ("tp", "cp", "etp") if getattr(other, a) != getattr(one.at, a)), ""
            )
            return (
                f": they are the part of {axis} {getattr(other, axis, '')} ({other})"
                if axis
                else ""
            )
    return ""


ROUNDING = {"float32": 3e-7, "float16": 2e-3, "bfloat16": 2e-2}


def _region(one: Compared, context: Context) -> str:
    """Where it is wrong, if not everywhere; and how much."""
    error = (one.got.double() - one.right.double()).abs()
    whole = context.whole.get(one.key)
    largest = float((one.right if whole is None else whole).abs().max().clamp(min=1e-300))
    for kind in ROUNDING:
        rounded = one.right.to(getattr(torch, kind)).to(one.got.dtype)
        if same(one.got, rounded):
            return f"it is rounded to {kind}"
    size = float(error.max()) / largest
    for dim, name in enumerate(dim_names(one)[: one.got.ndim]):
        lines = error.movedim(dim, 0).reshape(error.shape[dim], -1).amax(1) > 1e-9 * largest
        if 0 < int(lines.sum()) < len(lines):
            where = lines.nonzero()[:, 0].tolist()
            listed = ranges(one.indices[dim][i] for i in where) if one.indices else ranges(where)
            got, right = (t.movedim(dim, 0)[where] for t in (one.got, one.right))
            c = factor_of(got.double(), right.double())
            how = "wrong" if got.any() else "zero"
            how = f"{c:.6g} times what they should be" if c and how == "wrong" else how
            return f"{name} {listed} are {how}, and the others are right"
    if size < ROUNDING["float32"]:
        return f"it differs by {size:.1e} of its largest number: rounding of float32"
    if one.got.numel() == 1:
        return f"it is {float(one.got):.10g}, and should be {float(one.right):.10g}"
    kind = ": rounding of float16 or bfloat16, perhaps" if size < ROUNDING["bfloat16"] / 4 else ""
    return f"all of it is wrong, by up to {size:.2g} of its largest number{kind}"


Hypothesis = Callable[[Compared, Context], str]
HYPOTHESES: list[Hypothesis] = [_unlike, _factor, special.keys_seen, special.rotation, _parts]
HYPOTHESES += [_mixture, _old, _update, _stale, _places, special.norm, special.loss]
