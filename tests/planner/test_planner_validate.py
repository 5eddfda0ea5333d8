"""The time model against published runs: how good it must stay."""

from dataclasses import replace
from statistics import mean, median

import pytest

from picotron_min.planner.step_time import Prediction
from picotron_min.planner.uncertainty import interval, is_toss_up, unlike
from picotron_min.planner.validate import Run, errors_of, read_runs, spearman, sweep
from tests.planner.draw import FILES

RUNS = [run for file in FILES for run in read_runs(file)]
FIRST = 80  # of the first file
COUNTED = [run for run in RUNS if run.use == "counted"]
LATER = [run for run in RUNS[FIRST:] if run.use == "counted"]


def some(name: str) -> list[Run]:
    """The counted runs of a line below."""
    kinds = {run.kind for run in COUNTED if run.kind.startswith(name)}
    chosen = {
        "first file": [run for run in RUNS[:FIRST] if run.use == "counted"],
        "7 messages": [run for run in LATER if run.setting.system.tp_messages != (4, 4)],
        "long": [run for run in LATER if run.setting.workload.seq_length >= 2**15],
    }
    return chosen.get(name) or [run for run in LATER if run.kind in kinds]


# Errors at most: in the median, of nine of ten, of all.
MOST = """
first file    | 65 | 0.04 | 0.15 | 0.40
dense         | 83 | 0.06 | 0.16 | 0.40
dense, 8 bits | 52 | 0.05 | 0.13 | 0.40
mixtures      | 26 | 0.10 | 0.18 | 0.60
7 messages    |  6 | 0.15 | 0.15 | 0.15
long          |  8 | 0.20 | 0.20 | 0.20
""".strip().splitlines()


@pytest.mark.parametrize("row", MOST)
def test_published_speeds_are_predicted(row):
    name, number, *most = map(str.strip, row.split("|"))
    runs = some(name)
    assert len(runs) == int(number)
    assert all(e < float(m) for e, m in zip(errors_of(runs), most, strict=True)), errors_of(runs)


def test_layouts_of_one_sweep_are_put_in_order():
    ranked = sweep(RUNS[:FIRST])
    assert len(ranked) == 13
    measured, predicted = [run.measured for run in ranked], [run.predicted for run in ranked]
    assert spearman(measured, predicted) >= 0.85
    best = max(ranked, key=lambda run: run.predicted)
    assert best.measured >= 0.95 * max(measured)


def test_intervals_hold_nine_of_ten_runs_in_each_class():
    assert 0.90 < mean(run.is_within for run in COUNTED) < 0.98
    for kind in {run.kind for run in COUNTED}:
        assert mean(run.is_within for run in COUNTED if run.kind == kind) >= 0.9
    widths = [r.interval[1] / r.predicted - 1 for r in COUNTED if "dense" in r.kind]
    assert median(widths) < 0.20


def test_an_interval_is_twice_as_wide_where_no_run_is_similar():
    run = next(run for run in RUNS if run.setting.gpu.name == "H100")
    strange = replace(run.setting, gpu=replace(run.setting.gpu, validated=()))
    sized = replace(run.setting.model_config, num_local_experts=8, moe_intermediate_size=333)
    mixture = replace(run.setting, model_config=sized)
    assert not unlike(run.setting) and "has the shares of a similar GPU" in unlike(strange)
    assert "not validated for experts of size 333" in unlike(mixture)
    once, twice = (interval(1.0, run.prediction, s)[1] for s in (run.setting, strange))
    assert twice == pytest.approx(once**2)


# What two layouts have in common cancels; a part that one alone has does not.
TOSS_UPS = """
matmuls=1.10 | yes
matmuls=1.12 | no
matmuls=1.0 tp=0.12 | yes
""".strip().splitlines()


@pytest.mark.parametrize("row", TOSS_UPS)
def test_near_layouts_are_a_toss_up(row):
    parts, answer = row.split(" | ")
    parts = {name: float(s) for name, _, s in (word.partition("=") for word in parts.split())}
    other = Prediction(parts, sum(parts.values()))
    assert is_toss_up(Prediction({"matmuls": 1.0, "tp": 0.0}, 1.0), other) is (answer == "yes")
