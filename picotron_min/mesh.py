"""From processes to named axes: which ranks a rank communicates with.

Gradients are summed over several axes alike, hence the joint ones.

In production `torch.distributed.device_mesh.init_device_mesh` makes the same groups in one call;
the joint axes are its `_flatten`, which is private.
"""

from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from picotron_min.collectives import Axis


class Axes(NamedTuple):
    """The row of ranks that this rank is in, along each axis."""

    pp: Axis
    dp: Axis
    cp: Axis
    tp: Axis
    dp_cp: Axis  # gradients are summed over it
    dp_cp_tp: Axis  # and over this one, where tp ranks see different parts of the sequence
    dp_cp_ends: Axis  # and over this one, where the first and the last stage have a tied embedding


def build_axes(
    device: torch.device,
    *,
    pp: int = 1,
    dp: int = 1,
    cp: int = 1,
    tp: int = 1,
    timeout_seconds=60.0,
) -> Axes:
    """Split the world into the rows of each axis; every rank must call it, with the same sizes."""
    assert pp * dp * cp * tp == dist.get_world_size(), "the axes must multiply to the world size"
    grid = torch.arange(dist.get_world_size()).view(pp, dp, cp, tp)

    meshes: dict[str, DeviceMesh] = {}

    def axis(name: str, rows: torch.Tensor | list[torch.Tensor]) -> Axis:
        ranks = [row.tolist() for row in rows]
        if str(ranks) not in meshes:  # dp and dp_cp are the same rows when cp is 1
            group, _ = dist.new_subgroups_by_enumeration(
                ranks, timeout=timedelta(seconds=timeout_seconds)
            )
            meshes[str(ranks)] = DeviceMesh.from_group(group, device.type)
        return Axis(name, meshes[str(ranks)])

    # Every rank must be in some row: the stages in between have rows that nobody uses.
    ends = grid if pp == 1 else grid[[0, -1]]
    first_and_last = ends.movedim(3, 0).reshape(tp, -1)
    between = grid[1:-1].movedim(3, 1).reshape(-1, dp * cp)

    return Axes(
        pp=axis("pp", grid.movedim(0, -1).reshape(-1, pp)),
        dp=axis("dp", grid.movedim(1, -1).reshape(-1, dp)),
        cp=axis("cp", grid.movedim(2, -1).reshape(-1, cp)),
        tp=axis("tp", grid.reshape(-1, tp)),
        dp_cp=axis("dp_cp", grid.permute(0, 3, 1, 2).reshape(-1, dp * cp)),
        dp_cp_tp=axis("dp_cp_tp", grid.reshape(-1, dp * cp * tp)),
        dp_cp_ends=axis("dp_cp_ends", [*first_and_last, *between]),
    )
