"""Marks for a class: its table, and the results of Gradescope."""

import csv
import json
import os
from types import SimpleNamespace

import pytest

from exercises import __main__ as commands
from exercises import grade
from exercises.exercise import Verdict
from exercises.grade import Task, row_of, tasks_of


def test_a_class_gets_a_table_and_a_student_results_for_gradescope(tmp_path, monkeypatch, capsys):
    for name in ("alice", "carol", "_old"):
        (folder := tmp_path / "class" / name).mkdir(parents=True)
        (folder / "04_shift.py").touch()
    verdict = Verdict(False, {"V": "", "B": "wrong", "O": ""}, "a_name", "a sentence")
    monkeypatch.setattr(grade, "Sandbox", lambda *_: SimpleNamespace(check=lambda *_: verdict))
    words = ["--exercises", "4=20", "5"]
    table = ["--csv", str(tmp_path / "marks.csv")]
    assert commands.main(["grade", str(tmp_path / "class"), *table, *words]) == 0
    with (tmp_path / "marks.csv").open(newline="") as stream:
        rows = {(row["student"], row["exercise"]): row for row in csv.DictReader(stream)}
    assert len(rows) == 4 and [rows["alice", "04"][key] for key in "VBO"] == ["1", "0", "1"]
    assert "a sentence\nV value: passed\nB bytes: wrong" in rows["alice", "04"]["message"]
    out = capsys.readouterr().out
    assert "alice: 0 of 2, 0 of 30 points, missing 05\n" in out and "Not isolated" in out
    verdict = Verdict(True, {"V": ""}, "", "")
    table = ["--json", str(tmp_path / "results.json")]
    assert commands.main(["grade", str(tmp_path / "class/carol"), *table, *words]) == 0
    shift, ring = json.loads((tmp_path / "results.json").read_text())["tests"]
    assert (shift["score"], shift["max_score"], shift["status"]) == (20, 20, "passed")
    assert (ring["score"], ring["status"], ring["name"]) == (0, "failed", "05")


REFUSED = """
class | has no folders: name one
class/none | No such file
. --csv class/none/a.csv | No such file
. --exercises hunt5 | is no exercise: use 4, or
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

    def row(number: int) -> dict:
        return row_of(SimpleNamespace(check=lambda *_: verdict), tmp_path, Task(number), 0)

    (tmp_path / "04_shift.py").touch()
    found = row(4)
    assert found["mistake"] == "1" + "x" * 39
    assert [found[key] for key in ("V", "B", "O", "passed")] == ["0", "1", "", 0]
    (tmp_path / "05_ring.py").symlink_to(tmp_path / "04_shift.py")  # perhaps another student's
    os.mkfifo(tmp_path / "06_buffer.py")
    for number in (5, 6):
        found = row(number)
        assert found["mistake"] == "missing" and "there is 04_shift.py" in found["message"]


def test_without_words_all_exercises_count():
    assert tasks_of(["4=20"]) == [Task(4, 20)]
    assert [task.number for task in tasks_of([])] == [*range(1, 25)]
