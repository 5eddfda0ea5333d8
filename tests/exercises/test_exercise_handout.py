"""The tree for a class: no answers in it, and the checks of the course."""

import json
import re
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


@pytest.fixture(scope="module")
def tree(tmp_path_factory) -> Path:
    """A handout of all exercises."""
    folder = tmp_path_factory.mktemp("class") / "tree"
    assert commands.main(["handout", str(folder)]) == 0
    return folder


def lines_in(text: str, least: int = 30) -> set[str]:
    """The lines of a text that are long enough to be recognised elsewhere."""
    return {line for line in map(str.strip, text.splitlines()) if len(line) >= least}


def bodies() -> set[str]:
    """Lines of the solutions that a student's tree does not show."""
    targets = [find(catalogue.load(number)) for number in catalogue.files()]
    hidden = set().union(*(lines_in(t.text) - lines_in(emptied(t)) for t in targets))
    return {line for line in hidden if not line.startswith(("#", "def ", "class "))}


def places_of_hunts(tree: Path) -> set[str]:
    """The files that show what tells a hunt's place, but for the one that has it."""
    found = set()
    for hunt in HUNTS.values():
        words = {word.rstrip(",") for word in {*hunt.new.split()} - {*hunt.old.split()}}
        parts = [(word, "") for word in words if len(word) > 10]
        parts += [(line, hunt.file) for line in lines_in(hunt.old)]
        for path in [*tree.rglob("*.py"), *tree.rglob("*.md")]:
            name, text = path.relative_to(tree).as_posix(), path.read_text()
            found |= {name for part, own in parts if part in text and name != own}
    return found


def test_a_handout_has_no_answers_that_can_be_read(tree):
    exercises = [catalogue.load(number) for number in catalogue.files()]
    hidden = bodies()
    assert len(hidden) > 150
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
    there = sorted(path.name for path in (tree / "exercises").iterdir())
    assert there == ["__init__.py", "__main__.py", "course.zip"] and not (tree / ".git").exists()
    assert not places_of_hunts(tree)
    (tree / "docs/leak.md").write_text(HUNTS[2].new)
    assert places_of_hunts(tree) == {"docs/leak.md"}
    (tree / "docs/leak.md").unlink()
    answer, pages = "853,376", [path.read_text() for path in tree.rglob("*.md")]
    assert not any(answer in text for text in pages) and not list(tree.glob("tests/*.py"))
    assert (tree / "docs/teaching.md").read_text().startswith("## For students\n")
    assert (tree / "AGENTS.md").read_text().startswith("## For an assistant")
    links = re.findall(r"\]\((?!http)([^)#]+)", (tree / "README.md").read_text())
    assert "docs/difference.md" in links and all((tree / link).exists() for link in links)
    assert "exercises/[" not in (tree / ".gitignore").read_text()
    teacher = tree.with_name("tree.teacher.md").read_text()
    assert answer in teacher
    assert all(mistake.sentence[:40] in teacher for e in exercises for mistake in e.mistakes)
    assert all(find(exercise).text in teacher for exercise in exercises)


def test_chosen_exercises_alone_are_handed_out_and_checked_as_in_the_course(tmp_path, capsys):
    folder = tmp_path / "two"
    assert commands.main(["handout", str(folder), "--exercises", "5", "17"]) == 0
    changed = (folder / "picotron_min/collectives.py").read_text()
    assert "exercise 05, ring, is yours" in changed and "batch_isend_irecv([send" in changed
    shown = capsys.readouterr().out
    assert "2 exercises in" in shown and "not secret" in shown
    # What checks run is the course itself, to the last byte.
    with zipfile.ZipFile(folder / "exercises/course.zip") as packed:
        names = packed.namelist()
        assert all(packed.read(name) == (ROOT / name).read_bytes() for name in names)
    needed = [*(ROOT / "picotron_min").rglob("*.py"), catalogue.files()[5], catalogue.files()[17]]
    assert {path.relative_to(ROOT).as_posix() for path in needed} <= {*names}
    assert "exercises/e04_shift.py" not in names

    def run(*words: str, script: str = "-mexercises", **environment: str) -> str:
        command = [sys.executable, script, *words]
        # Of an empty environment: nothing of the course around this test may be found.
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done
        return done.stdout

    lines = run("list", PYTHONPATH=str(ROOT)).splitlines()  # where the course is installed, too
    assert [line.split()[0] for line in lines[:4]] == ["2", "05", "5", "17"]
    run("start", "17")
    path = folder / "exercises/17_merge.py"
    assert "raise NotImplementedError" in path.read_text()
    path.write_text(solution(catalogue.load(17)))
    assert "Passed. Remember" in run("check", "17")
    (folder / "exercises/05_ring.py").write_text(solution(catalogue.load(5)))
    assert "Passed. Remember" in run("check", "5")
    # The plain trainer needs the function that is missing here: ring attention.
    config = json.loads((ROOT / "config.json").read_text())
    config["distributed"] |= {"dp_size": 1, "tp_size": 1, "cp_size": 2}
    config["training"] |= {"total_train_steps": 1, "warmup_steps": 0, "eval_frequency": 0}
    config["checkpoint"] = {"save_dir": str(tmp_path / "run")}
    config["dataset"]["name"] = str(tmp_path / "a.txt")
    (tmp_path / "a.txt").write_text("a line to learn\n" * 1000)
    (own := tmp_path / "one.json").write_text(json.dumps(config))
    shown = run("--config", str(own), script="train.py")
    assert "taken from the packed course" in shown and "step 1/1" in shown, shown
    for other, problem in ((folder, "there already"), (ROOT / "tests/new", "outside of")):
        assert commands.main(["handout", str(other)]) == 2
        assert problem in capsys.readouterr().err
    assert commands.main(["handout", str(tmp_path / "x"), "--exercises", "99"]) == 2
    assert not (tmp_path / "x").exists()
