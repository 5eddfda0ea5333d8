"""Why: what a wrong tensor is, found by algebra.

    T, what a rank has, and R, what it should have. In float64 few formulas can fit by accident:

    T = c R                         a factor, which is named where it is a ratio of sizes
    T = sum c_k P_k, R = sum P_k    the weights of parts: a sum is missing, a part counts twice
    T = sum c_k R_k, R is one R_k   of other micro-batches, or of the step before
    T = softmax(q K) V              of other keys
    each slice of T is one of R     other places

Hypotheses are tried in the order of HYPOTHESES; the first that fits gives the sentence.
"""

import math
from collections.abc import Iterable
from itertools import chain, combinations, product

import torch
from torch import Tensor

from difference.compare import TOLERANCE, Compared, Comparison
from difference.places import Here, chunk, indices_of, take
from difference.taps import Key
from picotron_min.model import rotary_table, rotate

FITS = 2e-9  # of the largest number: a residual below this is no accident
Parts = dict[tuple, Tensor]  # by (axis, place on it), of each axis


def explain(one: Compared, both: Comparison) -> str:
    return next(filter(None, (hypothesis(one, both) for hypothesis in HYPOTHESES)))


def _unlike(one: Compared, both: Comparison) -> str:
    got, right = one.got, one.right
    if one.key.phase == "built":
        return f"its (pp, dp, cp, tp) are {got.tolist()}, and should be {right.tolist()}"
    if got.shape != right.shape:
        text = f"its shape is {tuple(got.shape)}, and should be {tuple(right.shape)}"
        for dim, (a, b) in enumerate(zip(got.shape, right.shape, strict=False)):
            if a != b and b and got.ndim == right.ndim:
                text += f": dim {dim} is {_times(a / b, both)} as long"
        return text
    if bad := int((~got.isfinite()).sum()):
        return f"{bad} of its {got.numel()} numbers are NaN or infinite"
    return "it is zero everywhere" if not got.any() else ""


def _times(c: float, both: Comparison) -> str:
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
            if fits:
                name = " or ".join(fits)
                return f"{before}({name})" if before and " " in name else before + name
    return ""


def _factor(one: Compared, both: Comparison) -> str:
    c = weights_of(one.got, [one.right])
    # Any number is some factor times any other.
    if not c or c[0] == 1 or (one.got.numel() == 1 and not size_named(c[0], both)):
        return ""
    # Initial weights do not depend on a size of the layout.
    times = f"{c[0]:.6g} times" if one.key.phase == "initial" else _times(c[0], both)
    return f"it is {times} what it should be"


def keys_seen(one: Compared, both: Comparison) -> str:
    """Attention to a wrong choice of keys, in pieces of the sequence."""
    trial, name = both.trial, one.key.name
    is_output = name.endswith(".core_attention") and one.key.phase == "forward"
    if not is_output or trial.workload.document_mask:
        return ""
    q, k, v = (both.whole[one.key._replace(name=f"{name}.{x}")] for x in "qkv")
    repeats, heads, own = q.shape[1] // k.shape[1], [*one.indices[1]], [*one.indices[2]]
    q, k, v = q[:, heads], *(x.repeat_interleave(repeats, 1)[:, heads] for x in (k, v))
    piece = q.shape[2] // (2 * trial.layout.cp)
    said = []
    for start in range(0, len(own), piece):
        rows, of_rows = own[start : start + piece], slice(start, start + piece)
        if same(one.got[:, :, of_rows], one.right[:, :, of_rows]):
            continue
        seen = _seen(q[:, :, rows], k, v, one.got[:, :, of_rows], rows[0])
        if not seen:
            why = "no choice of keys gives it: blocks are merged with wrong weights, or are wrong"
            return why if trial.layout.cp > 1 and trial.layout.cp_engine == "ring" else ""
        said.append(f"queries {ranges(rows)} see the keys {seen}, and should see 0-{rows[-1]}")
    return "; ".join(said[:2])


def _seen(q: Tensor, k: Tensor, v: Tensor, got: Tensor, first: int) -> str:
    """With e = exp(q k), got (sum w e) = sum w e v is linear in the weights w of the pieces."""
    piece = q.shape[2]
    e = (q @ k.mT / math.sqrt(q.shape[-1])).exp()
    starts = range(0, k.shape[2], piece)
    kinds, columns = [(start, start == first) for start in starts] + [(first, False)], []
    for start, is_causal in kinds:
        part = e[..., start : start + piece]
        part = part.tril() if is_causal else part
        value = part @ v[:, :, start : start + piece] - got * part.sum(-1, keepdim=True)
        columns.append(value.flatten())
    _, sizes, directions = torch.linalg.svd(torch.stack(columns, 1), full_matrices=False)
    if sizes[-1] > 1e-8 * sizes[0] or sizes[-2] < 1e-7 * sizes[0]:
        return ""
    w = directions[-1]
    w = w / w[w.abs() > 1e-6 * w.abs().max()].abs().min() * w.sum().sign()
    if (w - w.round()).abs().max() > 1e-4 or w.min() < -0.5:
        return ""
    said: dict[str, list[int]] = {}
    for (start, is_causal), n in zip(kinds, w.round().int().tolist(), strict=True):
        how = " without a mask" * (start == first and not is_causal) + f" {n} times" * (n > 1)
        said.setdefault(how, []).extend(range(start, start + piece) if n else ())
    return ", ".join(ranges(keys) + how for how, keys in said.items() if keys)


def rotation(one: Compared, both: Comparison) -> str:
    """Queries or keys turned by the angles of other positions."""
    base, _, letter = one.key.name.rpartition(".core_attention.")
    if letter not in ("q", "k") or one.key.phase != "forward":
        return ""
    config, S = both.trial.model_config, 2 * both.trial.workload.seq_length
    x = both.whole[one.key._replace(name=f"{base}.{letter}_proj")]
    x = take(x.unflatten(-1, (-1, config.head_dim)), [one.indices[i] for i in (0, 2, 1)])
    tables = [rotary_table(torch.tensor([at]), config) for at in range(S)]
    error = torch.stack([rotate(x, *table).transpose(1, 2) - one.got for table in tables]).abs()
    error = error.amax((1, 2, 4))  # [S, positions of this rank]
    pairs = zip(one.indices[2], error.argmin(0).tolist(), strict=True)
    pairs = [(a, b) for a, b in pairs if a != b]
    if error.amin(0).max() > FITS * x.abs().max() or not pairs:
        return ""
    turned = ranges(b for _, b in pairs) if any(b for _, b in pairs) else "0, so not at all"
    return f"positions {ranges(a for a, _ in pairs)} are rotated as if they were {turned}"


SUMS = ("embed_tokens", ".self_attn", ".mlp")
READERS = {
    "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
}


def products(key: Key, both: Comparison, step: int) -> Parts:
    """What each tp rank adds to an embedding or a row-parallel product, with a step's weights."""
    linear = f"{key.name}.{'o_proj' if key.name.endswith('attn') else 'down_proj'}"
    is_embedding = key.name == "model.embed_tokens"
    of = key._replace(name="tokens" if is_embedding else f"{linear}.input")
    if key.phase != "forward" or of not in both.whole or not key.name.endswith(SUMS):
        return {}
    x, weight = both.whole[of], both.weight(f"{key.name if is_embedding else linear}.weight", step)
    slices, tp = range(weight.shape[not is_embedding]), both.trial.layout.tp
    slices = {(("tp", t),): [*chunk(slices, t, tp)] for t in range(tp)}
    if not is_embedding:
        return {t: x[..., columns] @ weight[:, columns].T for t, columns in slices.items()}
    return {t: weight[x] * torch.isin(x, torch.tensor(i))[..., None] for t, i in slices.items()}


def parts_of(one: Compared, both: Comparison) -> Parts:
    """The summands of a tensor, on this rank; none where they are not known."""
    key, whole, parts = one.key, both.whole, products(one.key, both, one.key.step)
    if key.phase == "backward":  # of the output of a norm, from each linear that reads it
        layer, _, norm = key.name.rpartition(".")
        for linear in READERS.get(norm, ()):
            gradient = whole.get(key._replace(name=f"{layer}.{linear}"))
            if gradient is not None:
                weight = both.weight(f"{layer}.{linear}.weight", key.step)
                parts[("linear", linear.split(".")[-1]),] = gradient @ weight
    elif key.phase in ("loss", "summed gradient"):
        before = torch.zeros(())
        for m, d in both.trial.micro_batches:
            of = key._replace(phase="forward", micro_batch=m, dp=d)
            so_far = whole.get(of._replace(phase="sum so far"))
            if key.phase == "loss":
                so_far = before + whole[of].sum() / both.num_targets(key.step)
            if so_far is not None:
                parts[("micro-batch", m), ("dp", d)], before = so_far - before, so_far
    elif key.phase == "gradient norm":
        for of, gradient in whole.items():
            if of[:2] == (key.step, "summed gradient"):
                is_end = "embed_tokens" in of.name or "lm_head" in of.name
                kind = "the embeddings" if is_end else "matrices"
                kind = (("", "the weights of norms" if "norm" in of.name else kind),)
                square = gradient.square().sum() / both.num_targets(key.step) ** 2
                parts[kind] = parts.get(kind, 0) + square
    elif key.phase == "weights":
        before = both.weight(key.name, key.step)
        parts = {(("", "itself before the update"),): before}
        parts[("", "its update"),] = whole[key] - before
    return {label: take(part, one.indices) for label, part in parts.items()}


def _parts(one: Compared, both: Comparison) -> str:
    got, right, what, parts = one.got, one.right, "it", parts_of(one, both)
    if one.key.phase == "gradient norm":
        got, right, what = got.square(), right.square(), "its square"
    if len(parts) < 2 or not same(sum(parts.values()), right):
        return ""
    c = weights_of(got, [*parts.values()])
    return f"{what} {_weights_read(c, [*parts], one.at, both)}" if c else ""


def _weights_read(c: list[float], labels: list[tuple], at: Here, both: Comparison) -> str:
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
    times = {weights[label] for label in kept}
    if not lost or len(times) > 1 or not all_one:
        wrong = [f"{_named(k)} {_times(w, both)}" for k, w in weights.items() if w != 1]
        return f"counts {', '.join(wrong[:6])}"
    again = f", {min(times):.6g} times" * (times != {1})
    if kept == [tuple((axis, getattr(at, axis, None)) for axis, _ in kept[0])]:
        over = " and ".join(axis for axis, _ in kept[0])
        return f"is this rank's own part of a sum over {over}: the sum is missing{again}"
    few, said = (kept, "is {} alone") if len(kept) <= len(lost) else (lost, "lacks {}")
    return said.format(" and ".join(map(_named, few))) + again


def _named(label: tuple) -> str:
    if not label[0][0]:
        return label[0][1]
    return f"the part of {', '.join(f'{axis} {place}' for axis, place in label)}"


def _own_part(one: Compared, both: Comparison) -> str:
    """A part of a sum: what the ranks of an axis have adds up to what each should have."""
    axes = ("dp", "cp", "tp", "pp")
    for some in chain.from_iterable(combinations(axes, n) for n in (1, 2, 3)):
        mine = one.at._replace(**dict.fromkeys(some, 0))[1:5]
        alike = [o for o in both.first if o.at._replace(**dict.fromkeys(some, 0))[1:5] == mine]
        row = [o.got for o in alike if o.key.micro_batch == one.key.micro_batch]
        if len(row) > 1 and len({t.shape for t in row}) == 1 and same(sum(row), one.right):
            over = " and ".join(some)
            return f"it is this rank's own part of a sum over {over}: the sum is missing"
    return ""


def _another(one: Compared, both: Comparison) -> str:
    """Of another micro-batch or step, or a sum: a buffer is used again, or was not emptied."""
    key, whole = one.key, both.whole
    if not one.indices or key.phase in ("initial", "weights"):
        return ""
    is_activation = key.phase in ("forward", "backward")
    places = both.trial.micro_batches if is_activation else [key[3:]]
    terms = {key._replace(micro_batch=m, dp=d): "" for m, d in places}
    for of in terms:
        terms[of] = f"micro-batch {of.micro_batch}" + f" of dp {of.dp}" * (of.dp != one.at.dp)
    tensors = [take(whole[of], one.indices) for of in terms]
    terms[key] = terms[key] if is_activation else "this step"
    names = [*terms.values()]
    if key.step:
        old = key._replace(step=key.step - 1)
        names, tensors = [*names, "the step before"], [*tensors, take(whole[old], one.indices)]
    c = weights_of(one.got, tensors)
    used = {name: x for name, x in zip(names, c or [], strict=bool(c)) if x}
    if [*used.values()] == [1]:
        return f"it is the tensor of {next(iter(used))}, not of {terms[key]}"
    if 1 < len(used) <= 3:
        text = " + ".join(f"{x:.4g} x {name}" for name, x in used.items())
        return f"it is {text}, and should be {terms[key]} alone"
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
    if not one.indices:
        return ""
    keys, indices = [one.key], [*one.indices]
    if one.key.phase in ("forward", "backward"):
        keys = [one.key._replace(micro_batch=m, dp=d) for m, d in both.trial.micro_batches]
        first = keys.index(one.key) * len(indices[0])
        indices[0] = [first + i for i in indices[0]]
    whole = torch.cat([both.whole[key] for key in keys])
    for dim, name in enumerate(_dim_names(one)):
        others = [range(whole.shape[d]) if d == dim else i for d, i in enumerate(indices)]
        slices, mine = _lines(take(whole, others), dim), _lines(one.got, dim)
        if len(mine) < 2 or len(mine) * slices.numel() > 5e7:
            continue
        near = torch.cdist(mine, slices, p=torch.inf) <= FITS * whole.abs().max()
        right = torch.tensor([*indices[dim]])
        found = near.int().argmax(1).where(~near[range(len(right)), right], right)
        wrong = right != found
        if near.any(1).all() and wrong.any():
            pair = ranges(right[wrong].tolist()), ranges(found[wrong].tolist())
            owner = " of the global batch" if name == "sequences" else ""
            owner = owner or _owner({*found.tolist()}, dim, one, both)
            return f"{name} {pair[0]} are those of {pair[1]}{owner}"
    return ""


def _lines(tensor: Tensor, dim: int) -> Tensor:
    return tensor.movedim(dim, 0).reshape(tensor.shape[dim], -1).double()


def _owner(found: set[int], dim: int, one: Compared, both: Comparison) -> str:
    if found <= {*one.indices[dim]}:
        return ""  # only in another order
    for axis in ("tp", "cp", "etp"):
        for other in both.ranks:
            its = indices_of(one.key, both.whole[one.key].shape, other, both.trial.layout)
            if found <= {*its[dim]} and getattr(other, axis) != getattr(one.at, axis):
                return f": they are the part of {axis} {getattr(other, axis)} ({other})"
    return ""


def _region(one: Compared, both: Comparison) -> str:
    """Where it is wrong, if not everywhere; and by how much."""
    largest = both.whole.get(one.key, one.right).abs().max().clamp(min=1e-300)
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
    share = ""
    if num_right := int((error <= TOLERANCE).sum()):
        share = f" ({num_right} of its {error.numel()} numbers are right)"
    return f"all of it is wrong, by up to {error.max():.2g} of its largest number{share}"


HYPOTHESES = [_unlike, _factor, keys_seen, rotation, _parts, _own_part]
HYPOTHESES += [_another, _old_weights, _places, _region]


def same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are equal up to rounding in float64."""
    if a.shape != b.shape or not a.numel():
        return False
    largest = max(a.abs().max(), b.abs().max())
    return bool((a - b).abs().max() <= FITS * largest)


def weights_of(got: Tensor, tensors: list[Tensor]) -> list[float] | None:
    """c with got = sum c_k tensors_k, or None; where several fit, small numbers, most of them 1."""
    columns = torch.stack([t.flatten().double() for t in tensors], 1)
    largest = columns.abs().max(0).values
    scale, q = largest.clamp(min=1e-300), got.flatten().double()
    ranks = torch.linalg.svdvals(columns / scale)
    if len(q) >= len(tensors) and ranks[-1] > 1e-8 * ranks[0]:
        c = torch.linalg.lstsq(columns / scale, q[:, None]).solution[:, 0] / scale
    elif len(tensors) <= 8:
        counts = range(9 if len(tensors) <= 3 else 3)
        choices = sorted(product(counts, repeat=len(tensors)), key=lambda c: sum(n != 1 for n in c))
        basis, r = torch.linalg.qr(columns)
        errors = (torch.tensor(choices).double() @ r.T - basis.T @ q).abs().max(1).values
        c = torch.tensor(choices[int((errors <= FITS * q.abs().max()).int().argmax())]).double()
    else:
        return None
    c = c.where(largest > 0, 1.0)
    if not same(got.double(), (columns @ c).view_as(got)):
        return None
    return [round(x) if abs(x - round(x)) < 1e-6 else x for x in c.tolist()]


def ranges(numbers: Iterable[int]) -> str:
    """0 1 2 3 12 13 -> 0-3 12-13"""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return " ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
