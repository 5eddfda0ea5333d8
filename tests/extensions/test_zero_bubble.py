"""Schedules that cut backward in two: orders and formulas, then what ranks do with W."""

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch

from picotron_min.extensions.overlap.linear import WeightGradients, apply_copies, apply_queue
from picotron_min.extensions.schedules import zero_bubble
from picotron_min.extensions.schedules.registry import SCHEDULES, build_plans
from picotron_min.extensions.schedules.simulator import peak_live, simulate
from picotron_min.extensions.settings import Layout, ModelConfig
from picotron_min.model import Llama
from picotron_min.pipeline_schedule import Action, Kind
from picotron_min.planner.activations import factors_per_token
from picotron_min.runtime import draw
from picotron_min.runtime.trace import Trace
from tests.assembled import make_training
from tests.rows import row

F, B, W = Kind.FORWARD, Kind.BACKWARD, Kind.WEIGHT
ENGINES = ("zb_h1", "zb_v")


@pytest.mark.quick
def test_zb_h1_is_1f1b_with_weight_gradients_between():
    for p, m in itertools.product(range(1, 7), (1, 2, 3, 7, 12)):
        for rank in range(p):
            without = [a for a in zero_bubble.zb_h1(rank, p, m) if a.kind is not W]
            assert without == SCHEDULES["1f1b"].plan(rank, p, m, 1)


def test_the_drawings_are_those_in_the_docstring():
    for engine, width in (("1f1b", 44), ("zb_h1", 44), ("zb_v", 62)):
        schedule = SCHEDULES[engine]
        plans = build_plans(engine, 2, 4, schedule.chunks)
        drawn = draw.draw(simulate(plans, place=schedule.place), width)
        for line in drawn.splitlines():
            assert f"    {line}" in zero_bubble.__doc__


# All integer times up to 5, with a column for each choice.
TIMES = dict(zip((F, B, W), np.indices((5, 5, 5)).reshape(3, -1) + 1, strict=True))


def idle(engine: str, p: int, m: int) -> np.ndarray:
    """Of each rank, for all times at once: in the simulator's order, which depends on no time."""
    schedule, ended, free = SCHEDULES[engine], {}, np.zeros((p, 125))
    plans = [schedule.plan(rank, p, m, schedule.chunks) for rank in range(p)]
    num_stages = p * schedule.chunks
    stages = {schedule.place(stage, p): stage for stage in range(num_stages)}
    for rank, (kind, i, chunk, _), *_ in simulate(plans, place=schedule.place).spans:
        stage = stages[rank, chunk]
        before = {F: (F, stage - 1), B: (B, stage + 1), W: (B, stage)}[kind]
        if before == (B, num_stages):
            before = F, stage
        ready = ended.get((*before, i), 0)
        ended[kind, stage, i] = free[rank] = np.maximum(free[rank], ready) + TIMES[kind]
    return free.max(0) - m * schedule.chunks * sum(TIMES.values())


@pytest.mark.parametrize("p", range(2, 7))
def test_ranks_are_idle_for_as_long_as_the_formulas_say(p):
    f, b, w = TIMES.values()
    cases = {
        "zb_h1": ((w <= f) & (f <= b), (p - 1) * (f + b - w), (p, p + 1, 2 * p, 3 * p + 1, 20)),
        "zb_v": (
            (f <= b) & (w <= b),
            (p - 1) * np.maximum(b, 2 * (b - w)),
            (2 * p - 1, 2 * p, 3 * p, 4 * p + 1, 20),
        ),
    }
    for engine, (is_meant, expected, micro_batches) in cases.items():
        for m in micro_batches:
            assert np.array_equal(idle(engine, p, m)[is_meant], expected[is_meant])


@pytest.mark.parametrize("engine", ENGINES)
def test_w_must_come_behind_its_b(engine):
    place, action = SCHEDULES[engine].place, Action(W, 1)
    plans = build_plans(engine, 2, 3, SCHEDULES[engine].chunks)
    plans[1].remove(action)
    with pytest.raises(ValueError, match=r"^rank 1: 'W1' is missing$"):
        simulate(plans, place=place)
    plans[1].insert(plans[1].index(Action(B, 1)), action)
    circle = r"'(W1' of rank 1, 'B1|B1' of rank 1, 'W1)' of rank"
    with pytest.raises(ValueError, match=f"^deadlock, each waits for the next: {circle}"):
        simulate(plans, place=place)


# Memory.


def test_what_is_held_until_w_counts_as_much_as_it_is():
    for p, m, held in itertools.product(range(1, 7), (6, 20), (0.0, 0.67, 1.0, 10.0)):
        for rank in range(p):
            h1, v = (SCHEDULES[engine].plan(rank, p, m, 2) for engine in ENGINES)
            # At the fullest moment `rank` of p have been through B; or one more, which is then W's.
            peak = max(p - rank + rank * held, (rank + 1) * held + p - rank - 1)
            assert peak_live(h1, held) == pytest.approx(peak)
            assert held > 1 or peak_live(v, held) == pytest.approx(2 * p) or m < 2 * p
    assert peak_live(SCHEDULES["1f1b"].plan(0, 4, 8, 1), 0.67) == 4, "backward frees all"


def test_the_last_stage_runs_b_right_behind_f():
    """So that one gradient of lm_head is alive, as planner/memory.py counts."""
    for engine, p, m in itertools.product(ENGINES, range(1, 7), (1, 2, 5, 20)):
        schedule = SCHEDULES[engine]
        rank, chunk = schedule.place(p * schedule.chunks - 1, p)
        plan = schedule.plan(rank, p, m, schedule.chunks)
        for i in range(m):
            assert plan[plan.index(Action(F, i, chunk)) + 1] == Action(B, i, chunk)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_factors_are_what_a_backward_leaves_in_the_queue(dtype):
    left = []
    for layers in (2, 3):
        model = Llama(ModelConfig(61, 32, 48, layers, 4, 2))
        queue, kind = WeightGradients(), getattr(torch, dtype)
        queue.split = True
        if dtype == "bfloat16":
            apply_copies(model, kind)
        apply_queue(model, queue)
        tokens, positions = torch.randint(61, (2, 16)), torch.arange(16)
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"):
            model(tokens, positions, tokens).backward()
        storages = {t.untyped_storage() for _, *factors in queue for t in factors}
        left.append(sum({s.data_ptr(): s.nbytes() for s in storages}.values()))
    planned = factors_per_token(model.config, dtype, Layout(), 0)
    assert (left[1] - left[0]) / tokens.numel() == planned


# What ranks do with W. That they train the same model as one rank is in test_layouts.py.


def step_without_a_w(sharding: str) -> str:
    training = make_training(*row(f"schedules: dp=2 m=3 engine=zb_h1 sharding={sharding}"))
    training.model.plan.remove(Action(W, 1))
    with pytest.raises(RuntimeError) as error:
        training.step(0)
    return str(error.value)


@pytest.mark.parametrize("sharding", ["none", "optimizer"])
def test_gradients_that_a_missing_w_leaves_out_are_named(pool, sharding):
    for message in pool.run(2, step_without_a_w, sharding):
        assert "model.layers.0.self_attn.q_proj.weight (1)" in message
        assert "norm" not in message and "embed_tokens" not in message, "B computes those"


def traced_step(path: Path) -> list[str]:
    """What this rank computed, in the order of its plan."""
    training = make_training(*row("schedules: pp=2 m=4 engine=zb_v"))
    trace = Trace(range(1), training.axes.pp, torch.device("cpu"), "zb_v")
    training.step(0, trace.watch(0))
    trace.write(path)
    return [str(action) for action in training.model.plan if action.peer is None]


def test_a_measured_trace_has_the_spans_of_the_plan(pool, tmp_path):
    plans = pool.run(2, traced_step, path := tmp_path / "t.json")
    engine, _, timeline, _ = draw.read_trace(str(path))
    assert engine == "zb_v"
    for rank, plan in enumerate(plans):
        assert [str(s.action) for s in timeline.spans if s.rank == rank] == plan
    assert sum(name.startswith("W") for name in plans[0]) == 8
