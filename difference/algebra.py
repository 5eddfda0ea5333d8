"""Algebra: whether tensors are equal, and the numbers that make one of others."""

import math
from collections.abc import Iterable
from itertools import product

import torch
from torch import Tensor

from difference.parts import Context

FITS = 2e-9  # of the largest number: a residual below this is no accident


def same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are equal up to rounding in float64."""
    if a.shape != b.shape or not a.numel():
        return False
    largest = max(a.abs().max(), b.abs().max())
    return bool((a - b).abs().max() <= FITS * largest)


def size_named(c: float, context: Context) -> str:
    """The sizes of the run that a factor is, or is one part of; "" if there is none."""
    layout, m = context.trial.layout, context.trial.workload.num_micro_batches
    sizes = {"tp": layout.tp, "cp": layout.cp, "pp": layout.pp, "dp": layout.dp}
    products = {"dp x cp": layout.dp * layout.cp, "dp x micro-batches": layout.dp * m}
    products |= {"ranks": layout.world_size, "targets of the step": context.num_targets(step=0)}
    for group in (sizes | {"micro-batches": m}, products):
        for factor, before in ((c, ""), (1 / c if c else 0, "1/")):
            fits = [name for name, n in group.items() if n > 1 and math.isclose(factor, n)]
            if fits:
                name = " or ".join(fits)
                return f"{before}({name})" if before and " " in name else before + name
    return ""


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
