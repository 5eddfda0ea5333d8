"""Design 1: kept answers reach their marks, cheating ones get none."""

from types import SimpleNamespace

import pytest

from exercises import __main__ as commands
from exercises import child, design
from exercises.design import TASK, measure
from exercises.design_marks import measure_schedule
from exercises.exercise import Verdict
from exercises.sandbox import Sandbox
from picotron_min import pipeline_schedule
from picotron_min.extensions.schedules import interleaved


def from_plans(plan):
    return lambda rank, ranks, m, chunks: [str(action) for action in plan(rank, ranks, m, chunks)]


def early(rank, ranks, m, chunks):
    """Interleaved with one warm-up forward, not two, for each rank behind."""
    sizes = interleaved.group_sizes(ranks, m)
    warmup = ranks - rank - 1 + (chunks - 1) * sizes[0]
    return pipeline_schedule.alternating(sizes, chunks, warmup)


def test_schedules_get_marks_by_their_bubble():
    names = {}
    exec(TASK, names)
    start = measure_schedule(names["schedule"], names["CHUNKS"])
    assert start.marks == 0 and "8 micro-batches alive" in start.text  # AFAB
    one = measure_schedule(from_plans(pipeline_schedule.one_f_one_b), 1)
    assert one.marks == 1
    best = measure_schedule(from_plans(early), 2)
    assert "rank 3  ···01230b01" in best.picture
    assert "next mark: a bubble of at most 20.0%" in one.text
    assert best.marks == 3 and "bubble 15.8%, at most 4 " in best.text and "best known" in best.text
    ours = measure_schedule(from_plans(interleaved.interleaved), 2)
    assert ours.marks == 0 and "5.5 micro-batches" in ours.text


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda plan: [*plan, plan[-1]], "is there 2 times"),
        (lambda plan: plan[:-1], "is missing"),
        (lambda plan: [*plan, "W0"], "'W0' is no action"),
        (lambda plan: [*plan, "F8"], "is missing"),  # of other ranks
        (lambda plan: [*plan, "F0.1"], "beyond them"),
        (lambda plan: plan[::-1], "deadlock"),
    ],
)
def test_a_schedule_that_cheats_gets_no_marks(change, problem):
    plan = from_plans(pipeline_schedule.one_f_one_b)

    def cheat(rank, *sizes):
        return change(plan(rank, *sizes)) if rank == 0 else plan(rank, *sizes)

    found = measure_schedule(cheat, 1)
    assert found.marks == 0 and problem in found.text


def test_a_schedule_runs_in_the_sandbox_and_a_forged_mark_is_none(tmp_path):
    path = tmp_path / "design_1.py"
    path.write_text(TASK.replace("return forwards + backwards", "return 1 / 0"))
    found = measure(path, Sandbox())
    assert found.marks == 0 and "ZeroDivisionError" in found.text
    for mistake, marks in (("marks_3", 3), ("timeout", 0), ("marks_12", 0)):
        verdict = Verdict(False, {}, mistake, "text")
        assert measure(path, SimpleNamespace(check=lambda *_: verdict)).marks == marks  # noqa: B023


@pytest.mark.parametrize(("text", "name"), [("CHUNKS = 1", "schedule"), ("schedule = 1", "CHUNKS")])
def test_a_design_without_its_names_gets_no_marks(tmp_path, text, name):
    path = tmp_path / "design_1.py"
    path.write_text(text)
    verdict = child._design(path)
    assert verdict.mistake == "marks_0"
    assert f"the file does not define {name}: it must, at the top level" in verdict.message


def test_a_design_is_written_once_and_then_measured(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(design, "FOLDER", tmp_path)
    assert commands.main(["design", "1"]) == 0
    assert (tmp_path / "design_1.py").read_text() == TASK
    assert commands.main(["design", "1"]) == 1
    assert "0 of 3 marks" in capsys.readouterr().out
    assert commands.main(["design", "2"]) == 2
    assert "there is no design 2: use 1" in capsys.readouterr().err
