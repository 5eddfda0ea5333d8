"""Design 1: kept answers reach their marks, cheating ones get none."""

import pytest

from exercises import __main__ as commands
from exercises import child, design
from exercises.design import TASK
from exercises.design_marks import measure_schedule
from picotron_min.extensions.schedules.interleaved import group_sizes
from picotron_min.pipeline_schedule import alternating


def schedule(rank: int, ranks: int, m: int, chunks: int) -> list[str]:
    """1F1B; with chunks interleaved, and one warm-up forward, not two, for each rank behind."""
    sizes = group_sizes(ranks, m)
    warmup = ranks - rank - 1 + (chunks - 1) * sizes[0]
    return [str(action) for action in alternating(sizes, chunks, warmup)]


def test_schedules_get_marks_by_their_bubble():
    exec(TASK, names := {})
    marks, text, _ = measure_schedule(names["schedule"], names["CHUNKS"])
    assert marks == 0 and "8 micro-batches alive" in text  # AFAB
    marks, text, _ = measure_schedule(schedule, 1)
    assert marks == 1 and "next mark: a bubble of at most 20.0%" in text
    marks, text, picture = measure_schedule(schedule, 2)
    assert marks == 3 and "bubble 15.8%, at most 4 " in text and "rank 3  ···01230b01" in picture
    assert measure_schedule(schedule, 3)[:2] == (0, "CHUNKS = 3: use 1 or 2")


# What rank 0 does to a right plan, and what is said.
CHEATS = """
[*plan, plan[-1]] | is there 2 times
[*plan, "W0"] | 'W0' is no action
[*plan, "F0.1"] | beyond them
plan[::-1] | deadlock
"""


@pytest.mark.parametrize("line", CHEATS.strip().splitlines())
def test_a_schedule_that_cheats_gets_no_marks(line):
    change, problem = line.split(" | ")

    def cheat(rank, *sizes):
        plan = schedule(rank, *sizes)
        return plan if rank else eval(change, {"plan": plan})

    marks, text, _ = measure_schedule(cheat, 1)
    assert marks == 0 and problem in text


def test_a_design_is_written_once_and_then_measured(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(design, "FOLDER", tmp_path)
    assert commands.main(["design", "1"]) == 0
    path = tmp_path / "design_1.py"
    path.write_text(path.read_text().replace("return forwards + backwards", "return 1 / 0"))
    assert commands.main(["design", "1"]) == 1
    out = capsys.readouterr().out
    assert "ZeroDivisionError" in out and "0 of 3 marks" in out
    assert commands.main(["design", "2"]) == 2
    assert "there is no design 2: use 1" in capsys.readouterr().err


def test_a_name_that_is_missing_is_said(tmp_path):
    path = tmp_path / "design_1.py"
    path.write_text("CHUNKS = 1")
    assert "the file does not define schedule: it must" in child._design(path).message
