"""Schedules that cut backward in two: orders and formulas, then what ranks do with W."""

import itertools
import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from picotron_min.extensions.overlap.linear import WeightGradients, apply_copies, apply_queue
from picotron_min.extensions.schedules import zero_bubble
from picotron_min.extensions.schedules.registry import SCHEDULES, build_plans
from picotron_min.extensions.schedules.simulator import peak_live, simulate
from picotron_min.extensions.settings import Layout, ModelConfig, Workload
from picotron_min.model import Llama
from picotron_min.pipeline_schedule import Action, Kind
from picotron_min.planner.activations import factors_per_token, saved_per_token
from picotron_min.planner.memory import memory_of_ranks
from picotron_min.runtime import draw
from picotron_min.runtime.public_models import find_preset
from picotron_min.runtime.trace import Trace
from tests.assembled import (
    assert_trains_as_one_rank,
    make_config,
    make_training,
    whole_run,
)
from tests.extensions.test_experts import MODELS as EXPERTS
from tests.extensions.test_experts import make_expert_config
from tests.training import Training

F, B, W = Kind.FORWARD, Kind.BACKWARD, Kind.WEIGHT
ENGINES = ("zb_h1", "zb_v")


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


def test_bubbles_of_a_real_model_in_the_order_of_the_engines():
    """SmolLM-1.7B at 2048 tokens: F, B and W of a stage take 1, 1.06 and 0.94."""
    times = {F: 1.0, B: 1.06, W: 0.94}
    bubbles = []
    for engine in ("1f1b", "interleaved", *ENGINES):
        schedule = SCHEDULES[engine]
        plans = build_plans(engine, 8, 32, schedule.chunks)
        whole = times if schedule.splits_backward else times | {B: 2.0}
        timeline = simulate(plans, lambda _, a, t=whole: t[a.kind], place=schedule.place)
        bubbles.append(round(100 * timeline.bubble(0), 1))
    assert bubbles == [17.9, 9.9, 7.6, 3.7]


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


def test_the_plan_counts_what_w_holds():
    model_config, S = find_preset("SmolLM-1.7B"), 2048
    layers = (6, 6, 6, 6)
    layout = Layout(pp=4, pp_engine="zb_h1", pp_layers=layers)
    workload = Workload(S, num_micro_batches=32, dtype="bfloat16")
    E, last = model_config.hidden_size, memory_of_ranks(model_config, layout, workload)[3]
    each = 6 * saved_per_token(model_config, "bfloat16", "none", layout, 0)
    factors = 6 * factors_per_token(model_config, "bfloat16", layout, 0)
    # One is live and three are held, and of the end of the model only one.
    assert last.activations == pytest.approx(S * (each + 3 * factors + 2 * 4 * E))
    one = memory_of_ranks(model_config, Layout(pp=4, pp_layers=layers), workload)[3]
    assert last.loss == one.loss


# What ranks do with W. That they train the same model as one rank is in test_layouts.py.


def pipeline(engine: str, pp: int, micro_batches: int, model: str = "untied", **more) -> Training:
    chunks = SCHEDULES[engine].chunks
    config = make_config(pp=pp, engine=engine, chunks=chunks, micro_batches=micro_batches, **more)
    return make_training(config, model)


def step_without_a_w(sharding: str) -> str:
    training = pipeline("zb_h1", 1, 3, dp=2, sharding=sharding)
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
    training = pipeline("zb_v", 2, 4)
    trace = Trace(range(1), training.axes.pp, torch.device("cpu"), "zb_v")
    training.step(0, trace.watch(0))
    trace.write(path)
    return [str(action) for action in training.model.plan if action.peer is None]


def test_a_measured_trace_has_the_spans_of_the_plan(pool, tmp_path, capsys):
    plans = pool.run(2, traced_step, path := tmp_path / "t.json")
    engine, _, timeline, _ = draw.read_trace(str(path))
    assert engine == "zb_v"
    for rank, plan in enumerate(plans):
        assert [str(s.action) for s in timeline.spans if s.rank == rank] == plan
    assert sum(name.startswith("W") for name in plans[0]) == 8
    draw.main(["--trace", str(path)])
    means = r"mean forward .* ms, backward .* ms, weight .* ms\n"
    assert re.search(means, capsys.readouterr().out)


def gathered_after_b(config) -> list[bool]:
    """Whether any weight of a layer was whole when a B had ended; sharded weights."""
    training = make_training(config, "untied")
    backward, found = training.model.pipeline._backward, []
    units = [u for u in training.units if not {"lm_head.weight"} & u.weights.keys()]

    def check_after(action: Action) -> None:
        backward(action)
        sizes = [w.untyped_storage().size() for unit in units for w in unit.weights.values()]
        found.append(any(sizes))

    training.model.pipeline._backward = check_after
    training.step(0)
    return found


def sharded(engine: str, sharding: str, m: int):
    chunks = SCHEDULES[engine].chunks
    return make_config(2, 1, m, 2, engine=engine, chunks=chunks, sharding=sharding)


def test_sharded_weights_are_freed_behind_b_since_w_reads_none(pool):
    for found in pool.run(4, gathered_after_b, sharded("zb_h1", "parameters", 3)):
        assert found == [False] * 3


@pytest.mark.parametrize("sharding", ["optimizer", "parameters"])
def test_sharded_pipelines_train_the_same_model(pool, sharding):
    assert_trains_as_one_rank(pool, sharded("zb_v", sharding, 4), "tied")


@pytest.mark.parametrize("more", [{}, {"dp": 2, "sharding": "parameters"}], ids=str)
def test_experts_train_to_the_same_bits_as_with_1f1b(pool, more):
    """Together, and with bfloat16 copies: sums are in the same order."""
    make = partial(make_expert_config, pp=2, micro_batches=3, dtype="bfloat16", **more)
    ours, theirs = (
        whole_run(pool, make(engine=engine), EXPERTS["softmax"], 2) for engine in ("zb_h1", "1f1b")
    )
    assert ours.losses == theirs.losses and ours.norms == theirs.norms
    for name, weight in theirs.weights.items():
        assert np.array_equal(ours.weights[name], weight), name
