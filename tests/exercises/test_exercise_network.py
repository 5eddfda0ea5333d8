"""The simulated ranks of exercises/: like gloo where both are right, stricter elsewhere."""

import contextlib
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from exercises.exercise import Case
from exercises.loading import Course, fresh_modules
from exercises.memory import storage_bytes
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
    from picotron_min.extensions.sharding.collectives import (
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


@pytest.mark.parametrize("with_copies", [False, True])
@pytest.mark.parametrize("ranks", [2, 3])
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


def waiting(error: Deadlock, ranks: int) -> list[tuple[int, str]]:
    """The lines about ranks that wait: the last ones, since rank 0 may have returned."""
    return list(enumerate(error.lines, ranks - len(error.lines)))


@pytest.mark.parametrize(
    ("function", "ranks", "circle"),
    [
        (send_first, 2, "rank 0 waits to send to rank 1, which waits to send to rank 0"),
        (
            send_first,
            3,
            "rank 0 waits to send to rank 1, which waits to send to rank 2, which waits to send to"
            " rank 0",
        ),
        (end_early, 2, "rank 1 waits in all_reduce for rank 0, which has returned"),
        (end_early, 3, "rank 1 waits in all_reduce for rank 0, which has returned"),
    ],
)
def test_a_deadlock_is_reported_at_once_with_its_circle(function, ranks, circle):
    with pytest.raises(Deadlock) as caught:
        simulate(ranks, function)
    assert str(caught.value) == circle
    waits = "waits to send to" if "send" in circle else "waits in all_reduce for"
    assert all(f"rank {i} {waits} rank " in line for i, line in waiting(caught.value, ranks))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda r, c, axis: c.all_reduce(torch.zeros(2 + r), axis),
            r"all_reduce of a tensor \[3\] of float32",
        ),
        (lambda r, c, axis: dist.all_reduce(torch.zeros(2, 2).T, group=axis.group), "-contiguous"),
        # An axis is a part of the world, and its ranks have other numbers there.
        (lambda r, c, axis: dist.all_reduce(torch.zeros(2)), "without a group"),
        (lambda r, c, axis: dist.get_rank(), "use axis.group, axis.rank and axis.size"),
        (lambda r, c, axis: dist.send(torch.zeros(2), axis.next, axis.group), "not part of group"),
        (lambda r, c, axis: c.Shift(torch.zeros(1 + r), axis).wait(), r"message 1 from rank .* is"),
    ],
)
def test_what_gloo_would_get_wrong_silently_is_an_error(call, message):
    with pytest.raises((RuntimeError, ValueError), match=message):
        simulate(2, lambda rank: call(rank.number, rank.course.collectives, rank.axis()))


X = torch.zeros(4)
SAME = "all ranks must start the same operations in the same order$"
ENDS = "both ends of a message must have the same shape and dtype$"
MESSAGE = r"^message 1 from rank 0 to rank 1 is a tensor"


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda r: dist.all_reduce(torch.zeros(2 + r)),
            RuntimeError,
            r"collective 1 of this group is all_reduce of a tensor \[3\] of float32 on rank 1, and"
            rf" all_reduce of a tensor \[2\] of float32 on rank 0: {SAME}",
        ),
        (
            lambda r: (dist.barrier(), (dist.barrier if r else dist.all_reduce)(*[X][r:])),
            RuntimeError,
            r"collective 2 of this group is all_reduce of a tensor \[4\] of float32 on rank 0,"
            rf" and barrier on rank 1: {SAME}",
        ),
        (
            lambda r: dist.isend(X, 1).wait() if r == 0 else dist.irecv(X[:3], 0).wait(),
            RuntimeError,
            rf"{MESSAGE} \[3\] of float32 on rank 1,"
            rf" and a tensor \[4\] of float32 on rank 0: {ENDS}",
        ),
        (
            lambda r: dist.isend(X, 1).wait() if r == 0 else dist.irecv(X.int(), 0).wait(),
            RuntimeError,
            rf"{MESSAGE} \[4\] of int32 on rank 1,"
            rf" and a tensor \[4\] of float32 on rank 0: {ENDS}",
        ),
        (
            lambda r: dist.all_gather_into_tensor(torch.zeros(7), X),
            RuntimeError,
            r"^all_gather: the whole tensor has 7 numbers, and the parts 8 in all$",
        ),
        (
            lambda r: dist.reduce_scatter_tensor(torch.zeros(3), X),
            RuntimeError,
            r"^reduce_scatter: the whole tensor has 4 numbers, and the parts 6 in all$",
        ),
        (
            lambda r: dist.all_to_all_single(X.clone(), X, [1, 3], [2, 2]),
            RuntimeError,
            r"rank 1 expects \[1, 3\] rows, but \[2, 2\] rows come to it",
        ),
        (
            lambda r: dist.all_gather([X.clone()], X),
            RuntimeError,
            r"^all_gather: the whole tensor has 4 numbers, and the parts 8 in all$",
        ),
        (lambda r: dist.isend(X, 5), ValueError, r"Global rank 5 is not part of group \[0, 1\]"),
        (
            lambda r: dist.broadcast(torch.zeros(2, 3).T, 0),
            RuntimeError,
            r"broadcast of a non-contiguous tensor \(3, 2\): gloo would use other numbers",
        ),
    ],
)
def test_an_error_of_the_network_has_its_numbers(call, error, message):
    with pytest.raises(error, match=message):
        simulate(2, lambda rank: call(rank.number))


def test_only_ranks_communicate():
    with pytest.raises(AssertionError, match="only ranks communicate"), simulated():
        dist.get_rank()


def test_a_buffer_of_integers_is_unusable_before_the_wait():
    def function(rank) -> dict:
        gathered = torch.zeros(2, dtype=torch.int64)
        work = dist.all_gather_into_tensor(gathered, torch.tensor([5]), async_op=True)
        early = gathered.tolist()
        work.wait()
        return {"early": early, "late": gathered.tolist()}

    for record in simulate(2, function):
        assert record.values == {"early": [torch.iinfo(torch.int64).min] * 2, "late": [5, 5]}


def test_a_module_of_the_course_is_found_by_the_name_of_its_file():
    course, names = Course(), ("train", "collectives", "ring", "activations")
    assert [getattr(course, name).__name__ for name in names] == [
        "train",
        "picotron_min.collectives",
        "picotron_min.extensions.overlap.ring",
        "picotron_min.planner.activations",
    ]
    with pytest.raises(AttributeError, match=r"0 files nothing\.py"):
        _ = course.nothing


def test_nothing_is_left_behind():
    before = {name: getattr(dist, name) for name in ("all_reduce", "isend", "get_rank")}
    with contextlib.suppress(Deadlock):
        simulate(2, send_first)
    assert before == {name: getattr(dist, name) for name in before}
    import picotron_min.collectives as now

    assert now is collectives


LAYOUTS = [
    {"dp": 2},
    {"tp": 2, "sequence_parallel": True},
    {"cp": 2},
    {"cp": 2, "cp_engine": "ulysses"},
    {"pp": 2},
    {"dp": 2, "sharding": "parameters"},
]


def losses(rank, layout: dict, **recipe) -> dict:
    # Of the loaded course, whose kinds of actions are its own.
    layout = rank.course.settings.Layout(**layout)
    run = tiny_run(rank, layout, num_micro_batches=2, **recipe)
    step = rank.course.train.train_step
    return {"losses": [step(run, i).loss for i in range(3)]}


def test_a_whole_run_on_simulated_ranks_trains_as_one_rank_does():
    (one,) = simulate(1, lambda rank: losses(rank, {}))
    for layout in LAYOUTS:
        for record in simulate(2, lambda rank: losses(rank, layout)):  # noqa: B023
            assert record.values["losses"] == pytest.approx(one.values["losses"], abs=1e-10)


def test_bytes_are_counted_by_storage():
    x = torch.ones(3, 4)
    assert storage_bytes([x, x[0], x.T]) == 48
