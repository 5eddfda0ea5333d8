"""The tree for a class: no answers in it, and the same verdicts as here."""

import ast
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from exercises import __main__ as commands
from exercises import exercise as catalogue
from exercises.checking import check
from exercises.handout import _leaks, bodies
from exercises.sealed import ROOT, lines_in, pack, unpack, without_answers
from exercises.source import find, solution, starter

CHECK = """
import json, sys
from pathlib import Path
from exercises.checking import check
from exercises.exercise import load
from exercises.source import starter
for number, texts in json.load(sys.stdin).items():
    exercise, known = load(int(number)), {}
    texts["starter"] = starter(exercise)
    for name, text in texts.items():
        print(json.dumps([name, *check(exercise, text, Path("student.py"), others=known)]))
"""


@pytest.fixture(scope="module")
def tree(tmp_path_factory) -> Path:
    """A handout of all exercises."""
    folder = tmp_path_factory.mktemp("class") / "tree"
    assert commands.main(["handout", str(folder)]) == 0
    return folder


def test_a_handout_gives_the_verdicts_that_the_course_gives(tree, request):
    numbers = catalogue.files() if request.config.getoption("--all-layouts") else (4,)  # 18 below
    texts, here = {}, []
    for number in numbers:
        exercise, known = catalogue.load(number), {}
        right = solution(exercise)
        versions = {"solution": right, "also right": exercise.also_right}
        versions |= {mistake.name: mistake.apply(right) for mistake in exercise.mistakes}
        texts[number] = dict(versions)
        for name, text in (versions | {"starter": starter(exercise)}).items():
            found = [name, *check(exercise, text, Path("student.py"), others=known)]
            here.append(json.loads(json.dumps(found)))
            passed, mistake = found[1], found[3]
            assert passed if name in ("solution", "also right") else name in (mistake, "starter")
    # Of an empty environment: nothing of the course around this test may be found.
    command = [sys.executable, "-c", CHECK]
    options = {"cwd": tree, "env": {"OMP_NUM_THREADS": "1"}, "text": True, "check": True}
    found = subprocess.run(command, input=json.dumps(texts), stdout=subprocess.PIPE, **options)
    there = [json.loads(line) for line in found.stdout.splitlines()]
    assert there == here


def test_a_handout_has_no_answers_that_can_be_read(tree):
    exercises = [catalogue.load(number) for number in catalogue.files()]
    hidden = bodies(exercises)
    assert len(hidden) > 250
    shown = {}
    for path in tree.rglob("*"):
        if path.suffix in (".py", ".md", ".txt"):
            shown[path] = hidden & lines_in(path.read_text())
    # Some lines stand elsewhere in the course, too.
    assert len(set().union(*shown.values())) < 0.04 * len(hidden)
    for exercise in exercises:
        target = find(exercise)
        file = tree / target.path.relative_to(ROOT)
        assert not shown[file] or len(shown[file]) <= 2, file
        assert f"exercise {exercise.number:02}, {exercise.qualified_name}, is yours" in (
            file.read_text()
        )
        sheet = (tree / "exercises" / f"{exercise.stem}.py").read_text()
        assert "MISTAKES" not in sheet and "ALSO_RIGHT" not in sheet and "\n! " in sheet
    hunts = (tree / "exercises/hunts.py").read_text()
    assert "picotron_min/placement.py" not in hunts and not (tree / ".git").exists()
    assert not [*_leaks(tree, [])]
    shutil.copyfile(ROOT / "docs/difference.md", tree / "docs/difference.md")
    assert [*_leaks(tree, [])] == [("docs/difference.md", 'sums=("dp",)')]
    assert not list(tree.glob("docs/answers.md")) and not list(tree.glob("tests/*.py"))
    assert "find out why." in (tree / "README.md").read_text()
    assert "exercises/[" not in (tree / ".gitignore").read_text()
    teacher = tree.with_name("tree.teacher.md").read_text()
    assert all(mistake.sentence[:40] in teacher for e in exercises for mistake in e.mistakes)
    assert all(find(exercise).text in teacher for exercise in exercises)


def test_chosen_exercises_alone_are_handed_out(tmp_path, capsys):
    folder = tmp_path / "two"
    assert commands.main(["handout", str(folder), "--exercises", "5", "18"]) == 0
    sheets = [path.stem for path in sorted((folder / "exercises").glob("e[0-9]*"))]
    assert sheets == ["e05_ring", "e18_merge"]
    changed = (folder / "picotron_min/collectives.py").read_text()
    assert "exercise 05, ring, is yours" in changed and "batch_isend_irecv([send" in changed
    packed = unpack((folder / "exercises/sealed.txt").read_text())  # hunts are drawn from all
    assert {f"exercises/{path.name}" for path in catalogue.files().values()} <= packed.keys()
    shown = capsys.readouterr().out
    assert "2 exercises in" in shown and "not secret" in shown
    path = folder / "exercises/18_merge.py"
    path.write_text(solution(catalogue.load(18)))  # which a server of this tree checks
    command = [sys.executable, "-m", "exercises", "check", "18"]
    done = subprocess.run(command, cwd=folder, env={}, capture_output=True, text=True)
    assert done.returncode == 0 and "Passed. Remember" in done.stdout, done
    for other, problem in ((folder, "there already"), (ROOT / "tests/new", "outside of")):
        assert commands.main(["handout", str(other)]) == 2
        assert problem in capsys.readouterr().err
    assert commands.main(["handout", str(tmp_path / "x"), "--exercises", "99"]) == 2
    assert not (tmp_path / "x").exists()


def test_texts_of_answers_are_cut_out_of_a_sheet_and_code_stays():
    text = (
        'A = """\nwrong\n"""\n\n\ndef f():\n    return "a\\nb"\n\n\nB = "short"\nC = """x\ny"""\n'
    )
    assert ast.dump(ast.parse(without_answers(text))) == ast.dump(
        ast.parse('def f():\n    return "a\\nb"\nB = "short"')
    )
    packed = pack({"a": "answer"})
    assert "answer" not in packed.partition("\n")[2] and "looking up the answers" in packed
    assert unpack(packed) == {"a": "answer"}
