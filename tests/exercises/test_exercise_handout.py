"""The tree for a class: no answers in it, and the checks of the course."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from exercises import __main__ as commands
from exercises import exercise as catalogue
from exercises.exercise import ROOT
from exercises.hunts import HUNTS
from exercises.source import emptied, find, solution

CHOSEN = [number for number in catalogue.files() if number != 4]


def lines_in(text: str) -> set[str]:
    """The lines of a text that are long enough to be recognised elsewhere."""
    return {line for line in map(str.strip, text.splitlines()) if len(line) >= 30}


@pytest.fixture(scope="module")
def tree(tmp_path_factory) -> Path:
    """What a class gets that does all exercises but one."""
    folder = tmp_path_factory.mktemp("class") / "tree"
    assert commands.main(["handout", str(folder), "--exercises", *map(str, CHOSEN)]) == 0
    return folder


def test_a_handout_has_no_answers_that_can_be_read(tree):
    targets = [find(catalogue.load(number)) for number in CHOSEN]
    hidden = set().union(*(lines_in(t.text) - lines_in(emptied(t)) for t in targets))
    hidden = {line for line in hidden if not line.startswith(("#", "def ", "class "))}
    paths = [path for path in tree.rglob("*") if path.suffix in (".py", ".md", ".txt")]
    shown = {path: path.read_text() for path in paths}
    seen = {path: hidden & lines_in(text) for path, text in shown.items()}
    # Some lines stand elsewhere in the course, too.
    assert len(set().union(*seen.values())) < 0.04 * len(hidden) and len(hidden) > 150
    for target in targets:
        file = tree / target.path.relative_to(ROOT)
        assert f"{target.node.name}, is yours" in shown[file] and len(seen[file]) <= 2, file
    there = sorted(path.name for path in (tree / "exercises").iterdir())
    assert there == ["__init__.py", "__main__.py", "course.zip"] and not [*tree.glob("tests/*.py")]
    secrets = ["853,376"]  # the answer to a question of the course
    secrets += [text for hunt in HUNTS.values() for text in (hunt.new, hunt.found)]
    assert not [secret for secret in secrets for text in shown.values() if secret in text]
    assert shown[tree / "docs/teaching.md"].startswith("## For students\n")
    assert shown[tree / "AGENTS.md"].startswith("## For an assistant")
    assert "exercises/[" not in (tree / ".gitignore").read_text()


def test_a_class_has_the_chosen_exercises_and_checks_them_with_the_course_itself(tree, capsys):
    assert "batch_isend_irecv([send" in (tree / "picotron_min/collectives.py").read_text()
    with zipfile.ZipFile(tree / "exercises/course.zip") as packed:
        names = packed.namelist()
        assert all(packed.read(name) == (ROOT / name).read_bytes() for name in names)
    assert "exercises/e05_ring.py" in names and "exercises/e04_shift.py" not in names

    def run(*words: str, **environment: str) -> str:
        command = [sys.executable, "-mexercises", *words]
        # Of an empty environment: nothing of the course around this test may be found.
        done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done
        return done.stdout

    lines = run("list", PYTHONPATH=str(ROOT)).splitlines()  # where the course is installed, too
    assert [int(line.split()[0]) for line in lines[:-2]] == CHOSEN
    run("start", "17")
    path = tree / "exercises/17_merge.py"
    assert "raise NotImplementedError" in path.read_text()
    path.write_text(solution(catalogue.load(17)))
    assert "Passed. Remember" in run("check", "17")
    path.unlink()  # the tree is that of other tests, too
    # Functions that are missing here are not imported.
    first = (tree / "train.py").read_text().partition("import torch")[0]
    assert 'sys.exit(run_packed("train"))' in first and "import sys" in first
    for folder, problem in (tree, "there already"), (ROOT / "tests/new", "a new folder outside"):
        assert commands.main(["handout", str(folder)]) == 2
        assert problem in capsys.readouterr().err
