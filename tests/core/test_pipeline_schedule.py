"""Schedules and their messages are checked on paper: no processes, no tensors."""

import itertools
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from picotron_min.extensions.schedules.registry import SCHEDULES, build_plans
from picotron_min.extensions.schedules.simulator import peak_live, simulate
from picotron_min.pipeline_messages import inputs_of, textbook_times
from picotron_min.pipeline_schedule import (
    RECEIVES,
    SENDS,
    Action,
    Kind,
    Place,
    Plan,
    loop,
    stages_of,
)

F, B, W = Kind.FORWARD, Kind.BACKWARD, Kind.WEIGHT
KINDS = {RECEIVES[kind]: kind for kind in (F, B)}
SIZES = {"ranks": st.integers(1, 8), "m": st.integers(1, 20), "chunks": st.integers(1, 4)}
MANY = settings(derandomize=True, max_examples=40, deadline=None)


def plans_of(engine: str, ranks: int, m: int, chunks: int) -> list[Plan]:
    chunks = SCHEDULES[engine].chunks if SCHEDULES[engine].fixed_chunks else chunks
    return build_plans(engine, ranks, m, chunks)


def play(plans: list[Plan], place: Place = loop) -> float:
    """The makespan where both ends of a message block; an error if ranks wait for ever."""
    todo, clocks, arrived = [deque(plan) for plan in plans], [0.0] * len(plans), {}
    times, ends, targets = textbook_times(plans), {}, set()
    for (peer, needing), sources in inputs_of(plans, place).items():
        for rank, made in sources:
            if rank != peer:
                targets.add((peer, needing))
                send = rank, made._replace(kind=SENDS[made.kind], peer=peer)
                ends[send] = peer, needing._replace(kind=RECEIVES[made.kind], peer=rank)
    while any(todo):
        heads = {(rank, plan[0]) for rank, plan in enumerate(todo) if plan}
        ready = {head for head in heads if head[1].peer is None}
        for rank, action in ready:
            assert (rank, action) not in targets or (rank, action) in arrived, "not received"
            start = max(clocks[rank], arrived.get((rank, action), 0.0))
            clocks[rank] = start + times(rank, action)
        for send in heads & ends.keys():
            peer, receive = ends[send]
            if (peer, receive) in heads:
                ready |= {send, (peer, receive)}
                needing = receive._replace(kind=KINDS[receive.kind], peer=None)
                arrived[peer, needing] = max(clocks[send[0]], clocks[peer])
        assert ready, f"deadlock: {heads}"
        for rank, _ in ready:
            todo[rank].popleft()
    return max(clocks)


@pytest.mark.quick
@pytest.mark.parametrize("engine", SCHEDULES)
@MANY
@given(**SIZES)
def test_no_plan_deadlocks_and_no_receive_comes_late(engine, ranks, m, chunks):
    plans, place = plans_of(engine, ranks, m, chunks), SCHEDULES[engine].place
    assert play(plans, place) == simulate(plans, place=place).makespan


@pytest.mark.parametrize("engine", SCHEDULES)
@MANY
@given(**SIZES)
def test_every_stage_does_every_micro_batch_once_and_as_the_textbook_says(engine, ranks, m, chunks):
    plans, schedule = plans_of(engine, ranks, m, chunks), SCHEDULES[engine]
    chunks = schedule.chunks if schedule.fixed_chunks else chunks
    timeline = simulate(plans, place=schedule.place)
    for rank, plan in enumerate(plans):
        kinds = (F, B, W) if schedule.splits_backward else (F, B)
        expected = {Action(*each) for each in itertools.product(kinds, range(m), range(chunks))}
        computing = [action for action in plan if action.peer is None]
        assert len(computing) == len(expected) and set(computing) == expected
        for kind, chunk in itertools.product(kinds[1:], range(chunks)):
            order = [a.micro_batch for a in computing if (a.kind, a.chunk) == (kind, chunk)]
            assert order == list(range(m)), "sums are equal to the last bit"
        assert timeline.bubble(rank) == pytest.approx(schedule.bubble(ranks, m, chunks), abs=1e-12)
        assert peak_live(plan) == schedule.live_activations(rank, ranks, m, chunks)
        stages = stages_of(schedule, rank, ranks, chunks)
        assert [schedule.place(stage, ranks) for stage in stages] == [
            (rank, chunk) for chunk in range(chunks)
        ]
