import itertools
from dataclasses import replace
from typing import get_args

import pytest
import torch
from torch import nn

from picotron_min import layout
from picotron_min.extensions.settings import Layout, Recipe
from picotron_min.optimizer import learning_rate_at, measure_gradient
from picotron_min.placement import Placement, placements

RECIPE = Recipe(
    learning_rate=1, min_learning_rate=0.1, schedule="cosine", warmup_steps=4, total_train_steps=20
)


def rates(**changes) -> list[float]:
    recipe = replace(RECIPE, **changes)
    return [learning_rate_at(step, recipe) for step in range(recipe.total_train_steps)]


@pytest.mark.parametrize("schedule", get_args(layout.Recipe.__annotations__["schedule"]))
def test_every_schedule_warms_up_linearly_and_then_only_falls_to_the_minimum(schedule):
    assert rates(schedule=schedule)[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    falling = rates(schedule=schedule, total_train_steps=100)[4:]
    assert falling == sorted(falling, reverse=True)
    assert schedule == "constant" or 0.1 < falling[-1] < 0.2


def test_known_rates_of_each_schedule():
    """Cosine is half-way in the middle; wsd falls in the last fifth, or in what is left of it."""
    assert set(rates(schedule="constant")[4:]) == {1.0}
    assert [rates()[12], learning_rate_at(20, RECIPE)] == pytest.approx([0.55, 0.1])
    values = rates(schedule="wsd")
    assert set(values[4:17]) == {1.0} and values[17:] == pytest.approx([0.775, 0.55, 0.325])
    assert rates(schedule="wsd", warmup_steps=18)[18:] == pytest.approx([1.0, 0.55])


def test_the_gradient_norm_and_zeros_count_each_element_of_the_model_once():
    layout, squares, zeros = Layout(pp=2, dp=2, tp=2), torch.zeros(2), torch.zeros(2)
    for pp, dp, tp in itertools.product(range(2), repeat=3):
        ranks = {"tp": tp, "dp_cp": dp, "dp_cp_tp": 2 * dp + tp, "ends": pp}
        gradients = {
            "embed_tokens.weight": [1.0, 0.0],  # cut over tp, copied over dp_cp and the ends
            f"{pp}.o_proj.weight": [2.0, 0.0, 2.0],  # cut over tp, copied over dp_cp
            f"{pp}.norm.weight": [3.0],  # copied over dp_cp and tp
        }
        parameters = {name: nn.Parameter(torch.zeros(len(of))) for name, of in gradients.items()}
        for name, parameter in parameters.items():
            parameter.grad = torch.tensor(gradients[name])
        table = placements(gradients, layout, tied=True)
        for i, count_zeros in enumerate((False, True)):
            measured = measure_gradient(parameters, table, ranks, count_zeros)
            squares[i] += measured[0]
            zeros[i] += measured[1]
    assert squares.tolist() == pytest.approx([2 * 1 + 2 * 2 * (4 + 4) + 2 * 9] * 2)
    assert zeros.tolist() == [0, 2 + 2 * 2]


def test_the_norm_of_the_gradients_of_a_large_model_is_exact_to_five_digits():
    parameters = {str(i): nn.Parameter(torch.empty(500, 400)) for i in range(30)}
    flat = torch.randn(30, 500, 400) * 1e-4  # a bucket: the float32 norm of it errs by 1.7e-4
    for i, parameter in enumerate(parameters.values()):
        parameter.grad = flat[i]
    everywhere = Placement((), copies=(), sums=())
    square, _ = measure_gradient(parameters, dict.fromkeys(parameters, everywhere), {})
    assert square.sqrt().item() == pytest.approx(flat.double().norm().item(), rel=1e-5)
