"""The designs of exercises/: kept answers reach their marks, cheating ones get none."""

from types import SimpleNamespace

import pytest

from exercises import child, designs
from exercises.design_layers import measure_layers, pipeline_of, splits_to_beat
from exercises.design_layouts import JOBS, jobs_of, measure_layouts
from exercises.design_schedule import TASK, measure_schedule
from exercises.designs import measure, module_of
from exercises.exercise import Verdict
from exercises.marks import constant
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
    assert ours.marks == 0 and "5.5 micro-batches" in ours.text and "bonus" in ours.text


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


@pytest.mark.parametrize(
    ("layers", "marks"),
    [([4, 4, 4, 4], 0), ([5, 5, 5, 1], 1), ([5, 4, 6, 1], 2), ([6, 4, 5, 1], 3), ([6, 4, 5], 0)],
)
def test_layers_get_marks_by_the_time_of_a_step(layers, marks):
    assert measure_layers(layers).marks == marks


def test_numbers_of_designs_are_drawn_for_a_student_and_read_from_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(designs, "FOLDER", tmp_path)
    drawn = {name: pipeline_of(name) for name in ("alice", "bob")}
    assert drawn["alice"] != drawn["bob"]
    assert designs.design(2, "alice") == 0
    with pytest.raises(ValueError, match="was drawn for alice: delete it"):
        designs.design(2, "bob")
    path, own = tmp_path / "design_2.py", drawn["alice"]
    text = path.read_text()
    assert f"Rank {own.slow_rank} takes {own.slower} of" in text and "STUDENT = 'alice'" in text
    best = splits_to_beat(own)[2]
    path.write_text(text.replace("[4, 4, 4, 4]", str(best)))
    assert measure(2, path).marks == 3
    assert jobs_of(None) is JOBS and jobs_of("alice") != JOBS
    assert "{" not in module_of(3).task_of(None).partition("LAYOUTS")[0]


@pytest.mark.parametrize(
    ("layout", "marks", "text"),
    [
        ({"cp": 2, "dp": 4, "sharding": "parameters"}, 3, "100.0%"),
        ({"dp": 8}, 0, "does not fit"),
        ({"depth": 8}, 0, "depth is not a choice"),
        ({"cp": 3, "dp": 4}, 0, "does not fit"),
    ],
)
def test_layouts_get_marks_by_the_planner(layout, marks, text):
    found = measure_layouts({"one node": layout}, {"one node": JOBS["one node"]})
    assert found.marks == marks and text in found.text


def test_numbers_are_read_and_never_run(tmp_path):
    for number, name in ((2, "PP_LAYERS"), (3, "LAYOUTS"), (3, "REASONS")):
        path = tmp_path / f"design_{number}.py"
        path.write_text(module_of(number).task_of(None))
        assert constant(path, name)
    path.write_text("LAYOUTS = print('run')")
    with pytest.raises(ValueError, match="LAYOUTS must be plain"):
        constant(path, "LAYOUTS")
    with pytest.raises(ValueError, match="does not assign REASONS"):
        constant(path, "REASONS")


@pytest.mark.parametrize(
    ("mistake", "marks"), [("marks_3", 3), ("timeout", 0), ("marks_12", 0), ("marks_", 0)]
)
def test_marks_are_read_from_a_verdict(tmp_path, monkeypatch, mistake, marks):
    verdict = Verdict(False, {}, mistake, "text")
    answers = SimpleNamespace(check=lambda *args: verdict)
    monkeypatch.setattr(designs, "Sandbox", lambda: answers)
    assert measure(1, tmp_path).marks == marks


@pytest.mark.parametrize(("edit", "marks", "text"), [("return 1 / 0", 0, "ZeroDivisionError")])
def test_a_schedule_runs_in_the_sandbox(tmp_path, edit, marks, text):
    path = tmp_path / "design_1.py"
    path.write_text(TASK.replace("return forwards + backwards", edit))
    found = measure(1, path)
    assert found.marks == marks and text in found.text


@pytest.mark.parametrize(("text", "name"), [("CHUNKS = 1", "schedule"), ("schedule = 1", "CHUNKS")])
def test_a_design_without_its_names_gets_no_marks(tmp_path, text, name):
    path = tmp_path / "design_1.py"
    path.write_text(text)
    verdict = child._design(path)
    assert verdict.mistake == "marks_0"
    assert f"the file does not define {name}: it must, at the top level" in verdict.message
