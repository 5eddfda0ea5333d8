"""Schedules that cut backward in two: their order.

Their bubbles and live activations are in test_pipeline_schedule.py, what waits for W in
test_float8_linear.py, and that N ranks train the same model as one in test_layouts.py.
"""

import pytest

from picotron_min.extensions.schedules.registry import SCHEDULES, build_plans
from picotron_min.extensions.schedules.simulator import simulate
from picotron_min.pipeline_schedule import Action, Kind
from tests.assembled import make_training
from tests.rows import row

B, W = Kind.BACKWARD, Kind.WEIGHT


@pytest.mark.parametrize("engine", ["zb_h1", "zb_v"])
def test_w_before_its_b_is_a_deadlock(engine):
    plans, action = build_plans(engine, 2, 3, SCHEDULES[engine].chunks), Action(W, 1)
    plans[1].remove(action)
    plans[1].insert(plans[1].index(Action(B, 1)), action)
    circle = r"'(W1' of rank 1, 'B1|B1' of rank 1, 'W1)' of rank"
    with pytest.raises(ValueError, match=f"^deadlock, each waits for the next: {circle}"):
        simulate(plans, place=SCHEDULES[engine].place)


def step_without_a_w(words: str) -> str:
    training = make_training(*row(f"schedules: m=3 engine=zb_h1 {words}"))
    training.model.plan.remove(Action(W, 1))
    with pytest.raises(RuntimeError) as error:
        training.step(0)
    return str(error.value)


@pytest.mark.parametrize("words", ["tp=2", "dp=2 sharding=optimizer"])
def test_gradients_that_a_missing_w_leaves_out_are_named(pool, words):
    for message in pool.run(2, step_without_a_w, words):
        assert "model.layers.0.self_attn.q_proj.weight (1)" in message
        assert "norm" not in message and "embed_tokens" not in message, "B computes those"
