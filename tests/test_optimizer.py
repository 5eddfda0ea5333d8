import math

import pytest
import torch
from torch import nn

from picotron_min.mesh import build_axes
from picotron_min.optimizer import (
    Diverged,
    SkippedSteps,
    build_optimizer,
    gradient_norm,
    learning_rate_at,
)


def rates(**changes) -> list[float]:
    settings = {"peak": 1.0, "minimum": 0.1, "schedule": "cosine", "warmup_steps": 4}
    settings |= {"total_steps": 20} | changes
    return [learning_rate_at(step, **settings) for step in range(settings["total_steps"])]


@pytest.mark.parametrize("schedule", ["constant", "cosine", "wsd"])
def test_warm_up_rises_linearly_to_the_peak(schedule):
    assert rates(schedule=schedule)[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_constant_stays_at_the_peak():
    assert set(rates(schedule="constant")[4:]) == {1.0}


def test_cosine_is_half_way_in_the_middle_and_ends_at_the_minimum():
    values = rates()
    assert values[12] == pytest.approx(0.55)
    assert values[4:] == sorted(values[4:], reverse=True)
    assert learning_rate_at(
        20, peak=1.0, minimum=0.1, schedule="cosine", warmup_steps=4, total_steps=20
    ) == pytest.approx(0.1)


def test_wsd_is_stable_then_falls_in_the_last_fifth():
    values = rates(schedule="wsd")
    assert set(values[4:17]) == {1.0}
    assert values[17:] == pytest.approx([0.775, 0.55, 0.325])


def test_wsd_with_a_long_warm_up_falls_in_what_is_left():
    values = rates(schedule="wsd", warmup_steps=18)
    assert values[18:] == pytest.approx([1.0, 0.55])


def test_only_matrices_decay():
    model = nn.Sequential(nn.Linear(3, 2, bias=False), nn.LayerNorm(2, bias=False))
    for parameter in model.parameters():
        parameter.data.fill_(1.0)
        parameter.grad = torch.zeros_like(parameter)
    settings = {"learning_rate": 0.5, "betas": (0.9, 0.95), "weight_decay": 0.1, "fused": True}
    for name in ("adamw", "sgd"):
        optimizer = build_optimizer(model.parameters(), name=name, **settings)
        before = model[0].weight.detach().clone()
        optimizer.step()
        torch.testing.assert_close(model[0].weight, before * 0.95)
        assert torch.equal(model[1].weight, torch.ones(2))


def norm_of_parts() -> float:
    axes = build_axes(torch.device("cpu"), pp=2, tp=2)
    sharded = [torch.tensor([1.0, 2.0]), torch.tensor([[2.0]])]  # on each of four ranks
    replicated = [torch.tensor([3.0])]  # the same on the tp ranks of a stage
    return gradient_norm(sharded, replicated, axes.tp, axes.pp).item()


def test_gradient_norm_counts_parts_on_every_rank_and_replicas_once(pool):
    assert pool.run(4, norm_of_parts) == [pytest.approx((4 * 9 + 2 * 9) ** 0.5)] * 4


def test_three_non_finite_steps_in_a_row_stop_the_run():
    skipped = SkippedSteps()
    norms = [1.0, math.nan, math.inf, 2.0, math.nan, math.nan]
    assert [skipped.record(step, norm) for step, norm in enumerate(norms)] == [
        False, True, True, False, True, True
    ]  # fmt: skip
    assert skipped.total == 4
    with pytest.raises(Diverged, match="3 steps in a row, up to step 6"):
        skipped.record(6, math.inf)
