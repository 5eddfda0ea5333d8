"""The time model against published runs: how good it must stay."""

import csv
from pathlib import Path
from statistics import mean, median

import pytest

from picotron_min.planner import validate
from picotron_min.planner.__main__ import main
from picotron_min.planner.validate import errors_of, read_runs, report, spearman, sweep

FILES = [
    Path(__file__).parents[1] / name for name in ("published_runs.csv", "published_runs_2.csv")
]
PUBLISHED, _ = FILES


@pytest.fixture(scope="module")
def runs():
    return read_runs(PUBLISHED)


@pytest.fixture(scope="module")
def others():
    return [run for run in read_runs(FILES[1]) if run.use == "counted"]


def test_other_code_bases_are_predicted_too(others):
    """Section 6 of the specification: medians, and nine tenths within."""
    most = {"dense": (0.06, 0.16), "dense, 8 bits": (0.05, 0.13), "mixtures": (0.10, 0.18)}
    for kind, (middle, nine_tenths) in most.items():
        errors = errors_of([run for run in others if run.kind.startswith(kind)])
        assert errors.median < middle and errors.nine_tenths < nine_tenths, kind
    assert [len(others), sum("mixtures" in run.kind for run in others)] == [109, 26]
    apart = [run for run in others if run.setting.system.tp_messages != (4, 4)]
    sharded = [run for run in others if run.setting.system.reduces == "step"]
    assert apart and errors_of(apart).worst < 0.15
    big = [run for run in apart if run in sharded and run.setting.model_config.hidden_size == 8192]
    assert len(big) == 1 and errors_of(big).worst < 0.10
    long = [run for run in others if run.setting.workload.seq_length >= 2**15]
    assert len(long) > 5 and errors_of(long).worst < 0.20


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


@pytest.mark.parametrize("published", FILES, ids=["first", "second"])
def test_no_prediction_knows_the_name_of_a_row_or_source(published, tmp_path):
    with published.open(newline="") as file:
        rows = list(csv.DictReader(file))
    anonymous = tmp_path / "runs.csv"
    with anonymous.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        told = ("id", "source", "published", "framework", "group", "graphs", "note", "assumed")
        nothing = {name: "" for name in told if name in rows[0]}
        writer.writerows(row | nothing for row in rows)
    runs = read_runs(published)
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


def test_intervals_hold_nine_of_ten_runs(runs, others):
    """In each class, too."""
    counted = [run for run in runs if run.use == "counted"] + others
    kinds = {run.kind for run in counted}
    assert kinds == set(validate.COLOURS) and 0.90 < mean(run.is_within for run in counted) < 0.98
    for name in kinds:
        assert mean(run.is_within for run in counted if run.kind == name) >= 0.9
    widths = [r.interval[1] / r.predicted - 1 for r in counted if "dense" in r.kind]
    assert median(widths) < 0.20


def test_the_picture_in_docs_is_what_the_command_draws(tmp_path):
    drawn = tmp_path / "planner.svg"
    assert main(["--validate", *map(str, FILES), "--picture", str(drawn)]) == 0
    assert drawn.read_text() == Path("docs/planner.svg").read_text(), "draw it again"
    circles = [line for line in drawn.read_text().splitlines() if "<circle" in line]
    assert len(circles) == 65 + 109
    # A run that is predicted exactly is on the diagonal.
    x, y = validate.point(1000, 1000)
    assert (x - validate.LEFT, validate.TOP + validate.SIZE - y) == (x - validate.LEFT,) * 2
