"""The time model against published runs: how good it must stay."""

import re
from dataclasses import replace

import pytest

from picotron_min.planner.step_time import Prediction
from picotron_min.planner.uncertainty import interval, is_toss_up, unlike
from picotron_min.planner.validate import read_runs, report
from tests.planner.draw import FILES

RUNS = [run for file in FILES for run in read_runs(file)]
# Errors in the median, of nine of ten, of all; within their intervals, and the median width.
REACHED = """
174 counted runs     | 4.8% 14.2% 57.6% 94% 17%
 96 dense, bf16      | 4.8% 14.5% 33.9% 92% 16%
 52 dense, 8 bits    | 4.0% 11.6% 15.8% 100% 18%
 12 mixtures, bf16   | 7.4% 16.2% 38.8% 92% 27%
 14 mixtures, 8 bits | 8.8% 15.5% 57.6% 93% 34%
 13 layouts of one sweep: Spearman 0.88 | 100.0%
"""


def test_published_speeds_are_predicted_as_well_as_ever():
    found = report(RUNS).rpartition("\n\n")[2].splitlines()
    for row in REACHED.strip().splitlines():
        name, numbers = map(str.strip, row.split("|"))
        (line,) = (line for line in found if name in line)
        assert re.findall(r"[\d.]+%", line) == numbers.split(), name


def test_the_sum_of_all_predictions_is_the_recorded_one():
    """If a term of the time model is changed on purpose, record the new sum."""
    assert sum(run.predicted for run in RUNS) == pytest.approx(1599816.6206, rel=1e-9)


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
