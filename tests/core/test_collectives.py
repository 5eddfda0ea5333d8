import itertools
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from picotron_min.collectives import all_gather, all_to_all, reduce_scatter, start_all_reduce
from picotron_min.extensions.settings import Layout
from picotron_min.mesh import build_axes


def rows_of(layout: Layout) -> dict[str, tuple[int, list[int]]]:
    cpu = torch.device("cpu")
    axes = build_axes(cpu, layout, timeout_seconds=7)
    for axis in axes:
        assert axis.group._get_backend(cpu).options._timeout == timedelta(seconds=7)
    return {axis.name: (axis.rank, dist.get_process_group_ranks(axis.group)) for axis in axes}


def rows_by_hand(layout: Layout) -> dict[str, list[list[int]]]:
    """By axis the row of each rank: those that differ from it in the axis' coordinates alone."""
    core = layout.sizes._asdict()
    edp = layout.dp * layout.cp * layout.tp // (layout.ep * layout.etp)
    experts = {"pp": layout.pp, "edp": edp, "ep": layout.ep, "etp": layout.etp}
    joint = {"dp_cp": ("dp", "cp"), "dp_cp_tp": ("dp", "cp", "tp"), "cp_tp": ("cp", "tp")}
    of_core = {name: (name,) for name in core} | joint | {"world": tuple(core)}
    of_experts = {n: (n,) for n in experts} | {"ep_etp": ("ep", "etp"), "edp_etp": ("edp", "etp")}
    found = {}
    for sizes, axes in ((core, of_core), (experts, of_experts)):
        ranks = list(itertools.product(*map(range, sizes.values())))
        for axis, varying in axes.items():
            same = [i for i, name in enumerate(sizes) if name not in varying]
            found[axis] = [
                [i for i, other in enumerate(ranks) if all(other[j] == rank[j] for j in same)]
                for rank in ranks
            ]
    ends = [[row[0], row[-1]] for row in found["pp"]]
    is_end = [layout.pp > 1 and rank in row for rank, row in enumerate(ends)]
    found["ends"] = [row if is_end[rank] else [rank] for rank, row in enumerate(ends)]
    return found


def test_every_axis_is_the_right_row_of_its_grid(pool):
    for layout in (Layout(2, 1, 2, 2), Layout(1, 2, 2, 2, ep=4, etp=2), Layout(2, 2, 1, 2, ep=2)):
        expected = rows_by_hand(layout)
        for rank, rows in enumerate(pool.run(8, rows_of, layout)):
            here = {axis: rows[rank] for axis, rows in expected.items()}
            assert rows == {axis: (row.index(rank), row) for axis, row in here.items()}


def of_a_strided_slice() -> tuple[list, ...]:
    axis = build_axes(torch.device("cpu"), Layout(tp=2)).tp
    numbers = torch.arange(8.0).view(4, 2) + 10 * axis.rank
    column = numbers[:, 0]  # 0 2 4 6, on rank 1 10 12 14 16
    with pytest.raises(AssertionError, match="non-contiguous"):
        start_all_reduce(column, axis)
    gathered, part = all_gather(column, axis, dim=0), reduce_scatter(column, axis, dim=0)
    exchanged = all_to_all(numbers[:, :1], axis, split_dim=0, gather_dim=1)
    return gathered.tolist(), part.tolist(), exchanged.tolist()


def test_a_strided_slice_is_refused_in_place_and_else_as_good_as_any(pool):
    gathered = [0, 2, 4, 6, 10, 12, 14, 16]
    assert pool.run(2, of_a_strided_slice) == [
        (gathered, [10, 14], [[0, 10], [2, 12]]),
        (gathered, [18, 22], [[4, 14], [6, 16]]),
    ]
