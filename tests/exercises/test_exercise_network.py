"""The simulated ranks of exercises/: like gloo where both are right, stricter elsewhere."""

import math
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from exercises.exercise import Case
from exercises.loading import Course, fresh_modules
from exercises.ranks import run_case
from exercises.simulated_dist import simulated
from exercises.world import Deadlock
from picotron_min import collectives
from picotron_min.collectives import Axis
from picotron_min.extensions.settings import Layout
from picotron_min.mesh import build_axes

# Of rank r of n, with an axis of the course's collectives c, whose ledger counts all that is sent.
OPERATIONS = """
c.all_reduce(x.clone(), axis)
c.all_reduce(x.clone(), axis, dist.ReduceOp.MAX)
c.all_gather(x, axis, dim=1)
c.reduce_scatter(x, axis, dim=0)
c.all_to_all(x, axis, split_dim=0, gather_dim=1)
torch.stack([tensor for _, tensor in c.ring(x, axis)])
into(x.view(n, -1), lambda out: units.start_all_gather_(out, axis))
into(x.view(n, -1), lambda out: units.start_reduce_scatter_(out, axis))[r]
exchange.wait(exchange.start(x[: sum(to_each)]))
""".strip().splitlines()


def into(rows: Tensor, start) -> Tensor:
    start(out := rows.clone()).wait()
    return out


def everything(axis: Axis) -> tuple[list, float]:
    """Every operation of the course's collectives once, and the ledger's bytes."""
    from picotron_min import collectives  # those of a loaded course, within `simulate`
    from picotron_min.extensions.experts.dispatch import Exchange
    from picotron_min.extensions.sharding import units

    r, n = axis.rank, axis.size
    x = torch.arange(4.0 * n, dtype=torch.float64).view(2 * n, 2) * (r + 1) + r
    to_each = [(r + other) % 2 for other in range(n)]
    names = {"c": collectives, "units": units, "axis": axis, "r": r, "n": n, "x": x}
    names |= {"exchange": Exchange(axis, to_each, to_each), "to_each": to_each}
    return [eval(line, globals() | names) for line in OPERATIONS], axis.ledger.bytes.total()


def on_gloo() -> tuple[list, float]:
    axis = build_axes(torch.device("cpu"), Layout(dp=dist.get_world_size())).dp
    with mock.patch.object(dist, "get_backend", lambda group: "nccl"):  # as if by NCCL's functions
        return everything(axis)


def simulate(ranks: int, function, **options):
    """What `function(rank)` returns on each rank."""
    with simulated(), fresh_modules():
        return run_case(Course(), Case(ranks), lambda rank, case: function(rank), Path("none"))


def test_simulated_collectives_equal_gloo(pool):
    real = pool.run(3, on_gloo)
    ours = simulate(3, lambda rank: everything(rank.axes(Layout(dp=3)).dp))
    for (expected, ledger), record in zip(real, ours, strict=True):
        results, simulated_ledger = record.values
        named = sum(sent.bytes for sent in record.ledger.values())
        assert simulated_ledger == ledger == named
        assert sum(size for _, size in record.sent.values()) == pytest.approx(ledger)
        for a, b in zip(results, expected, strict=True):
            assert torch.equal(a, b)


def test_what_is_not_awaited_has_not_arrived_and_is_sent_as_it_is_then():
    def function(rank) -> dict:
        axis, x = rank.axis(), torch.full((1,), 2.0 + rank.number)
        shift, reduced = rank.course.collectives.Shift(x, axis), x.clone()
        work = rank.course.collectives.start_all_reduce(reduced, axis)
        early = [shift.arriving.item(), reduced.item()]
        x += 7
        work.wait()
        return {"early": early, "late": [shift.wait().item(), reduced.item()]}

    for rank, record in enumerate(simulate(2, function)):
        arriving, unreduced = record.values["early"]
        assert math.isnan(arriving) and unreduced == 2 + rank
        assert record.values["late"] == [10 - rank, 5] and record.changed == [1 - rank]


# On each rank r of several: a call with its axis and a tensor x of 4 numbers, and what is said.
ERRORS = r"""
2 c.start_send(x, axis, axis.next).wait() -> rank 0 .* to rank 1, which waits to send to rank 0$
3 c.start_send(x, axis, axis.next).wait() -> rank 2, which waits to send to rank 0$
3 r and c.all_reduce(x, axis) -> waits in all_reduce for rank 0, which has returned$
2 c.all_reduce(torch.zeros(2 + r), axis) -> tensor \[3\] of float32 on rank 1.* same order$
2 dist.all_reduce(torch.zeros(2, 2).T, group=axis.group) -> non-contiguous .*gloo would use
2 dist.all_reduce(x) -> without a group
2 dist.get_rank() -> use axis.group, axis.rank and axis.size
2 dist.send(x, axis.next, axis.group) -> not part of group
2 c.Shift(torch.zeros(1 + r), axis).wait() -> message 1 from rank .* is .*same shape and dtype$
2 c.start_send(x, axis, 1) if r == 0 else c.start_receive(x.int(), axis, 0) -> of int32 on rank 1
2 (dist.barrier if r else dist.all_reduce)(*[x][r:], group=axis.group) -> barrier on rank 1, and all
2 dist.all_gather_into_tensor(torch.zeros(7), x, group=axis.group) -> 7 numbers, and the parts 8
2 dist.reduce_scatter_tensor(torch.zeros(3), x, group=axis.group) -> 4 numbers, and the parts 6
2 dist.all_to_all_single(x.clone(), x, [1, 3], [2, 2], axis.group) -> expects \[1, 3\] rows, but
"""


@pytest.mark.parametrize("line", ERRORS.strip().splitlines())
def test_what_gloo_does_wrong_or_waits_for_in_vain_is_an_error_with_its_numbers(line):
    call, message = line[2:].split(" -> ")

    def function(rank) -> None:
        names = {"r": rank.number, "c": rank.course.collectives, "axis": rank.axis()}
        eval(call, names | {"dist": dist, "torch": torch, "x": torch.zeros(4)})

    before = dist.all_reduce
    with pytest.raises((RuntimeError, ValueError, Deadlock), match=message) as caught:
        simulate(int(line[0]), function)
    assert caught.type is not Deadlock or caught.value.lines
    assert dist.all_reduce is before and sys.modules["picotron_min.collectives"] is collectives
