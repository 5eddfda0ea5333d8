"""Reads: a right formula of wrong keys, heads, positions or rows; and where a tensor is wrong."""

from itertools import accumulate, chain, combinations, pairwise, product
from math import inf

import torch
import torch.nn.functional as F
from torch import Tensor

from difference.algebra import FITS, keys_of, ranges, same
from difference.compare import TOLERANCE, Compared, Comparison
from difference.places import indices_of, take
from difference.taps import BIAS, Key
from difference.tiny import Trial, text_of
from difference.whole import batch_of
from picotron_min.model import rotary_table, rotate

MERGED = "no choice of keys gives it: blocks are merged with wrong weights, or are wrong"


def _inputs_of_attention(one: Compared, both: Comparison) -> list[Tensor]:
    """The whole q, k and v of an output of attention; else nothing."""
    if not one.key.name.endswith(".core_attention") or one.key.phase != "forward":
        return []
    return [both.whole[one.key._replace(name=f"{one.key.name}.{x}")] for x in "qkv"]


def documents_of(key: Key, trial: Trial) -> list[list[int]]:
    """Of each sequence of a micro-batch, where its documents begin."""
    if not trial.workload.document_mask:
        return [[0]] * trial.workload.micro_batch_size
    batch = batch_of(trial, text_of(trial), key.step, key.micro_batch, key.dp)
    return [[*accumulate((0, *lengths[:-1]))] for lengths in batch[3].lengths]


def keys_seen(one: Compared, both: Comparison) -> str:
    """Attention to a wrong choice of keys, in pieces that ranks and documents cut."""
    if not (inputs := _inputs_of_attention(one, both)):
        return ""
    layout, (q, k, v) = both.trial.layout, inputs
    repeats, heads, own = q.shape[1] // k.shape[1], [*one.indices[1]], [*one.indices[2]]
    q, k, v = q[:, heads], *(x.repeat_interleave(repeats, 1)[:, heads] for x in (k, v))
    found: dict[tuple[str, str], list[int]] = {}  # in which sequences
    S, why = q.shape[2], ""
    for b, borders in enumerate(documents_of(one.key, both.trial)):
        cuts = sorted({*range(0, S, S // (2 * layout.cp)), *borders, S})
        pieces = [range(*pair) for pair in pairwise(cuts)]
        for rows in (piece for piece in pieces if piece[0] in own):
            mine = slice(at := own.index(rows[0]), at + len(rows))
            got, right = one.got[b, :, mine], one.right[b, :, mine]
            if same(got, right):
                continue
            x, first = q[b, :, rows.start : rows.stop], max(i for i in borders if i <= rows[0])
            if seen := keys_of(x, k[b], v[b], got, pieces, rows):
                sees = f"see the keys {seen}, and should see {first}-{rows[-1]}"
                found.setdefault((f"queries {ranges(rows)}", sees), []).append(b)
            elif keys_of(x, k[b], v[b], right, pieces, rows):  # an extension can do more than this
                why = MERGED * (layout.cp > 1 and layout.cp_engine == "ring")
    few = [*found.items()][:2]
    few = [(*texts, _of_sequences(of) * (len(of) < len(q))) for texts, of in few]
    return "; ".join(f"{queries}{of} {sees}" for queries, sees, of in few) or why


def _of_sequences(numbers: list[int]) -> str:
    return f" of sequence{'s' * (len(numbers) > 1)} {ranges(numbers)}"


def rows_seen(one: Compared, both: Comparison) -> str:
    """An embedding that takes the rows of other tokens."""
    if one.key[1:3] != ("forward", "model.embed_tokens"):
        return ""
    weight = both.weight("model.embed_tokens.weight", one.key.step)
    tokens = take(both.whole[one.key._replace(name="tokens")], one.indices[:2]).flatten().tolist()
    near = torch.cdist(one.got.flatten(0, 1), weight, p=torch.inf) <= FITS * weight.abs().max()
    rows = near.int().argmax(1).tolist()
    pairs = {(t, row) for t, row, fits in zip(tokens, rows, near.any(1), strict=True) if fits}
    found = dict(pairs)
    if len(pairs) > len(found):  # other rows at other places: it is no question of tokens
        return ""
    wrong = sorted(t for t, row in found.items() if t != row)
    pair = ranges(wrong), ranges(found[t] for t in wrong)
    return f"tokens {pair[0]} have the rows of {pair[1]}" if wrong else ""


def key_heads(one: Compared, both: Comparison) -> str:
    """Attention of query heads to wrong key heads; of documents none is found."""
    if not (inputs := _inputs_of_attention(one, both)):
        return ""
    q, k, v = inputs
    own, found = [*one.indices[1]], []
    for head, got in zip(own, one.got.unbind(1), strict=True):
        alike = q[:, [head]].expand(-1, k.shape[1], -1, -1)
        outs = F.scaled_dot_product_attention(alike, k, v, is_causal=True)[:, :, one.indices[2]]
        found += [str(j) for j, out in enumerate(outs.unbind(1)) if same(got, out)][:1]
    right = [str(head * k.shape[1] // q.shape[1]) for head in own]
    if len(found) < len(own) or found == right:
        return ""
    seen, should = " ".join(found), " ".join(right)
    return f"query heads {ranges(own)} see the key heads {seen}, and should see {should}"


def rotation(one: Compared, both: Comparison) -> str:
    """Queries or keys turned by the angles of other positions, or values by any."""
    base, _, letter = one.key.name.rpartition(".core_attention.")
    if letter not in ("q", "k", "v") or one.key.phase != "forward":
        return ""
    config, S = both.trial.model_config, 2 * both.trial.workload.seq_length
    x = both.whole[one.key._replace(name=f"{base}.{letter}_proj")]
    x = take(x.unflatten(-1, (-1, config.head_dim)), [one.indices[i] for i in (0, 2, 1)])
    tables = [rotary_table(torch.tensor([at]), config) for at in range(S)]
    error = torch.stack([rotate(x, *table).transpose(1, 2) - one.got for table in tables]).abs()
    error = error.amax((1, 2, 4))  # [S, positions of this rank]
    pairs = zip(one.indices[2], error.argmin(0).tolist(), strict=True)
    pairs = [(a, b) for a, b in pairs if b != (a if letter != "v" else 0)]
    if error.amin(0).max() > FITS * x.abs().max() or not pairs:
        cos, sin = rotary_table(torch.tensor([*one.indices[2]]), config)
        is_swapped = same(rotate(x, sin, cos).transpose(1, 2), one.got)
        return "it is rotated with cos and sin swapped" * is_swapped
    if letter == "v":
        return f"values are rotated, by the angles of positions {ranges(b for _, b in pairs)}"
    turned = ranges(b for _, b in pairs) if any(b for _, b in pairs) else "0, so not at all"
    return f"positions {ranges(a for a, _ in pairs)} are rotated as if they were {turned}"


def are(n: int) -> str:
    return "is" if n == 1 else "are"


DIMS = {3: ("sequences", "positions", "columns"), 4: ("sequences", "heads", "positions", "columns")}


def _dim_names(one: Compared) -> tuple[str, ...]:
    is_activation = one.key.phase in ("forward", "backward")
    names = DIMS.get(one.right.ndim, ("sequences", "positions")) if is_activation else ()
    return (names or ("rows", "columns", "dim 2"))[: one.right.ndim]


def places(one: Compared, both: Comparison) -> str:
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
            return f"{name} {pair[0]} {are(n)} {those} of {pair[1]}{owner}"
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


def region(one: Compared, both: Comparison) -> str:
    """Where it is wrong, if not everywhere; and by how much."""
    whole = both.whole.get(one.key, one.right) if one.right.numel() > 1 else one.right
    error, first = (one.got - one.right).abs() / whole.abs().max().clamp(min=1e-300), ""
    if not one.got.is_floating_point():
        pair = (x[one.got != one.right][0] for x in (one.got, one.right))
        first = ": the first is {}, and should be {}".format(*pair)
    regions = {}  # by the part of it that is wrong
    for dim, name in enumerate(_dim_names(one)):
        of_lines = lines_along(error, dim).amax(1)
        where = (of_lines > TOLERANCE).nonzero()[:, 0].tolist()
        is_clear = not ((of_lines > TOLERANCE / 1000) & (of_lines <= TOLERANCE)).any()
        if len(where) < error.shape[dim] and is_clear:
            how = "wrong" if lines_along(one.got, dim)[where].any() else "zero"
            places = [one.indices[dim][i] for i in where] if one.indices else where
            n = len(places)
            which = f"{name if n > 1 else name[:-1]} {ranges(places)} {are(n)}"
            sentence = f"{which} {how}, and the others are right{first}"
            if name == "positions" and one.indices:
                sentence += _at_a_border(places, [*one.indices[dim]])
            regions.setdefault(len(where) / error.shape[dim], sentence)
    if regions:
        return regions[min(regions)]
    rounding = ": perhaps rounding of float32" * bool(1e-9 < error.max() < 3e-7)
    if same(one.got, one.right.float().double()):
        rounding = ": rounding of float32"
    if one.got.numel() == 1:
        return f"it is {float(one.got):.10g}, and should be {float(one.right):.10g}{rounding}"
    if error.max() < 3e-7:
        return f"it differs by {error.max():.1e} of its largest number{rounding}"
    num_wrong, n = int((error > TOLERANCE).sum()), error.numel()
    how = "all of it is wrong" if num_wrong == n else f"{num_wrong} of its {n} numbers are wrong"
    return f"{how}, by up to {error.max():.2g} of its largest number"


def _at_a_border(places: list[int], mine: list[int]) -> str:
    """Of positions: whether each begins, or ends, a piece of the sequence that this rank has."""
    borders = {"first": {*mine} - {i + 1 for i in mine}, "last": {*mine} - {i - 1 for i in mine}}
    found = next((name for name, of in borders.items() if {*places} <= of), "")
    return f": the {found} of a piece that this rank has" if found else ""


def counted(one: Compared, both: Comparison) -> str:
    """A router's bias that follows the experts of some tokens alone: of places on axes."""
    if one.key.phase != "biases of routers":
        return ""
    trial, rate = both.trial, both.trial.workload.routing.moe_router_bias_update_rate
    before = both.whole.get(one.key._replace(step=one.key.step - 1), torch.zeros_like(one.got))
    of = one.key._replace(phase="forward", name=one.key.name.replace(BIAS, "experts"))
    axes = [axis for axis in ("dp", "cp", "tp") if getattr(trial.layout, axis) > 1]
    groups = chain.from_iterable(combinations(axes, n) for n in (1, 2, 3))
    few = [{axis: getattr(one.at, axis) for axis in names} for names in groups]
    few += [{"micro-batch": m} for m in range(trial.workload.num_micro_batches)]
    for some in few:
        ids = []
        for m, at in product(range(trial.workload.num_micro_batches), both.ranks):
            places = at._asdict() | {"micro-batch": m}
            if at.pp == one.at.pp and some.items() <= places.items():
                experts = both.whole[of._replace(micro_batch=m, dp=at.dp)]
                indices = indices_of(of, experts.shape, at, trial.layout)
                ids.append(take(experts, indices).flatten())
        tokens = torch.cat(ids).bincount(minlength=len(one.got)).double()
        if same(one.got, before + rate * (tokens.mean() - tokens).sign()):
            where = ", ".join(f"{axis} {place}" for axis, place in some.items())
            return f"it follows the tokens of {where} alone"
    return ""


def rows_scaled(one: Compared, both: Comparison) -> str:
    """Tokens have factors: what they are divided by is wrong."""
    is_of_tokens = one.key.phase in ("forward", "backward") and one.got.ndim > 1
    if not is_of_tokens or one.got.shape[-1] < 2:
        return ""
    got, right = one.got.flatten(0, -2), one.right.flatten(0, -2)
    factors = (got * right).sum(1) / right.square().sum(1)
    is_each = factors.all() and ((factors - 1).abs() > 1e-6).all()  # else: see `region`
    if not is_each or not same(got, factors[:, None] * right):
        return ""
    sums, should = got.sum(1), right.sum(1)
    if same(should, should.mean().expand_as(should)):
        few = f"{sums.min():.4g} to {sums.max():.4g}"
        return f"each token's numbers add up to {few}, and should to {should[0]:.4g}"
    return f"tokens are {factors.min():.4g} to {factors.max():.4g} times what they should be"


def drawn(one: Compared, both: Comparison) -> str:
    """Random numbers of the right size, but not these."""
    if one.key.phase != "initial" or one.got.numel() < 64:
        return ""
    few, close = one.got.numel() ** -0.5, one.got.std() / one.right.std() - 1
    likeness = torch.corrcoef(torch.stack([one.got.flatten(), one.right.flatten()]))[0, 1]
    is_new = max(abs(close), abs(likeness)) < 5 * few
    how = "by another seed, or after other draws"
    return f"it is drawn anew, with the right standard deviation: {how}" * bool(is_new)
