"""From processes to named axes: which ranks does a rank communicate with, and for what?

The world is a grid (pp, dp, cp, tp), numbered row by row (see layout.py). An axis is the row of
ranks that a rank is in when one coordinate varies. A joint axis varies several at once:

    (pp 2, dp 2, cp 1, tp 2); rank 5 is at pp 1, dp 0, tp 1

        pp 0:  dp 0 [0 1]   dp 1 [2 3]        tp [4 5]    dp [5 7]    pp [1 5]
        pp 1:  dp 0 [4 5]   dp 1 [6 7]        dp_cp [5 7]    dp_cp_tp [4 5 6 7]

In production `torch.distributed.device_mesh.init_device_mesh` makes the same groups in one call;
the joint axes are its `_flatten`, which is private.
"""

from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

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

    @property
    def ranks(self) -> dict[str, int]:
        return {name: axis.rank for name, axis in self._asdict().items()}

    @property
    def sizes(self) -> dict[str, int]:
        return {name: axis.size for name, axis in self._asdict().items()}


def build_axes(device: torch.device, layout: Layout, timeout_seconds: float = 60.0) -> Axes:
    """Split the world into the rows of each axis; every rank must call it, with the same layout."""
    world_size = dist.get_world_size()
    assert layout.world_size == world_size, f"{layout} in a world of {world_size}"
    pp, dp, cp, tp = layout.sizes
    grid = torch.arange(world_size).view(pp, dp, cp, tp)
    meshes: dict[str, DeviceMesh] = {}

    def axis(name: str, rows: torch.Tensor | list[torch.Tensor]) -> Axis:
        ranks = [row.tolist() for row in rows]
        if str(ranks) not in meshes:  # dp and dp_cp have the same rows when cp is 1: share a group
            group, _ = dist.new_subgroups_by_enumeration(
                ranks, timeout=timedelta(seconds=timeout_seconds)
            )
            meshes[str(ranks)] = DeviceMesh.from_group(group, device.type)
        return Axis(name, meshes[str(ranks)])

    # Every rank must be in some row, so each rank of the stages between is in one by itself.
    ends = grid if pp == 1 else grid[[0, -1]]
    between = grid[1:-1].reshape(-1, 1)

    return Axes(
        pp=axis("pp", grid.movedim(0, -1).reshape(-1, pp)),
        dp=axis("dp", grid.movedim(1, -1).reshape(-1, dp)),
        cp=axis("cp", grid.movedim(2, -1).reshape(-1, cp)),
        tp=axis("tp", grid.reshape(-1, tp)),
        dp_cp=axis("dp_cp", grid.permute(0, 3, 1, 2).reshape(-1, dp * cp)),
        dp_cp_tp=axis("dp_cp_tp", grid.reshape(pp, -1)),
        ends=axis("ends", [*ends.reshape(len(ends), -1).T, *between]),
        world=axis("world", grid.reshape(1, -1)),
    )


def open_communicators(axes: Axes) -> None:
    """Let the ranks of every group communicate once, in the same order everywhere.

    NCCL makes a communicator when its group is first used, and blocks the host until all members
    come. Two ranks that first come to different groups would wait for each other forever.
    """
    for axis in axes:
        if axis.size == 1:
            continue
        tensor = torch.zeros(1, device=axis.submesh.device_type)
        dist.all_reduce(tensor, group=axis.group)  # not collectives.all_reduce, which counts bytes
        # Sends have a communicator of their own for each pair of ranks: (0 1), (1 2), ..., (n-1 0).
        for sender in range(axis.size):
            if axis.rank == sender:
                dist.isend(tensor, group=axis.group, group_dst=axis.next).wait()
            elif axis.previous == sender:
                dist.irecv(tensor, group=axis.group, group_src=sender).wait()
