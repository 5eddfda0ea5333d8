"""From processes to named axes: which ranks does a rank communicate with, and for what?

The world is a grid (pp, dp, cp, tp), numbered row by row (see layout.py). An axis is the row of
ranks that a rank is in when one coordinate varies. A joint axis varies several at once:

    (pp 2, dp 2, cp 1, tp 2)                      rank 5 is at pp 1, dp 0, tp 1

        pp 0:  dp 0 [0 1]   dp 1 [2 3]        tp [4 5]    dp [5 7]    pp [1 5]
        pp 1:  dp 0 [4 5]   dp 1 [6 7]        dp_cp [5 7]    dp_cp_tp [4 5 6 7]

Experts lie on another grid over the same ranks, (pp, edp, ep, etp), also row by row: with ep 2 rank
5 has other experts than rank 4, and the same as rank 7: ep [4 5], edp [5 7].

In production: `torch.distributed.device_mesh.init_device_mesh`; joint axes are its `_flatten`.
"""

import math
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

from picotron_min.collectives import Axis
from picotron_min.layout import Layout


class Axes(NamedTuple):
    """The row of ranks that this rank is in, along each axis."""

    pp: Axis
    dp: Axis
    cp: Axis
    tp: Axis
    dp_cp: Axis  # gradients are summed over it: its ranks share weights and see other tokens
    dp_cp_tp: Axis  # all ranks of a stage; gradients of norms, with sequence parallelism
    ends: Axis  # the first and the last stage: both hold a tied embedding
    world: Axis  # all ranks: the loss and the gradient norm
    ep: Axis  # its ranks have different experts of a layer
    etp: Axis  # parts of the same experts
    edp: Axis  # the same parts of the same experts, whose gradients are summed over it
    ep_etp: Axis  # all experts of a layer: tokens travel over it
    cp_tp: Axis  # different tokens of the same sequences

    @property
    def ranks(self) -> dict[str, int]:
        return {axis.name: axis.rank for axis in self}

    @property
    def sizes(self) -> dict[str, int]:
        return {axis.name: axis.size for axis in self}


def build_axes(device: torch.device, layout: Layout, timeout_seconds: float = 60.0) -> Axes:
    """Split the world into the groups of each axis; all ranks must call it with the same layout."""
    grid = torch.arange(dist.get_world_size()).view(layout.sizes)
    expert_grid = grid.view(layout.pp, -1, layout.ep, layout.etp)
    groups: dict[str, dist.ProcessGroup] = {}

    # Ranks that differ in these coordinates only: pp 2, tp 2 has groups_of(3) = [[0, 1], [2, 3]].
    def groups_of(*dims: int, grid: torch.Tensor = grid) -> list[list[int]]:
        size = math.prod(grid.shape[dim] for dim in dims)
        return grid.movedim(dims, tuple(range(-len(dims), 0))).reshape(-1, size).tolist()

    def axis(name: str, members: list[list[int]]) -> Axis:
        key, timeout = str(members), timedelta(seconds=timeout_seconds)
        if key not in groups:  # dp and dp_cp have the same ranks when cp is 1: share a group
            # Every rank makes all groups, also those it is not in: that is how they are agreed on.
            groups[key], _ = dist.new_subgroups_by_enumeration(members, timeout=timeout)
        return Axis(name, groups[key], device)

    ends = [sorted({ranks[0], ranks[-1]}) for ranks in groups_of(0)]
    # Every rank must be in some group.
    between = [[rank] for ranks in groups_of(0) for rank in ranks[1:-1]]
    return Axes(
        *[axis(name, groups_of(dim)) for dim, name in enumerate(layout.sizes._fields)],
        dp_cp=axis("dp_cp", groups_of(1, 2)),
        dp_cp_tp=axis("dp_cp_tp", groups_of(1, 2, 3)),
        ends=axis("ends", ends + between),
        world=axis("world", groups_of(0, 1, 2, 3)),
        ep=axis("ep", groups_of(2, grid=expert_grid)),
        etp=axis("etp", groups_of(3, grid=expert_grid)),
        edp=axis("edp", groups_of(1, grid=expert_grid)),
        ep_etp=axis("ep_etp", groups_of(2, 3, grid=expert_grid)),
        cp_tp=axis("cp_tp", groups_of(2, 3)),
    )


def open_communicators(axes: Axes) -> None:
    """Let the ranks of every group communicate once, in the same order everywhere.

    NCCL makes a communicator when its group is first used, and blocks the host until all members
    come. Two ranks that first come to different groups would wait for each other forever.
    """
    for axis in (axis for axis in axes if axis.size > 1):
        tensor = torch.zeros(1, device=axis.device)
        dist.all_reduce(tensor, group=axis.group)  # not collectives.all_reduce, which counts bytes
        # Sends have a communicator of their own for each pair of ranks: (0 1), (1 2), ..., (n-1 0).
        for sender in range(axis.size):
            if axis.rank == sender:
                dist.isend(tensor, group=axis.group, group_dst=axis.next).wait()
            elif axis.previous == sender:
                dist.irecv(tensor, group=axis.group, group_src=sender).wait()
