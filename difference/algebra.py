"""Algebra: whether tensors are equal, and the numbers that make one of others."""

import math
from collections.abc import Callable, Iterable
from itertools import product

import torch
from torch import Tensor

FITS = 1e-10  # of the largest number; less than what counts as wrong, see compare.TOLERANCE


def largest(row: list[Tensor]) -> Tensor:
    """Of several ranks; NaN where one has it all, or zeros: other ranks' numbers can be there."""
    found = torch.stack(row).amax(0)
    accident = any(same(found, one) or not one.all() for one in row)
    return found * math.nan if accident else found


# How a whole tensor is made of each rank's part.
REDUCTIONS: dict[str, Callable[[list[Tensor]], Tensor]] = {
    "sum": sum,
    "mean": lambda row: sum(row) / len(row),
    "maximum": largest,
    "root of a sum of squares": lambda row: sum(one.square() for one in row).sqrt(),
    "root mean square": lambda row: (sum(one.square() for one in row) / len(row)).sqrt(),
}


def scaled_by_parts(factors: list[float]) -> str:
    """Of ranks' tensors that are right but for a factor each: that what scales them is a part."""
    spread = max(factors) - min(factors)
    for verb, power in (("divides", -1), ("multiplies", 1)):
        for name, reduce in REDUCTIONS.items():
            whole = reduce([torch.tensor(c, dtype=torch.float64) ** power for c in factors])
            # Of almost equal factors, any of them fits.
            if spread > 1e-6 and abs(whole - 1) < min(1e-9, spread**2 / 100):
                return f"what {verb} it is this rank's own part of a {name}"
    return ""


def same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are equal up to rounding in float64."""
    if a.shape != b.shape or not a.numel():
        return False
    largest = max(a.abs().max(), b.abs().max())
    return bool((a - b).abs().max() <= FITS * largest < math.inf)


def weights_of(got: Tensor, tensors: list[Tensor]) -> list[float] | None:
    """c with got = sum c_k tensors_k, or None; where several fit, small numbers, most of them 1."""
    columns = torch.stack([t.flatten().double() for t in tensors], 1)
    largest = columns.abs().max(0).values
    scale, q = largest.clamp(min=1e-300), got.flatten().double()
    ranks = torch.linalg.svdvals(columns / scale)
    if (len(q) > len(tensors) or len(q) == len(tensors) == 1) and ranks[-1] > 1e-8 * ranks[0]:
        c = torch.linalg.lstsq(columns / scale, q[:, None]).solution[:, 0] / scale
    elif len(tensors) <= 10:
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


def keys_of(q: Tensor, k: Tensor, v: Tensor, got: Tensor, pieces: list[range], rows: range) -> str:
    """The keys that give an output of attention to the queries `rows`, by pieces; "" if none do.

    q and got [H, rows, D], k and v [H, S, D]. With e = exp(q k), got (sum w e) = sum w e v is
    linear in the weights w of the pieces.
    """
    e = (q @ k.mT / math.sqrt(q.shape[-1])).exp()
    has_masks, columns = len(rows) > 1, []  # one query sees its own piece whole
    kinds = [(piece, False) for piece in pieces]
    kinds += [(piece, True) for piece in pieces if has_masks and len(piece) > 1]
    for piece, is_causal in kinds:
        part = e[..., piece.start : piece.stop]
        part = part.tril() if is_causal else part
        value = part @ v[:, piece.start : piece.stop] - got * part.sum(-1, keepdim=True)
        columns.append(value.flatten())
    _, sizes, directions = torch.linalg.svd(torch.stack(columns, 1), full_matrices=False)
    if len(sizes) < len(kinds) or sizes[-1] > 1e-8 * sizes[0] or sizes[-2] < 1e-7 * sizes[0]:
        return ""
    w = directions[-1]
    w = w / w[w.abs() > 1e-6 * w.abs().max()].abs().min() * w.sum().sign()
    if (w - w.round()).abs().max() > 1e-4 or w.min() < -0.5:
        return ""
    by_mask: dict[str, list[int]] = {}
    for (piece, is_causal), n in zip(kinds, w.round().int().tolist(), strict=True):
        is_usual = is_causal == (piece == rows and has_masks)  # earlier keys of an own piece
        how = "" if is_usual else " with a causal mask" if is_causal else " without a mask"
        how += f" {n} times" * (n > 1)
        by_mask.setdefault(how, []).extend(piece if n else ())
    return ", ".join(ranges(sorted(keys)) + how for how, keys in by_mask.items() if keys)
