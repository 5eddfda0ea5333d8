"""Marks for a class: its table, and the results of Gradescope."""

import csv
import json
import os
from types import SimpleNamespace

import pytest

from exercises import __main__ as commands
from exercises import grade
from exercises.exercise import Verdict
from exercises.grade import Task, row_of


def test_a_class_gets_a_table_and_a_student_results_for_gradescope(tmp_path, monkeypatch, capsys):
    for folder in (student := tmp_path / "class/alice", tmp_path / "class/_old"):
        folder.mkdir(parents=True)
    (student / "04_shift.py").touch()
    gates = {"V": "", "B": "wrong", "O": "not checked"}
    verdict = Verdict(False, gates, "=1,\n" + "x" * 50, "a sentence")
    monkeypatch.setattr(grade, "Sandbox", lambda *_: SimpleNamespace(check=lambda *_: verdict))
    words, out = ["--exercises", "4=20", "5"], tmp_path / "out"
    assert commands.main(["grade", str(tmp_path / "class"), "--csv", str(out), *words]) == 0
    with out.open(newline="") as stream:
        shift, ring = csv.DictReader(stream)
    assert [shift[key] for key in ("V", "B", "O", "passed")] == ["1", "0", "", "0"]
    assert shift["mistake"] == "1" + "x" * 39  # no text of a check is trusted
    assert "a sentence\nV value: passed\nB bytes: wrong" in shift["message"]
    assert ring["mistake"] == "missing" and "there is 04_shift.py" in ring["message"]
    shown = capsys.readouterr().out
    assert "alice: 0 of 2, 0 of 30 points, missing 05\n" in shown and "Not isolated" in shown
    verdict = Verdict(True, {"V": ""}, "", "")
    assert commands.main(["grade", str(student), "--json", str(out), *words]) == 0
    shift, ring = json.loads(out.read_text())["tests"]
    assert (shift["score"], shift["max_score"], shift["status"]) == (20, 20, "passed")
    assert (ring["score"], ring["status"], ring["name"]) == (0, "failed", "05")


def test_only_plain_files_are_read(tmp_path):
    (tmp_path / "04_shift.py").touch()
    (tmp_path / "05_ring.py").symlink_to(tmp_path / "04_shift.py")  # perhaps another student's
    os.mkfifo(tmp_path / "06_buffer.py")
    for number in (5, 6):
        assert row_of(None, tmp_path, Task(number), 0)["mistake"] == "missing"


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
