"""Algebra: whether tensors are equal, and the numbers that make one of others."""

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


def sizes(context: Context) -> dict[str, float]:
    """Numbers of a run that a tensor may be too large or too small by, with their names."""
    layout, w = context.trial.layout, context.trial.workload
    found = {"tp": layout.tp, "cp": layout.cp, "pp": layout.pp, "dp": layout.dp}
    found |= {"dp x cp": layout.dp * layout.cp, "micro-batches": w.num_micro_batches}
    found |= {"dp x micro-batches": layout.dp * w.num_micro_batches, "ranks": layout.world_size}
    found |= {"sequences of a micro-batch": w.micro_batch_size, "positions": w.seq_length}
    found["targets of the step"] = context.num_targets
    return {name: n for name, n in found.items() if n > 1}


def size_named(c: float, context: Context) -> str:
    """What a factor is as a function of one size, "" if of none."""
    forms = {"{}": 1, "1/({})": -1, "({})^2": 2, "1/({})^2": -2}
    for sign, (form, power) in product((1, -1), forms.items()):
        for name, n in sizes(context).items():
            if abs(c / (sign * float(n) ** power) - 1) < 1e-8:
                bare = form.replace("({})", "{}") if " " not in name else form
                return "-" * (sign < 0) + bare.format(name)
    return next((f"1 + {n}" for n, k in sizes(context).items() if abs(c / (1 + k) - 1) < 1e-8), "")


def factor_of(got: Tensor, right: Tensor) -> float | None:
    """c where got = c right, and c is not 1."""
    if not (square := right.square().sum()):
        return None
    c = float((got * right).sum() / square)
    return c if same(got, c * right) and abs(c - 1) > FITS else None


def weights_of(got: Tensor, tensors: list[Tensor]) -> list[float] | None:
    """c with got = sum c_k tensors_k; where several fit, numbers of 0, 1, 2 near 1. Else None."""
    columns = torch.stack([t.flatten().double() for t in tensors], 1)
    scale = columns.abs().max(0).values.clamp(min=1e-300)
    used = (columns.abs().max(0).values > 0).tolist()
    small, q = columns / scale, got.flatten().double()
    ranks = torch.linalg.svdvals(small)
    if ranks[-1] > 1e-8 * ranks[0]:
        c = (torch.linalg.lstsq(small, q[:, None]).solution[:, 0] / scale).tolist()
    elif len(tensors) <= 8:
        choices = sorted(
            product((0, 1, 2), repeat=len(tensors)), key=lambda c: sum(x != 1 for x in c)
        )
        basis, r = torch.linalg.qr(columns)
        errors = (torch.tensor(choices).double() @ r.T - basis.T @ q).abs().max(1).values
        c = list(map(float, choices[int((errors <= FITS * q.abs().max()).int().argmax())]))
    else:
        return None
    c = [x if is_used else 1.0 for x, is_used in zip(c, used, strict=True)]
    fits = same(got.double(), (columns @ torch.tensor(c, dtype=torch.float64)).view_as(got))
    return [round(x) if abs(x - round(x)) < 1e-6 else x for x in c] if fits else None


def ranges(numbers: Iterable[int]) -> str:
    """0 1 2 3 12 13 -> 0-3 12-13"""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return " ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
