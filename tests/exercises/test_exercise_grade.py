"""Marks for a class: points, hunts and designs, and Gradescope."""

import json
import re
import zipfile
from types import SimpleNamespace

import pytest

from exercises import __main__ as commands
from exercises import grade
from exercises.exercise import Verdict
from exercises.grade import Task, parse_task, share_of, tasks_of
from exercises.gradescope import autograder
from exercises.hunts import SHEET


def test_a_lone_file_is_graded_as_gradescope_wants_it(tmp_path, capsys):
    path, out = tmp_path / "hunt_2.py", tmp_path / "results.json"
    sheet = SHEET.format(number=2, student=None)
    for answer, score in (("optimizer.py:measure_gradient", 15), ("optimizer.py:1", 0)):
        text = sheet.replace("FILE.py:FUNCTION", answer)
        path.write_text(text.replace('REASON = ""', 'REASON = "norms"'))
        options = ["--json", str(out), "--exercises", "hunt2=15"]
        assert commands.main(["grade", "--one", str(path), *options]) == 0
        (test,) = json.loads(out.read_text())["tests"]
        assert (test["score"], test["max_score"], test["name"]) == (score, 15, "hunt 2")
        assert test["status"] == ("passed" if score else "failed") and "norms" in test["output"]
    path.write_text("ANSWER = print()")
    assert commands.main(["grade", "--one", str(path), "--json", str(out)]) == 0
    assert "must be plain" in json.loads(out.read_text())["tests"][0]["output"]
    assert commands.main(["grade"]) == 2 and commands.main(["grade", "--one", "none"]) == 2
    assert "there is no none" in capsys.readouterr().err
    path.write_text(sheet)
    (row,) = grade.grade_one(path, 0, "", [])
    assert (row["mistake"], row["message"]) == ("not_answered", "not answered")
    path.write_text(sheet.replace("FILE.py:FUNCTION", "optimizer.py:1"))
    assert grade.grade_one(path, 0, "", [])[0]["mistake"] == "right_file_alone"


def test_what_cannot_be_graded_is_refused_before_the_first_check(tmp_path, monkeypatch, capsys):
    failed = Verdict(False, {}, "lost", "no such image")
    monkeypatch.setattr(grade, "Sandbox", lambda wrap: SimpleNamespace(check=lambda *_: failed))
    (folder := tmp_path / "class").joinpath("alice").mkdir(parents=True)
    (folder / "_old").mkdir()
    assert [path.name for path in grade.students_in(folder)] == ["alice"]
    table = ["--csv", str(tmp_path / "marks.csv")]
    for options, problem in (
        (["--csv", str(tmp_path / "none/a.csv")], "No such file"),
        ([*table, "--wrap", "false"], "does not pass:\nno such image"),
        ([*table, "--jobs", "0"], "at least 1 check"),
        ([*table, "--exercises", "2", "2=20"], "02 is named twice"),
        ([*table, "--json", "results.json"], "use it with --one"),
        (["--csv", f"{folder}.csv"], "outside of"),
        (["--csv", f"{folder}/marks.csv"], "outside of"),
    ):
        assert commands.main(["grade", str(folder), *options]) == 2
        assert problem in capsys.readouterr().err
    assert [*tmp_path.iterdir()] == [folder]
    assert commands.main(["handout", str(tmp_path / "a"), "--exercises", "hunt2"]) == 2
    assert "always in" in capsys.readouterr().err


def test_a_class_gets_points_and_pages(tmp_path, monkeypatch):
    for name in ("alice", "carol"):
        (tmp_path / "class" / name).mkdir(parents=True)
        (tmp_path / "class" / name / "04_shift.py").touch()
    (tmp_path / "class/carol/design_1.py").touch()
    verdict = Verdict(False, {"V": "", "B": "wrong", "O": ""}, "a_name", "# no title")
    answers = SimpleNamespace(check=lambda *args: verdict)
    monkeypatch.setattr(grade, "Sandbox", lambda wrap: answers)
    table, words = tmp_path / "marks.csv", ["4=20", "design1"]
    rows = grade.grade_class(tmp_path / "class", table, 1, 0, "", words)
    found = {(row["student"], row["exercise"]): row for row in rows}
    assert {row["points"] for key, row in found.items() if key[1] == "04"} == {15}
    assert found["alice", "design 1"]["mistake"] == "missing"
    page = (tmp_path / "marks/alice.md").read_text()
    assert "# alice: 15 of 30 points" in page and "    # no title\n    V value: passed" in page
    assert found["alice", "design 1"]["message"] == "no design_1.py: there is 04_shift.py"
    shown = "\n".join(grade.summary(rows))
    assert "alice: 0 of 2, 15 of 30 points\n    missing: design 1\n" in shown


@pytest.mark.parametrize(
    ("passed", "marks", "share"),
    [
        (True, {"V": "1", "B": "1"}, 1),
        (False, {"V": "1", "B": "0", "O": "1"}, 0.75),
        (False, {"V": "1", "B": "0", "O": "0"}, 0.5),
        (False, {"V": "0", "B": "1", "O": "1"}, 0),
        (False, {"V": "", "B": "", "O": ""}, 0),
        (False, {}, 0),
    ],
)
def test_gate_v_is_half_and_the_others_share_the_rest(passed, marks, share):
    assert share_of(passed, marks) == share


def test_tasks_are_named_with_their_points(tmp_path):
    assert (
        parse_task("4=20") == Task("exercise", 4, 20) and parse_task("hunt6").files == "hunt_6.py"
    )
    for text, problem in (
        ("x", "is no task"),
        ("hunt5", "use one of 1, 2, 3, 4, 6, 7"),
        ("99", "no exercise 99"),
    ):
        with pytest.raises(ValueError, match=problem):
            parse_task(text)
    (tmp_path / "design_1.py").touch()
    (tmp_path / "hunt_7.py").touch()
    (tmp_path / "hunt_8.py").touch()
    names = [task.name for task in tasks_of([], [tmp_path])]
    assert names[0] == "01" and names[-3:] == ["24", "design 1", "hunt 7"]


def test_the_zip_has_the_scripts_and_the_course(tmp_path):
    autograder(tmp_path / "a.zip", 7, ["4=20", "hunt4"])
    with zipfile.ZipFile(tmp_path / "a.zip") as archive:
        names = archive.namelist()
        run = archive.read("run_autograder").decode()
        image = archive.read("Dockerfile").decode()
        assert archive.getinfo("run_autograder").external_attr >> 16 == 0o755
    assert "--seed 7 --exercises 4=20 hunt4" in run and "setup.sh" in names
    assert image.startswith("FROM gradescope/autograder-base:")
    copied = re.findall(r"/autograder/source/(\w+\S*)", image)
    assert copied == ["setup.sh", "run_autograder"] and {*copied} <= {*names}
    assert "COPY . /autograder/source/\n" in image
    assert {"exercises/__main__.py", "exercises/e04_shift.py"} <= {*names}
    assert "picotron_min/collectives.py" in names
    assert not [name for name in names if name.endswith(".pyc") or "tests/" in name]
