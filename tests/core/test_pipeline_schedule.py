"""Schedules are checked on paper: no processes, no tensors."""

import itertools
import re
from collections.abc import Iterator
from typing import get_args

import pytest

from picotron_min.extensions.schedules.registry import SCHEDULES, build_plans, chunks_problem
from picotron_min.extensions.schedules.simulator import Timeline, peak_live, simulate
from picotron_min.extensions.settings import Layout, Workload
from picotron_min.pipeline_schedule import (
    RECEIVES,
    SENDS,
    Action,
    Kind,
    Plan,
    bubble,
    one_f_one_b,
    stages_of,
)
from picotron_min.planner.memory import memory_per_rank
from picotron_min.runtime import draw
from picotron_min.runtime.public_models import PRESETS
from tests.messages import simulate_messages
from tests.runtime.test_draw import write_trace

F, B, W = Kind.FORWARD, Kind.BACKWARD, Kind.WEIGHT


def cases(engine: str) -> Iterator[tuple[str, int, int, int]]:
    """Of every schedule in the registry: engine, ranks, micro-batches, chunks."""
    # Up to twice the ranks every number of micro-batches; with 2 chunks, those around multiples of
    # the ranks; with other numbers of chunks, a few.
    few, usual = (1, 2, 5, 8, 13, 32), (*range(1, 18), 31, 32)
    for ranks, chunks in itertools.product((1, 2, 3, 4, 5, 8), (1, 2, 3, 4)):
        if chunks == 2:
            micro_batches = [m for m in usual if m % ranks in (0, 1, ranks - 1)]
        else:
            micro_batches = usual if chunks == SCHEDULES[engine].chunks else few
        if not chunks_problem(engine, chunks):
            yield from ((engine, ranks, m, chunks) for m in micro_batches)


@pytest.fixture(scope="module", params=list(SCHEDULES))
def all_plans(request) -> dict[tuple, list[Plan]]:
    """The plans of one schedule, by case."""
    return {case: build_plans(*case) for case in cases(request.param)}


def computing(plan: Plan) -> Plan:
    return [action for action in plan if action.peer is None]


def test_every_stage_does_every_micro_batch_once_and_in_order(all_plans):
    for (engine, _, m, chunks), plans in all_plans.items():
        for plan in plans:
            kinds = (F, B, W) if SCHEDULES[engine].splits_backward else (F, B)
            expected = itertools.product(kinds, range(m), range(chunks))
            assert sorted(map(str, computing(plan))) == sorted(str(Action(*x)) for x in expected)
            for kind, c in itertools.product(kinds, range(chunks)):
                order = [a.micro_batch for a in plan if a.kind is kind and a.chunk == c]
                assert kind is F or order == list(range(m)), "sums are equal to the last bit"


def test_each_rank_has_its_chunks_in_the_order_of_its_stages(all_plans):
    for case in all_plans:
        engine, ranks, _, chunks = case
        places = [SCHEDULES[engine].place(stage, ranks) for stage in range(ranks * chunks)]
        of_ranks = [stages_of(SCHEDULES[engine], rank, ranks, chunks) for rank in range(ranks)]
        assert sorted(itertools.chain(*of_ranks)) == list(range(ranks * chunks))
        for rank, stages in enumerate(of_ranks):
            assert [places[s] for s in stages] == [(rank, c) for c in range(chunks)]


def test_nothing_deadlocks_and_all_dependencies_hold_when_every_message_blocks(all_plans):
    for (engine, _, m, _), plans in all_plans.items():
        if m <= 12:  # simulate_messages raises otherwise
            place = SCHEDULES[engine].place
            simulate_messages(plans, send_time=0.5, blocking=True, place=place)


def test_both_ends_of_every_pair_have_its_messages_in_the_same_order(all_plans):
    opposite = {SENDS[kind]: RECEIVES[kind] for kind in (F, B)}
    opposite |= {receive: send for send, receive in opposite.items()}
    for plans in all_plans.values():
        for a, b in itertools.combinations(range(len(plans)), 2):
            at_a = [(x.kind, x.micro_batch) for x in plans[a] if x.peer == b]
            at_b = [(opposite[x.kind], x.micro_batch) for x in plans[b] if x.peer == a]
            assert at_a == at_b


def sorted_spans(timeline: Timeline) -> list[tuple]:
    return sorted((start, rank, str(action), end) for rank, action, start, end in timeline.spans)


def test_bubble_and_live_activations_are_the_textbooks(all_plans):
    for (engine, ranks, m, chunks), plans in all_plans.items():
        schedule = SCHEDULES[engine]
        timeline = simulate(plans, place=schedule.place)
        if m <= 9:  # all receives are posted in time, which `simulate` takes for granted
            with_messages = simulate_messages(plans, place=schedule.place)
            assert sorted_spans(with_messages) == sorted_spans(timeline)
        for rank in range(ranks):
            assert abs(timeline.bubble(rank) - schedule.bubble(ranks, m, chunks)) < 1e-12
            assert peak_live(plans[rank]) == schedule.live_activations(rank, ranks, m, chunks)


def test_the_formulas_are_those_in_the_papers():
    live = SCHEDULES["interleaved"].live_activations
    for p, m, v in itertools.product(range(1, 9), range(1, 33), range(1, 5)):
        if m >= p or v == 1:
            assert abs(bubble(p, m, v) - (p - 1) / (m * v + p - 1)) < 1e-12
        if m % p == 0 and m > p:
            assert live(0, p, m, v) == min(m * v, p * v + p - 1)
    assert [SCHEDULES["1f1b"].live_activations(rank, 4, 3, 1) for rank in range(4)] == [3, 3, 2, 1]
    assert SCHEDULES["afab"].live_activations(3, 4, 8, 2) == 16


def test_a_longer_warm_up_hides_the_time_of_sends():
    def lost(engine: str) -> float:
        plans = build_plans(engine, 4, 32)
        return simulate_messages(plans, send_time=0.25).makespan - simulate(plans).makespan

    there_and_back = 2 * 3 * 0.25
    assert lost("afab") == there_and_back
    assert lost("1f1b") > 5 * there_and_back


def test_one_rank_accumulates_gradients_and_sends_nothing():
    for chunks in (1, 2):
        for engine in ("afab", "interleaved"):
            assert all(a.peer is None for a in build_plans(engine, 1, 5, chunks)[0])
    assert " ".join(map(str, build_plans("1f1b", 1, 3)[0])) == "F0 B0 F1 B1 F2 B2"


def test_evaluation_runs_through_all_chunks():
    plans = build_plans("interleaved", 2, 3, 2, training=False)
    assert " ".join(map(str, computing(plans[1]))) == "F0 F1 F2 F0.1 F1.1 F2.1"
    assert str(plans[1][-1]) == "F2.1"  # the last stage passes nothing on
    assert peak_live(plans[0]) == 6
    assert simulate_messages(plans, blocking=True).num_ranks == 2  # it does not deadlock
    assert simulate(plans).makespan == 3 * 2 + 1


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
    assert simulate_messages(plans).makespan == 15  # sends in the background hide the mistake
    circle = "^deadlock: rank 0 waits in 'send F1 to rank 1'; rank 1 waits in 'send B0 to rank 0'$"
    with pytest.raises(ValueError, match=circle):
        simulate_messages(plans, blocking=True)


def test_a_circle_over_two_ranks_is_named_in_its_order():
    one = [Action(F, 0), Action(B, 0), Action(F, 1), Action(B, 1)]
    other = [Action(F, 0), Action(F, 1), Action(B, 0), Action(B, 1)]
    with pytest.raises(ValueError, match=r"^deadlock, each waits for the next: ") as error:
        simulate([one, other])
    steps = re.findall("'.*?' of rank .", str(error.value))
    circle = ["'B0' of rank 0", "'B0' of rank 1", "'F1' of rank 1", "'F1' of rank 0"]
    start = circle.index(steps[0])
    assert steps == [*circle[start:], *circle[:start], steps[0]]


@pytest.mark.parametrize("run_on_paper", [simulate, simulate_messages])
def test_an_action_that_is_missing_or_there_twice_is_named(run_on_paper):
    for rank, action in ((0, "B3"), (1, "F2"), (1, "receive F2 from rank 0")):
        plans = build_plans("1f1b", 2, 4)
        plans[rank] = [a for a in plans[rank] if str(a) != action]
        if "rank" not in action or run_on_paper is simulate_messages:
            with pytest.raises(ValueError, match=f"^rank {rank}: '{action}' is missing$"):
                run_on_paper(plans)
    plans = build_plans("afab", 2, 2)
    plans[0].append(Action(B, 1))
    with pytest.raises(ValueError, match=r"^rank 0: 'B1' is there 2 times$"):
        run_on_paper(plans)


@pytest.mark.parametrize("engine", SCHEDULES)
@pytest.mark.parametrize("chunks", [1, 2])
def test_receives_are_posted_early_enough(engine, chunks):
    if chunks_problem(engine, chunks):
        return
    place = SCHEDULES[engine].place
    for ranks, m in ((2, 8), (4, 8), (4, 9), (8, 16)):
        plans = build_plans(engine, ranks, m, chunks)
        # All receives posted before anything else: no message could arrive earlier.
        first = [sorted(plan, key=lambda a: a.kind not in RECEIVES.values()) for plan in plans]
        best, own = (
            simulate_messages(p, send_time=0.25, place=place).makespan for p in (first, plans)
        )
        assert own <= 1.02 * best


def test_chunks_are_refused_where_they_have_no_meaning():
    message = "^1f1b has 1 chunk a rank, not 2: use 1, or engine afab or interleaved or zb_v$"
    with pytest.raises(ValueError, match=message):
        build_plans("1f1b", 2, 4, 2)


def test_a_schedule_that_is_in_the_registry_and_nowhere_else_is_complete(
    tmp_path, capsys, monkeypatch
):
    """Under another name it is drawn and planned as before."""

    def draw_and_plan(engine: str) -> tuple:
        sizes = ["--stages", "2", "--microbatches", "2", "--width", "44"]
        draw.main(["--engine", engine, *sizes])
        spans = simulate(build_plans(engine, 2, 2, 2), place=SCHEDULES[engine].place).spans
        write_trace(tmp_path / "t.json", spans, pp_engine=engine)
        draw.main(["--trace", str(tmp_path / "t.json")])
        layout = Layout(pp=2, pp_engine=engine, pp_chunks=2)
        model_config = PRESETS["tiny"].override(tie_word_embeddings=True)
        memory = memory_per_rank(model_config, layout, Workload(64, num_micro_batches=2))
        return capsys.readouterr().out.replace(engine, "it"), memory

    for engine in ("interleaved", "zb_v"):
        expected = draw_and_plan(engine)
        assert "+0.00 ms from the plan" in expected[0]
        monkeypatch.setitem(SCHEDULES, f"my_{engine}", SCHEDULES[engine])
        assert draw_and_plan(f"my_{engine}") == expected


def test_the_config_offers_every_schedule_of_the_registry():
    assert get_args(Layout.__annotations__["pp_engine"]) == tuple(SCHEDULES)
