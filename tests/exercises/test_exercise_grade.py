"""Marks for a class: points, hunts and designs, and the results of Gradescope."""

import csv
import json
import os
from types import SimpleNamespace

import pytest

from exercises import __main__ as commands
from exercises import grade
from exercises.exercise import Verdict
from exercises.grade import Task, parse_task, row_of, tasks_of
from exercises.hunts import SHEET

ANSWERED = SHEET.format(number=2).replace("FILE.py:FUNCTION", "optimizer.py:measure_gradient")


def test_a_class_gets_a_table_and_a_student_results_for_gradescope(tmp_path, monkeypatch, capsys):
    for name in ("alice", "carol", "_old"):
        (folder := tmp_path / "class" / name).mkdir(parents=True)
        (folder / "04_shift.py").touch()
    (tmp_path / "class/carol/hunt_2.py").write_text(ANSWERED)
    verdict = Verdict(False, {"V": "", "B": "wrong", "O": ""}, "a_name", "a sentence")
    monkeypatch.setattr(grade, "Sandbox", lambda *_: SimpleNamespace(check=lambda *_: verdict))
    words = ["--exercises", "4=20", "hunt2"]
    table = ["--csv", str(tmp_path / "marks.csv")]
    assert commands.main(["grade", str(tmp_path / "class"), *table, *words]) == 0
    with (tmp_path / "marks.csv").open(newline="") as stream:
        rows = {(row["student"], row["exercise"]): row for row in csv.DictReader(stream)}
    assert len(rows) == 4 and rows["alice", "04"]["points"] == "0.0"
    assert "a sentence\nV value: passed\nB bytes: wrong" in rows["alice", "04"]["message"]
    out = capsys.readouterr().out
    assert "alice: 0 of 2, 0 of 30 points, missing hunt 2\n" in out and "Not isolated" in out
    table = ["--json", str(tmp_path / "results.json")]
    assert commands.main(["grade", str(tmp_path / "class/carol"), *table, *words]) == 0
    shift, hunt = json.loads((tmp_path / "results.json").read_text())["tests"]
    assert (shift["score"], shift["max_score"], shift["status"]) == (0, 20, "failed")
    assert (hunt["score"], hunt["status"], hunt["name"]) == (10, "passed", "hunt 2")


REFUSED = """
class | has no folders: name one
class/none | No such file
. --csv class/none/a.csv | No such file
. --exercises x | is no task
. --exercises hunt5 | use one of 1, 2, 3, 4, 6, 7
. --exercises 99 | no exercise 99
"""


@pytest.mark.quick
def test_what_cannot_be_graded_is_refused_before_the_first_check(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "class").mkdir()
    for line in REFUSED.strip().splitlines():
        words, problem = line.split(" | ")
        assert commands.main(["grade", *words.split()]) == 2
        assert problem in capsys.readouterr().err


def test_a_record_trusts_no_text_and_reads_only_plain_files(tmp_path):
    gates = {"V": "wrong", "B": "", "O": "not checked"}
    verdict = Verdict(False, gates, "=1,\n" + "x" * 50, "text")

    def row(*task) -> dict:
        return row_of(SimpleNamespace(check=lambda *_: verdict), tmp_path, Task(*task), 0)

    (tmp_path / "04_shift.py").touch()
    found = row("exercise", 4)
    assert found["mistake"] == "1" + "x" * 39
    assert [found[key] for key in ("V", "B", "O", "passed")] == ["0", "1", "", 0]
    (tmp_path / "05_ring.py").symlink_to(tmp_path / "04_shift.py")  # perhaps another student's
    os.mkfifo(tmp_path / "06_buffer.py")
    for number in (5, 6):
        found = row("exercise", number)
        assert found["mistake"] == "missing" and "there is 04_shift.py" in found["message"]
    for answer, mistake in (
        (SHEET.format(number=2), "no_answer"),
        (ANSWERED.replace("measure_gradient", "clip"), "right_file_alone"),
        ("ANSWER = print()", "no_answer"),
    ):
        (tmp_path / "hunt_2.py").write_text(answer)
        assert row("hunt", 2)["mistake"] == mistake


def test_without_words_all_exercises_count():
    assert parse_task("4=20") == Task("exercise", 4, 20)
    names = [task.name for task in tasks_of([])]
    assert names[0] == "01" and names[-1] == "24"
