"""The time model against published runs: how good it must stay."""

import csv
from pathlib import Path

import pytest

from picotron_min.planner.validate import errors_of, read_runs, report, spearman, sweep

PUBLISHED = Path(__file__).parents[1] / "published_runs.csv"


@pytest.fixture(scope="module")
def runs():
    return read_runs(PUBLISHED)


def test_published_speeds_are_predicted(runs):
    counted = [run for run in runs if run.use == "counted"]
    assert len(counted) == 65 and len(runs) == 80
    errors = errors_of(counted)
    assert errors.median < 0.04 and errors.nine_tenths < 0.15 and errors.worst < 0.40


def test_layouts_of_one_sweep_are_put_in_order(runs):
    ranked = sweep(runs)
    assert len(ranked) == 13
    measured, predicted = [run.measured for run in ranked], [run.predicted for run in ranked]
    assert spearman(measured, predicted) >= 0.85
    best = max(ranked, key=lambda run: run.predicted)
    assert best.measured >= 0.95 * max(measured)


def test_no_prediction_knows_the_name_of_a_row_or_source(runs, tmp_path):
    with PUBLISHED.open(newline="") as file:
        rows = list(csv.DictReader(file))
    anonymous = tmp_path / "runs.csv"
    with anonymous.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(row | {"id": "", "source": "", "published": ""} for row in rows)
    assert [r.predicted for r in read_runs(anonymous)] == [r.predicted for r in runs]


def test_errors_and_spearman_by_hand(runs):
    one, *_ = runs
    made = [one._replace(measured=100.0, predicted=100.0 + e) for e in (-1, 2, -3, 4, 50)]
    assert errors_of(made) == pytest.approx((0.03, 0.5, 0.5))
    assert errors_of(made * 2).nine_tenths == pytest.approx(0.5)
    assert errors_of(made[:4] * 10 + made[4:]).nine_tenths == pytest.approx(0.04)
    assert spearman([1, 2, 3], [10, 20, 30]) == 1 and spearman([1, 2, 3], [9, 8, 7]) == -1
    assert spearman([1, 2, 3, 4], [1, 2, 4, 3]) == pytest.approx(0.8)


def test_the_report_has_every_row_and_what_they_come_to(runs):
    text = report(runs)
    assert all(run.name[:42] in text for run in runs)
    assert "65 counted runs" in text and "13 layouts of one sweep: Spearman" in text
