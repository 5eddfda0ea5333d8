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
from picotron_min.extensions.sharding import collectives as in_place
from picotron_min.mesh import build_axes
from tests.nccl_like import nccl_like
from tests.pool import RankFailed


def rows_of(
    pp: int, dp: int, cp: int, tp: int, ep: int = 1, etp: int = 1
) -> dict[str, tuple[int, list[int]]]:
    axes = build_axes(torch.device("cpu"), Layout(pp=pp, dp=dp, cp=cp, tp=tp, ep=ep, etp=etp))
    return {axis.name: (axis.rank, dist.get_process_group_ranks(axis.group)) for axis in axes}


def test_every_axis_is_the_right_row_of_the_grid(pool):
    rows = pool.run(8, rows_of, 2, 1, 2, 2)
    assert rows[0] == {
        "pp": (0, [0, 4]),
        "dp": (0, [0]),
        "cp": (0, [0, 2]),
        "tp": (0, [0, 1]),
        "dp_cp": (0, [0, 2]),
        "dp_cp_tp": (0, [0, 1, 2, 3]),
        "ends": (0, [0, 4]),
        "world": (0, [0, 1, 2, 3, 4, 5, 6, 7]),
        "ep": (0, [0]),
        "etp": (0, [0]),
        "edp": (0, [0, 1, 2, 3]),
        "ep_etp": (0, [0]),
        "cp_tp": (0, [0, 1, 2, 3]),
    }
    assert rows[7] == {
        "pp": (1, [3, 7]),
        "dp": (0, [7]),
        "cp": (1, [5, 7]),
        "tp": (1, [6, 7]),
        "dp_cp": (1, [5, 7]),
        "dp_cp_tp": (3, [4, 5, 6, 7]),
        "ends": (1, [3, 7]),
        "world": (7, [0, 1, 2, 3, 4, 5, 6, 7]),
        "ep": (0, [7]),
        "etp": (0, [7]),
        "edp": (3, [4, 5, 6, 7]),
        "ep_etp": (0, [7]),
        "cp_tp": (3, [4, 5, 6, 7]),
    }
    rows = pool.run(8, rows_of, 1, 2, 2, 2)
    assert rows[6]["dp_cp"] == (3, [0, 2, 4, 6])
    assert rows[5]["dp_cp"] == (2, [1, 3, 5, 7])
    assert rows[5]["ends"] == (0, [5])
    rows = pool.run(8, rows_of, 4, 2, 1, 1)
    ends = [row["ends"][1] for row in rows]
    assert ends == [[0, 6], [1, 7], [2], [3], [4], [5], [0, 6], [1, 7]]


def groups_of(rows: list[dict], axis: str) -> list[list[int]]:
    return sorted({tuple(row[axis][1]): row[axis][1] for row in rows}.values())


def test_experts_lie_on_a_grid_of_their_own(pool):
    rows = pool.run(8, rows_of, 1, 8, 1, 1, 4)
    assert groups_of(rows, "ep") == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert groups_of(rows, "edp") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    rows = pool.run(8, rows_of, 2, 2, 1, 2, 2)
    assert groups_of(rows, "ep") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert groups_of(rows, "edp") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    rows = pool.run(8, rows_of, 1, 2, 2, 2, 4, 2)
    assert groups_of(rows, "etp") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert groups_of(rows, "ep") == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert groups_of(rows, "edp") == [[rank] for rank in range(8)]
    assert groups_of(rows, "ep_etp") == [[0, 1, 2, 3, 4, 5, 6, 7]]
    assert groups_of(rows, "cp_tp") == [[0, 1, 2, 3], [4, 5, 6, 7]]
    rows = pool.run(4, rows_of, 1, 4, 1, 1, 2)
    assert groups_of(rows, "edp") == [[0, 2], [1, 3]]
    rows = pool.run(4, rows_of, 1, 1, 1, 4, 2, 2)
    assert groups_of(rows, "ep") == [[0, 2], [1, 3]]


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


def reduce_a_slice(size: int) -> None:
    axes = build_axes(torch.device("cpu"), Layout(tp=size))
    with pytest.raises(AssertionError, match="non-contiguous"):
        start_all_reduce(torch.zeros(4, 4)[:, 1], axes.tp)
    with pytest.raises(AssertionError, match="non-contiguous"):
        Shift(torch.zeros(4, 4)[:, 1], axes.tp)


@pytest.mark.parametrize("size", [1, 2])
def test_a_strided_slice_is_refused_at_any_size(pool, size):
    pool.run(size, reduce_a_slice, size)


def of_a_strided_slice() -> dict[str, list]:
    axis = build_axes(torch.device("cpu"), Layout(tp=2)).tp
    numbers = torch.arange(8.0).view(4, 2) + 10 * axis.rank
    column = numbers[:, 0]  # 0 2 4 6, on rank 1 10 12 14 16
    part, work = start_reduce_scatter(column, axis, dim=0)
    work.wait()
    return {
        "all_gather": all_gather(column, axis, dim=0).tolist(),
        "reduce_scatter": part.tolist(),
        "all_to_all": all_to_all(numbers[:, :1], axis, split_dim=0, gather_dim=1).tolist(),
    }


def test_what_leaves_its_tensor_unchanged_takes_a_strided_slice(pool):
    first, second = pool.run(2, of_a_strided_slice)
    assert first["all_gather"] == second["all_gather"] == [0, 2, 4, 6, 10, 12, 14, 16]
    assert (first["reduce_scatter"], second["reduce_scatter"]) == ([10, 14], [18, 22])
    assert first["all_to_all"] == [[0, 10], [2, 12]]
    assert second["all_to_all"] == [[4, 14], [6, 16]]


COLLECTIVES = {  # with what follows the axis
    "start_all_reduce": (),
    "all_gather": (0,),
    "start_reduce_scatter": (0,),
    "start_all_gather_": (),
    "start_reduce_scatter_": (),
    "all_to_all": (0, 1),
    "Shift": (),
}


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
