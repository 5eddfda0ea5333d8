"""The sharded units of exercise 22: four matrices in one unit, or in two, and their gradients."""

import torch
from torch import nn

from exercises.exercise import Case, draw

COLUMNS, STEPS = 2, 2
NAMES = "abcd"  # of all matrices, and of those in each unit
NAMES_OF_UNITS = {1: ("abcd",), 2: ("ab", "cd")}


def gradient_of(case: Case, rank: int, step: int, micro_batch: int, name: str):
    rows = case.rows[NAMES.index(name)]
    gradient = draw(case, "gradient", rank, step, micro_batch, name, shape=(rows, COLUMNS))
    return gradient.to(dtype_of(case))


def dtype_of(case: Case) -> torch.dtype:
    """Of the weights and their gradients; masters and buffers are in float64."""
    return getattr(torch, getattr(case, "dtype", "float64"))


def build(rank, case: Case) -> list:
    course, travelling, units = rank.course, [], []
    shard = course.placement.Cut("dp_cp", 0)
    placement = course.placement.Placement((), copies=(), sums=("dp_cp",), further=(shard,))
    axes, device = rank.axes(course.settings.Layout(dp=case.ranks)), torch.device("cpu")
    for names in NAMES_OF_UNITS[case.units]:
        modules = {}
        for name in names:
            rows = case.rows[NAMES.index(name)]
            kind = {"bias": False, "device": "meta", "dtype": torch.float64}
            modules[name] = [nn.Linear(COLUMNS, rows, **kind)]
        table = dict.fromkeys(names, placement)
        args = axes, dtype_of(case), device, case.sharding, travelling
        units.append(course.units.ShardedUnit(modules, table, *args))
    return units
