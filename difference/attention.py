"""Attention: which keys queries saw, and by which positions queries and keys were rotated."""

import math

import torch
from torch import Tensor

from difference.algebra import FITS, ranges, same
from difference.first import Compared
from difference.parts import Context
from difference.places import take
from picotron_min.model import rotary_table, rotate


def keys_seen(one: Compared, context: Context) -> str:
    """Attention to a wrong choice of keys, in pieces of the sequence."""
    trial, name = context.trial, one.key.name
    is_output = name.endswith(".core_attention") and one.key.phase == "forward"
    if not is_output or trial.workload.document_mask:
        return ""
    q, k, v = (context.whole[one.key._replace(name=f"{name}.{x}")] for x in "qkv")
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


def rotation(one: Compared, context: Context) -> str:
    """Queries or keys turned by the angles of other positions."""
    base, _, letter = one.key.name.rpartition(".core_attention.")
    if letter not in ("q", "k") or one.key.phase != "forward":
        return ""
    config, S = context.trial.model_config, 2 * context.trial.workload.seq_length
    x = context.whole[one.key._replace(name=f"{base}.{letter}_proj")]
    x = take(x.unflatten(-1, (-1, config.head_dim)), [one.indices[i] for i in (0, 2, 1)])
    if x.numel() * S > 5e7:
        return ""
    everywhere = x.reshape(1, 1, -1, config.head_dim).expand(-1, S, -1, -1)
    turned = rotate(everywhere, *rotary_table(torch.arange(S), config))[0].unflatten(1, x.shape[:3])
    error = (turned - one.got.transpose(1, 2)).abs().amax((1, 3, 4))  # [S, positions of this rank]
    pairs = zip(one.indices[2], error.argmin(0).tolist(), strict=True)
    pairs = [(a, b) for a, b in pairs if a != b]
    if error.amin(0).max() > FITS * x.abs().max() or not pairs:
        return ""
    turned = ranges(b for _, b in pairs) if any(b for _, b in pairs) else "0, so not at all"
    return f"positions {ranges(a for a, _ in pairs)} are rotated as if they were {turned}"
