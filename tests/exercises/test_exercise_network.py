"""The simulated ranks of exercises/: like gloo where both are right, stricter elsewhere."""

import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from exercises.exercise import Case
from exercises.loading import Course, fresh_modules
from exercises.ranks import run_case
from exercises.simulated_dist import simulated
from exercises.tiny import tiny_run
from exercises.world import Deadlock
from picotron_min import collectives
from picotron_min.collectives import Axis
from picotron_min.extensions.settings import Layout
from picotron_min.mesh import build_axes


def everything(axis: Axis) -> tuple[list, float]:
    """Every operation of the course's collectives once, and the ledger's bytes."""
    from picotron_min import collectives  # those of a loaded course, within `simulate`
    from picotron_min.extensions.experts.dispatch import Exchange
    from picotron_min.extensions.sharding.units import (
        start_all_gather_,
        start_reduce_scatter_,
    )

    rank, n = axis.rank, axis.size
    x = torch.arange(4.0 * n, dtype=torch.float64).view(2 * n, 2) * (rank + 1) + rank
    results = [
        collectives.all_reduce(x.clone(), axis),
        collectives.all_reduce(x.clone(), axis, dist.ReduceOp.MAX),
        collectives.all_gather(x, axis, dim=1),
        collectives.reduce_scatter(x, axis, dim=0),
        collectives.all_to_all(x, axis, split_dim=0, gather_dim=1),
        *(tensor for _, tensor in collectives.ring(x, axis)),
    ]
    rows = x.view(n, -1).clone()
    start_all_gather_(rows, axis).wait()
    partial = x.view(n, -1).clone()
    start_reduce_scatter_(partial, axis).wait()
    world, mine = dist.group.WORLD, torch.empty_like(x[:2])
    listed = [torch.empty_like(x) for _ in range(world.size())]
    dist.all_gather(listed, x, group=world)
    dist.reduce_scatter(mine, list(x.chunk(n)), group=axis.group)
    axis.ledger.record("all_gather", x, n - 1)
    axis.ledger.record("reduce_scatter", x, axis.share)
    to_each = [(rank + other) % 2 for other in range(n)]
    exchange = Exchange(axis, to_each, to_each)
    received = exchange.wait(exchange.start(x[: sum(to_each)]))
    return [*results, rows, partial[rank], received, *listed, mine], axis.ledger.bytes.total()


def on_gloo(with_copies: bool) -> tuple[list, float]:
    axis = build_axes(torch.device("cpu"), Layout(dp=dist.get_world_size())).dp
    # With copies: by the functions that other backends have.
    with mock.patch.object(dist, "get_backend", lambda group: "nccl" if with_copies else "gloo"):
        return everything(axis)


def simulate(ranks: int, function, **options):
    """What `function(rank)` returns on each rank."""
    with simulated(), fresh_modules():
        return run_case(Course(), Case(ranks), lambda rank, case: function(rank), Path("none"))


@pytest.mark.parametrize(("ranks", "with_copies"), [(2, False), (3, True)])
def test_simulated_collectives_equal_gloo(pool, ranks, with_copies):
    real = pool.run(ranks, on_gloo, with_copies)
    ours = simulate(ranks, lambda rank: everything(rank.axes(Layout(dp=ranks)).dp))
    for (expected, ledger), record in zip(real, ours, strict=True):
        results, simulated_ledger = record.values
        named = sum(sent.bytes for sent in record.ledger.values())
        assert simulated_ledger == ledger == named
        assert sum(size for _, size in record.sent.values()) == pytest.approx(ledger)
        for a, b in zip(results, expected, strict=True):
            assert torch.equal(a, b)


def test_what_is_not_awaited_has_not_arrived():
    def function(rank) -> dict:
        axis, x = rank.axis(), torch.ones(2) * rank.number
        shift = rank.course.collectives.Shift(x, axis)
        early = shift.arriving.clone()
        reduced = x.clone()
        work = rank.course.collectives.start_all_reduce(reduced, axis)
        unreduced = reduced.clone()
        work.wait()
        return {"early": early, "late": shift.wait(), "unreduced": unreduced, "sum": reduced}

    for rank, record in enumerate(simulate(2, function)):
        values = record.values
        assert values["early"].isnan().all() and values["late"].eq(1 - rank).all()
        assert values["unreduced"].eq(rank).all() and values["sum"].eq(1).all()


def test_a_changed_tensor_is_sent_as_it_is_when_awaited():
    def function(rank) -> dict:
        x = torch.zeros(1)
        shift = rank.course.collectives.Shift(x, rank.axis())
        x += 7
        return {"got": shift.wait()}

    records = [(r.values["got"].item(), r.changed) for r in simulate(2, function)]
    assert records == [(7, [1]), (7, [0])]  # and to whom it was sent


def send_first(rank) -> dict:
    axis, x = rank.axis(), torch.zeros(1)
    rank.course.collectives.start_send(x, axis, axis.next).wait()
    return {}


def end_early(rank) -> dict:
    if rank.number:
        rank.course.collectives.all_reduce(torch.zeros(1), rank.axis())
    return {}


SENDS = "rank 0 waits to send to rank 1, which waits to send to rank"


@pytest.mark.parametrize(
    ("function", "ranks", "circle"),
    [
        (send_first, 2, f"{SENDS} 0"),
        (send_first, 3, f"{SENDS} 2, which waits to send to rank 0"),
        (end_early, 3, "rank 1 waits in all_reduce for rank 0, which has returned"),
    ],
)
def test_a_deadlock_is_reported_at_once_with_its_circle(function, ranks, circle):
    before = dist.all_reduce
    with pytest.raises(Deadlock) as caught:
        simulate(ranks, function)
    assert str(caught.value) == circle and len(caught.value.lines) >= 2
    assert dist.all_reduce is before and sys.modules["picotron_min.collectives"] is collectives


# Calls of rank r, with its axis, a tensor x of 4 numbers, and parts of the message.
ERRORS = r"""
c.all_reduce(torch.zeros(2 + r), axis) -> tensor \[3\] of float32 on rank 1.* same order$
dist.all_reduce(torch.zeros(2, 2).T, group=axis.group) -> non-contiguous tensor .*gloo would use
dist.all_reduce(x) -> without a group
dist.get_rank() -> use axis.group, axis.rank and axis.size
dist.send(x, axis.next, axis.group) -> not part of group
c.Shift(torch.zeros(1 + r), axis).wait() -> message 1 from rank .* is .*same shape and dtype$
c.start_send(x, axis, 1) if r == 0 else c.start_receive(x.int(), axis, 0) -> of int32 on rank 1
(dist.barrier if r else dist.all_reduce)(*[x][r:], group=axis.group) -> barrier on rank 1, and all_
dist.all_gather_into_tensor(torch.zeros(7), x, group=axis.group) -> 7 numbers, and the parts 8
dist.reduce_scatter_tensor(torch.zeros(3), x, group=axis.group) -> 4 numbers, and the parts 6
dist.all_to_all_single(x.clone(), x, [1, 3], [2, 2], axis.group) -> expects \[1, 3\] rows, but
"""


@pytest.mark.parametrize("line", ERRORS.strip().splitlines())
def test_what_gloo_would_get_wrong_silently_is_an_error_with_its_numbers(line):
    call, message = line.split(" -> ")

    def function(rank) -> None:
        names = {"r": rank.number, "c": rank.course.collectives, "axis": rank.axis()}
        eval(call, names | {"dist": dist, "torch": torch, "x": torch.zeros(4)})

    with pytest.raises((RuntimeError, ValueError), match=message):
        simulate(2, function)


LAYOUTS = [
    {"dp": 2},
    {"tp": 2, "sequence_parallel": True},
    {"cp": 2},
    {"pp": 2},
    {"dp": 2, "sharding": "parameters"},
]


def losses(rank, layout: dict) -> dict:
    # Of the loaded course, whose kinds of actions are its own.
    run = tiny_run(rank, rank.course.settings.Layout(**layout), num_micro_batches=2)
    return {"losses": [rank.course.train.train_step(run, i).loss for i in range(3)]}


def test_a_whole_run_on_simulated_ranks_trains_as_one_rank_does():
    (one,) = simulate(1, lambda rank: losses(rank, {}))
    for layout in LAYOUTS:
        for record in simulate(2, lambda rank: losses(rank, layout)):  # noqa: B023
            assert record.values["losses"] == pytest.approx(one.values["losses"], abs=1e-10)
