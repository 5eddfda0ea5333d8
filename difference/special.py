"""Special: hypotheses about one kind of tensor: attention, rotation, gradient norm, loss."""

import math
from collections.abc import Iterator
from itertools import product

import torch
from torch import Tensor

from difference.algebra import FITS, ranges, same, sizes
from difference.first import Compared
from difference.parts import Context
from difference.places import Here, here, of_parameter, positions, take
from difference.tiny import STRIPE_ROWS
from picotron_min.loss import IGNORE_INDEX
from picotron_min.model import rotary_table, rotate
from picotron_min.placement import NORMS


def keys_seen(one: Compared, context: Context) -> str:
    """Attention to a wrong choice of keys, in pieces of the sequence."""
    trial, name = context.trial, one.key.name
    if not name.endswith(".core_attention") or one.key.phase != "forward":
        return ""
    if trial.workload.document_mask:
        return ""
    whole = [context.whole[one.key._replace(name=f"{name}.{x}")] for x in "qkv"]
    heads = whole[0].shape[1] // whole[1].shape[1]
    k, v = (x.repeat_interleave(heads, 1)[:, [*one.indices[1]]] for x in whole[1:])
    q, own = whole[0][:, [*one.indices[1]]], [*one.indices[2]]
    piece = q.shape[2] // (2 * trial.layout.cp)
    said = []
    for start in range(0, len(own), piece):
        rows = own[start : start + piece]
        got = one.got[:, :, start : start + piece]
        if same(got, one.right[:, :, start : start + piece]):
            continue
        seen = _seen(q[:, :, rows], k, v, got, rows[0], piece)
        if seen is None:
            said.append(None)
            continue
        text = f"queries {ranges(rows)} see {seen}"
        said.append(f"{text}, and should see 0-{rows[-1]}")
    if said and None in said:
        is_split = trial.layout.cp > 1
        what = "blocks are merged with wrong weights, or carry wrong keys" if is_split else ""
        return what and f"no choice of keys gives it: {what}"
    return "; ".join(said[:2])


def _seen(q: Tensor, k: Tensor, v: Tensor, got: Tensor, first: int, piece: int) -> str | None:
    """With e = exp(q k), got (sum w e) = sum w e v is linear in the weights w of the pieces."""
    e = (q @ k.mT / math.sqrt(q.shape[-1])).exp()
    kinds, columns = [], []
    for start in range(0, k.shape[2], piece):
        for is_causal in (False, True):
            part = e[..., start : start + piece]
            part = part.tril() if is_causal else part
            kinds.append((start, is_causal))
            value = part @ v[:, :, start : start + piece] - got * part.sum(-1, keepdim=True)
            columns.append(value.flatten())
    matrix = torch.stack(columns, 1)
    _, sizes, directions = torch.linalg.svd(matrix, full_matrices=False)
    if sizes[-1] > 1e-8 * sizes[0] or (len(sizes) > 1 and sizes[-2] < 1e-7 * sizes[0]):
        return None
    w = directions[-1]
    w = w / w[w.abs() > 1e-6 * w.abs().max()].abs().min() * (1 if w.sum() > 0 else -1)
    if (w - w.round()).abs().max() > 1e-4 or w.min() < -0.5:
        return None
    said = []
    for (start, is_causal), n in zip(kinds, w.round().int().tolist(), strict=True):
        if n:
            is_usual = is_causal == (start == first)
            how = "" if is_usual else " causally" if is_causal else " also later than they are"
            said.append((how + (f" {n} times" if n > 1 else ""), range(start, start + piece)))
    kinds_said = dict.fromkeys(how for how, _ in said)
    texts = [ranges(i for h, r in said if h == how for i in r) + how for how in kinds_said]
    return f"the keys {', '.join(texts)}"


def rotation(one: Compared, context: Context) -> str:
    """Queries or keys turned by the angles of other positions."""
    base, _, letter = one.key.name.rpartition(".core_attention.")
    if letter not in ("q", "k") or one.key.phase != "forward":
        return ""
    config, D = context.trial.model_config, context.trial.model_config.head_dim
    x = context.whole[one.key._replace(name=f"{base}.{letter}_proj")].unflatten(-1, (-1, D))
    x = take(x, [one.indices[0], one.indices[2], one.indices[1]])  # [B, s, heads, D]
    S = 2 * context.trial.workload.seq_length
    if x.numel() * S > 5e7:
        return ""
    found = []
    for i in range(x.shape[1]):
        here_ = x[:, i : i + 1].expand(-1, S, -1, -1)  # at each position
        turned = rotate(here_, *rotary_table(torch.arange(S), config))
        near = (turned - one.got[:, :, i, None].transpose(1, 2)).abs().amax((0, 2, 3))
        if near.min() > FITS * x.abs().max():
            return ""
        found.append(int(near.argmin()))
    pairs = [(a, b) for a, b in zip(one.indices[2], found, strict=True) if a != b]
    if not pairs:
        return ""
    turned = ranges(b for _, b in pairs) if any(b for _, b in pairs) else "0, so not at all"
    return f"positions {ranges(a for a, _ in pairs)} are rotated as if they were {turned}"


def norm(one: Compared, context: Context) -> str:
    """The squared norm as a sum over groups of parameters, each counted some times."""
    if one.key.phase != "gradient norm":
        return ""
    sums = {
        key.name: tensor
        for key, tensor in context.whole.items()
        if key.phase == "summed gradient" and key.step == one.key.step
    }
    wanted = (float(one.got) * context.num_targets) ** 2
    for groups in _norm_groups(sums, context):
        squares = {name: float(sum(t.square().sum() for t in of)) for name, of in groups.items()}
        counts = range(max(2, min(8, context.trial.layout.world_size)) + 1)
        if len(counts) ** len(squares) > 1e5:
            counts = range(3)
        for c in sorted(product(counts, repeat=len(squares)), key=lambda c: sum(n != 1 for n in c)):
            total = sum(n * s for n, s in zip(c, squares.values(), strict=True))
            if abs(total - wanted) <= 1e-9 * wanted:
                said = [f"{name} {n} times" for n, name in zip(c, squares, strict=True) if n != 1]
                return f"its square counts {', '.join(said)}"
    return ""


def _norm_groups(sums: dict[str, Tensor], context: Context) -> Iterator[dict[str, list[Tensor]]]:
    kinds: dict[str, list] = {}
    for name, tensor in sums.items():
        module = name.removesuffix(".weight").split(".")[-1]
        kind = "the weights of norms" if module in (*NORMS, "q_norm", "k_norm") else "matrices"
        kind = "the embeddings" if module in ("embed_tokens", "lm_head") else kind
        kinds.setdefault(kind, []).append(tensor)
    yield kinds
    layers: dict[str, list] = {}
    for name, tensor in sums.items():
        number = name.split("layers.")[-1].split(".")[0] if "layers." in name else name
        layers.setdefault(f"layer {number}" if number != name else name, []).append(tensor)
    if len(layers) <= 7:
        yield layers
    if len(context.ranks) <= 8:
        yield {f"the parts of rank {at.rank}": _parts_on(at, sums, context) for at in context.ranks}


def _parts_on(at: Here, sums: dict[str, Tensor], context: Context) -> list[Tensor]:
    """What a rank has of the gradients, but for sharding; all stages are taken for one."""
    none, layout = {"rows": None, "is_new": False}, context.trial.layout
    return [take(t, of_parameter(n, t.shape, at, layout, none)) for n, t in sums.items()]


def loss(one: Compared, context: Context) -> str:
    """A loss of a part of the rows, of a part of the vocabulary, or with a part of the logits."""
    layout, trial = context.trial.layout, context.trial
    if one.key.phase == "loss":
        return _step_loss(one, context)
    if one.key.name != "loss" or one.key.phase != "forward":
        return ""
    rows = positions(one.at, layout, trial.workload.seq_length)
    x = context.whole[one.key._replace(name="model.norm")][:, rows].flatten(0, 1)
    targets = context.whole[one.key._replace(name="targets")][:, rows].flatten()
    logits = x @ context.weight("lm_head.weight", one.key.step).T
    counts = targets != IGNORE_INDEX
    each = -(-logits.shape[1] // layout.tp)
    mine = slice(one.at.tp * each, (one.at.tp + 1) * each)
    ids = targets.where(counts, 0)
    is_here = (ids >= mine.start) & (ids < mine.stop)
    at_target = logits.gather(1, ids[:, None])[:, 0]
    sums = {"": logits.logsumexp(1), "a softmax over its own slice": logits[:, mine].logsumexp(1)}
    sums["largest logits that are not reduced"] = logits.exp().sum(1).log()
    ends = {"": at_target, "without the other ranks' target logits": at_target * is_here}
    for (a, total), (b, target) in product(sums.items(), ends.items()):
        if (a or b) and same(one.got, ((total - target) * counts).sum()):
            return f"it is the loss with {a}{' and ' * bool(a and b)}{b}".replace(
                "with without", "without"
            )
    losses = ((sums[""] - at_target) * counts).split(STRIPE_ROWS)
    stripes = [stripe.sum() for stripe in losses]
    for chosen in product((0, 1, 2), repeat=len(losses) if len(losses) <= 7 else 0):
        if sum(chosen) and same(one.got, sum(n * s for n, s in zip(chosen, stripes, strict=True))):
            rows = [f"{i * STRIPE_ROWS}-{(i + 1) * STRIPE_ROWS - 1}" for i in range(len(losses))]
            said = [f"{n} x rows {r}" for n, r in zip(chosen, rows, strict=True) if n]
            return f"it is the loss of {' + '.join(said)}, a stripe each"
    return ""


def _step_loss(one: Compared, context: Context) -> str:
    """The sum over micro-batches, dp and cp, each counted some times."""
    layout, parts = context.trial.layout, {}
    for m, d in context.trial.micro_batches:
        whole = context.whole[one.key._replace(phase="forward", micro_batch=m, dp=d)]
        for c in range(layout.cp):
            rows = positions(here(c * layout.tp, layout), layout, whole.shape[1])
            label = {"micro-batch": m, "dp": d, "cp": c}
            label = {a: v for a, v in label.items() if sizes(context).get(f"{a}es", 2) > 1}
            parts[tuple(label.items())] = float(whole[:, rows].sum())
    wanted = float(one.got) * context.num_targets
    for c in product((0, 1, 2), repeat=len(parts) if len(parts) <= 8 else 0):
        total = sum(n * part for n, part in zip(c, parts.values(), strict=True))
        if sum(c) and abs(total - wanted) <= FITS * abs(wanted):
            names = [", ".join(f"{a} {v}" for a, v in part) for part in parts]
            said = [f"{n} x {name}" for n, name in zip(c, names, strict=True) if n]
            return f"it is the mean of {' + '.join(said[:6])} alone"
    return ""
