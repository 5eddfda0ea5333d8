import itertools
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from picotron_min import collectives
from picotron_min.collectives import (
    Shift,
    all_gather,
    all_reduce,
    all_to_all,
    start_all_reduce,
    start_reduce_scatter,
)
from picotron_min.extensions.settings import Layout
from picotron_min.extensions.sharding import units as in_place
from picotron_min.mesh import build_axes
from tests.nccl_like import nccl_like
from tests.pool import RankFailed


def rows_of(layout: Layout) -> dict[str, tuple[int, list[int]]]:
    cpu = torch.device("cpu")
    axes = build_axes(cpu, layout, timeout_seconds=7)
    for axis in axes:
        assert axis.group._get_backend(cpu).options._timeout == timedelta(seconds=7), axis.name
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


def summed() -> tuple[float, float, dict, dict]:
    axes = build_axes(torch.device("cpu"), Layout(dp=2, tp=2))
    over_tp = all_reduce(torch.tensor([float(dist.get_rank())]), axes.tp).item()
    over_pp = all_reduce(torch.tensor([float(dist.get_rank())]), axes.pp).item()
    all_reduce(torch.zeros(10, dtype=torch.float64), axes.tp)
    return over_tp, over_pp, dict(axes.tp.ledger.calls), dict(axes.tp.ledger.bytes)


def test_all_reduce_sums_along_its_axis_only_and_is_booked(pool):
    results = pool.run(4, summed)
    assert [over_tp for over_tp, *_ in results] == [1, 1, 5, 5]
    assert [over_pp for _, over_pp, *_ in results] == [0, 1, 2, 3]
    # 2 (n-1)/n of 4 and of 80 bytes
    assert all(calls == {"all_reduce": 2} for *_, calls, _ in results)
    assert all(sent == {"all_reduce": 84.0} for *_, sent in results)


def of_a_strided_slice() -> dict[str, list]:
    axis = build_axes(torch.device("cpu"), Layout(tp=dist.get_world_size())).tp
    for function in (start_all_reduce, Shift):
        with pytest.raises(AssertionError, match="non-contiguous"):
            function(torch.zeros(4, 4)[:, 1], axis)
    numbers = torch.arange(8.0).view(4, 2) + 10 * axis.rank
    column = numbers[:, 0]  # 0 2 4 6, on rank 1 10 12 14 16
    part, work = start_reduce_scatter(column, axis, dim=0)
    work.wait()
    return {
        "all_gather": all_gather(column, axis, dim=0).tolist(),
        "reduce_scatter": part.tolist(),
        "all_to_all": all_to_all(numbers[:, :1], axis, split_dim=0, gather_dim=1).tolist(),
    }


def test_a_strided_slice_is_refused_in_place_and_else_as_good_as_any(pool):
    pool.run(1, of_a_strided_slice)
    first, second = pool.run(2, of_a_strided_slice)
    assert first["all_gather"] == second["all_gather"] == [0, 2, 4, 6, 10, 12, 14, 16]
    assert (first["reduce_scatter"], second["reduce_scatter"]) == ([10, 14], [18, 22])
    assert first["all_to_all"] == [[0, 10], [2, 12]]
    assert second["all_to_all"] == [[4, 14], [6, 16]]


# What follows the axis.
COLLECTIVES = {"start_all_reduce": (), "all_gather": (0,), "start_reduce_scatter": (0,)}
COLLECTIVES |= {"start_all_gather_": (), "start_reduce_scatter_": (), "all_to_all": (0, 1)}
COLLECTIVES |= {"Shift": ()}


def one_rank_alone(name: str) -> None:
    axis = build_axes(torch.device("cpu"), Layout(dp=2)).dp
    with nccl_like(seconds=0.2):
        if axis.rank == 0:
            function = getattr(collectives, name, None) or getattr(in_place, name)
            function(torch.zeros(2, 2), axis, *COLLECTIVES[name])
        dist.barrier()


@pytest.mark.parametrize("name", COLLECTIVES)
def test_where_first_use_blocks_no_collective_is_started_by_one_rank_alone(pool, name):
    with pytest.raises(RankFailed, match="rank 0 waits to open collectives of"):
        pool.run(2, one_rank_alone, name)
