"""Schedules and their messages are checked on paper: no processes, no tensors."""

import itertools
import re
from collections import deque

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from picotron_min.extensions.schedules.registry import SCHEDULES, build_plans, chunks_problem
from picotron_min.extensions.schedules.simulator import peak_live, simulate
from picotron_min.pipeline_messages import inputs_of, textbook_times
from picotron_min.pipeline_schedule import (
    RECEIVES,
    SENDS,
    Action,
    Kind,
    Place,
    Plan,
    bubble,
    loop,
    one_f_one_b,
    stages_of,
)

F, B, W = Kind.FORWARD, Kind.BACKWARD, Kind.WEIGHT
KINDS = {RECEIVES[kind]: kind for kind in (F, B)}
SIZES = {"ranks": st.integers(1, 8), "m": st.integers(1, 20), "chunks": st.integers(1, 4)}
MANY = settings(derandomize=True, max_examples=40, deadline=None)


def plans_of(engine: str, ranks: int, m: int, chunks: int) -> list[Plan]:
    chunks = SCHEDULES[engine].chunks if SCHEDULES[engine].fixed_chunks else chunks
    return build_plans(engine, ranks, m, chunks)


def play(plans: list[Plan], place: Place = loop, send_time: float = 0.0) -> float:
    """The makespan where a message arrives `send_time` after both its ends are posted.

    ValueError if ranks wait for ever where both ends of a message block.
    """
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
                arrived[peer, needing] = max(clocks[send[0]], clocks[peer]) + send_time
        if not ready:
            waiting = [f"rank {rank} waits in '{action}'" for rank, action in sorted(heads)]
            raise ValueError(f"deadlock: {'; '.join(waiting)}")
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


@given(p=st.integers(1, 8), m=st.integers(1, 32), v=st.integers(1, 4))
@MANY
def test_the_formulas_are_those_in_the_papers(p, m, v):
    assume(m >= p or v == 1)
    assert bubble(p, m, v) == pytest.approx((p - 1) / (m * v + p - 1), abs=1e-12)
    if m % p == 0 and m > p:
        live = SCHEDULES["interleaved"].live_activations(0, p, m, v)
        assert live == min(m * v, p * v + p - 1)
    assert SCHEDULES["1f1b"].live_activations(0, p, m, 1) == min(m, p)
    assert SCHEDULES["afab"].live_activations(p - 1, p, m, v) == m * v


@pytest.mark.parametrize(
    "engine,ranks,m,chunks,training,last_plan",
    [
        ("1f1b", 1, 3, 1, True, "F0 B0 F1 B1 F2 B2"),  # gradient accumulation
        ("afab", 1, 2, 2, True, "F0 F1 F0.1 F1.1 B0.1 B1.1 B0 B1"),
        ("interleaved", 2, 3, 2, False, "F0 F1 F2 F0.1 F1.1 F2.1"),  # evaluation
    ],
)
def test_known_plans(engine, ranks, m, chunks, training, last_plan):
    plans = build_plans(engine, ranks, m, chunks, training=training)
    assert " ".join(str(action) for action in plans[-1] if action.peer is None) == last_plan
    assert play(plans) == simulate(plans).makespan


def test_a_longer_warm_up_hides_the_time_of_sends():
    def lost(engine: str) -> float:
        plans = build_plans(engine, 4, 32)
        return play(plans, send_time=0.25) - simulate(plans).makespan

    there_and_back = 2 * 3 * 0.25
    assert lost("afab") == there_and_back
    assert lost("1f1b") > 5 * there_and_back


def send_when_made_receive_when_needed(plans: list[Plan]) -> list[Plan]:
    """The obvious way to insert communication for one chunk, which ignores the other ranks."""
    last, naive = len(plans) - 1, []
    for rank, plan in enumerate(plans):
        naive.append([])
        for a in plan:
            before, after = (rank - 1, rank + 1) if a.kind is F else (rank + 1, rank - 1)
            if 0 <= before <= last:
                naive[-1].append(Action(RECEIVES[a.kind], a.micro_batch, 0, before))
            naive[-1].append(a)
            if 0 <= after <= last:
                naive[-1].append(Action(SENDS[a.kind], a.micro_batch, 0, after))
    return naive


def test_the_obvious_sends_deadlock_in_1f1b():
    plans = send_when_made_receive_when_needed([one_f_one_b(rank, 2, 4) for rank in range(2)])
    circle = "rank 0 waits in 'send F1 to rank 1'; rank 1 waits in 'send B0 to rank 0'$"
    with pytest.raises(ValueError, match=circle):
        play(plans)


def test_a_circle_over_two_ranks_is_named_in_its_order():
    one = [Action(F, 0), Action(B, 0), Action(F, 1), Action(B, 1)]
    other = [Action(F, 0), Action(F, 1), Action(B, 0), Action(B, 1)]
    with pytest.raises(ValueError, match=r"^deadlock, each waits for the next: ") as error:
        simulate([one, other])
    steps = re.findall("'.*?' of rank .", str(error.value))
    circle = ["'B0' of rank 0", "'B0' of rank 1", "'F1' of rank 1", "'F1' of rank 0"]
    start = circle.index(steps[0])
    assert steps == [*circle[start:], *circle[:start], steps[0]]


@pytest.mark.parametrize("rank,action", [(0, "B3"), (1, "F2")])
def test_an_action_that_is_missing_or_there_twice_is_named(rank, action):
    plans = build_plans("1f1b", 2, 4)
    (found,) = [a for a in plans[rank] if str(a) == action]
    for plan, problem in (
        ([a for a in plans[rank] if a != found], "is missing"),
        ([*plans[rank], found], "is there 2 times"),
    ):
        others = [plan if i == rank else other for i, other in enumerate(plans)]
        with pytest.raises(ValueError, match=f"^rank {rank}: '{action}' {problem}$"):
            simulate(others)


def test_chunks_are_refused_where_they_have_no_meaning():
    assert chunks_problem("interleaved", 3) is None
    with pytest.raises(ValueError, match="1f1b has 1 chunk a rank, not 2: use 1, or engine afab"):
        build_plans("1f1b", 2, 4, 2)
