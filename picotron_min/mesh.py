"""Mesh: processes on named axes, along each of which a rank communicates with some of them.

The world is a grid (pp, dp, cp, tp), numbered row by row (see layout.py). An axis is the row of
ranks that a rank is in when one coordinate varies. A joint axis varies several at once:

    (pp 2, dp 2, cp 1, tp 2)                      rank 5 is at pp 1, dp 0, tp 1

        pp 0:  dp 0 [0 1]   dp 1 [2 3]        tp [4 5]    dp [5 7]    pp [1 5]
        pp 1:  dp 0 [4 5]   dp 1 [6 7]        dp_cp [5 7]    dp_cp_tp [4 5 6 7]

An extension may number the same ranks on a grid of its own.

In production: `torch.distributed.device_mesh.init_device_mesh`; joint axes are its `_flatten`.
"""

import math
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist

from picotron_min.collectives import Axis
from picotron_min.layout import Grid, Layout


class Axes:
    """The row of ranks that this rank is in, along each axis: `axes.tp`, or `axes["tp"]`."""

    pp: Axis
    dp: Axis
    cp: Axis
    tp: Axis
    dp_cp: Axis  # gradients are summed over it: its ranks share weights and see other tokens
    dp_cp_tp: Axis  # all ranks of a stage; gradients of norms, with sequence parallelism
    ends: Axis  # the first and the last stage: both hold a tied embedding
    world: Axis  # all ranks: the loss and the gradient norm

    def __init__(self, **axes: Axis) -> None:
        vars(self).update(axes)

    def __getitem__(self, name: str) -> Axis:
        return vars(self)[name]

    def __iter__(self) -> Iterator[Axis]:
        return iter(vars(self).values())

    @property
    def ranks(self) -> dict[str, int]:
        return {axis.name: axis.rank for axis in self}

    @property
    def sizes(self) -> dict[str, int]:
        return {axis.name: axis.size for axis in self}


def build_axes(device: torch.device, layout: Layout, timeout_seconds: float = 60.0) -> Axes:
    """Split the world into the groups of each axis; all ranks must call it with the same layout."""
    groups: dict[tuple[bool, str], dist.ProcessGroup] = {}

    def axis(name: str, members: list[list[int]]) -> Axis:
        timeout = timedelta(seconds=timeout_seconds)
        # dp and dp_cp have the same ranks when cp is 1: they share a group. With NCCL what uses a
        # group is done in turn. So sums of gradients have others than messages of activations.
        key = "dp" in name or name == "world", str(members)
        if key not in groups:
            # Creating a group is collective over all ranks, also those that are not in it.
            groups[key], _ = dist.new_subgroups_by_enumeration(members, timeout=timeout)
        return Axis(name, groups[key], device)

    pipelines = rows_of(layout.grids[0], ("pp",))
    ends = [sorted({ranks[0], ranks[-1]}) for ranks in pipelines]
    between = [[rank] for ranks in pipelines for rank in ranks[1:-1]]  # each must be in some group
    axes = {
        name: axis(name, rows_of(grid, varying))
        for grid in layout.grids
        for name, varying in grid.axes.items()
    }
    return Axes(**axes, ends=axis("ends", ends + between))


def rows_of(grid: Grid, varying: tuple[str, ...]) -> list[list[int]]:
    """Ranks that differ in these coordinates only: pp 2, tp 2 has [[0, 1], [2, 3]] for tp."""
    names = list(grid.sizes)
    dims = [names.index(name) for name in varying]
    ranks = torch.arange(math.prod(grid.sizes.values())).view(*grid.sizes.values())
    size = math.prod(grid.sizes[name] for name in varying)
    return ranks.movedim(dims, tuple(range(-len(dims), 0))).reshape(-1, size).tolist()
