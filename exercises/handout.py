"""The tree that a class gets: without answers and without history.

    python -m exercises handout FOLDER --exercises 2 5 10

FOLDER              the course; bodies of the chosen functions raise NotImplementedError
FOLDER/exercises    course.zip, the whole course, with which checks run
"""

import re
import shutil
import zipfile
from collections.abc import Iterator
from pathlib import Path

from exercises.exercise import ROOT, Exercise, files, load
from exercises.grade import tasks_of
from exercises.source import NOT_WRITTEN, emptied, find

KEPT = ["train.py", "create_config.py", "config.json", "pyproject.toml", "README.md", "LICENSE"]
KEPT += [".gitignore", "CITATION.cff", "tests/published_runs.csv", "tests/published_runs_2.csv"]
# Without __init__.py an installed course would be found before a class's tree.
KEPT += ["exercises/__init__.py", "exercises/launch.py"]
FOLDERS = ["picotron_min", "docs", "benchmarks"]  # no tests: they need all bodies, and show some
PACKED = ["train.py", "config.json", "picotron_min", "difference", "exercises"]
# Pages that end with a part for somebody else, "## For ...": it has what comes before (0), or that.
PARTS = {"docs/course.md": 0, "docs/teaching.md": 1, "AGENTS.md": 1}
# What train.py does there before it imports torch, and the tree's own files after it.
RUN_PACKED = """
if __name__ == "__main__":
    from exercises.__main__ import run_packed

    print("The bodies that are missing here are taken from the packed course.", flush=True)
    sys.exit(run_packed("train"))

import torch
"""


def handout(folder: Path, exercises: list[str]) -> None:
    """Write the tree for a class: without answers."""
    if folder.exists() or folder.resolve().is_relative_to(ROOT):
        raise ValueError(f"{folder} is there already, or in {ROOT}: name a new folder outside")
    chosen = [load(task.number) for task in tasks_of(exercises)]
    for name in files_in(KEPT + FOLDERS):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, folder / name)
    (folder / "exercises/launch.py").rename(folder / "exercises/__main__.py")
    for name, part in PARTS.items():
        (folder / name).write_text(_split(name)[part])
    ignored = (folder / ".gitignore").read_text()  # not the files that students hand in
    (folder / ".gitignore").write_text(re.sub(r"(?m)^exercises/.*\.py\n", "", ignored))
    for name, text in _without_bodies(chosen).items():
        (folder / name).write_text(text)
    run = (folder / "train.py").read_text().replace("\nimport torch\n", RUN_PACKED)
    (folder / "train.py").write_text(run)
    pack(folder / "exercises/course.zip", chosen)
    print(f"{len(chosen)} exercises in {folder}: give this folder to the class")
    print("keep your whole course, which grades, and has the answers: docs/teaching.md")
    print("exercises/course.zip is packed, not secret: it has the answers")


def files_in(names: list[str]) -> Iterator[str]:
    """The files of the course with these names, or in folders with these names."""
    for name in names:
        there = sorted((ROOT / name).rglob("*")) if (ROOT / name).is_dir() else [ROOT / name]
        paths = (path for path in there if path.is_file() and path.suffix != ".pyc")
        yield from (path.relative_to(ROOT).as_posix() for path in paths)


def pack(path: Path, chosen: list[Exercise]) -> None:
    """The whole course, but for exercises that are not chosen."""
    # Of these the functions have their bodies in the class's tree.
    others = {p.name for n, p in files().items() if n not in [e.number for e in chosen]}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in files_in(PACKED):
            if name.removeprefix("exercises/") not in others:
                archive.write(ROOT / name, name)


def _without_bodies(chosen: list[Exercise]) -> dict[str, str]:
    """The texts that a handout has instead of the course's, by file."""
    texts, targets = {}, [(find(exercise), exercise) for exercise in chosen]
    # From the end of a file to its beginning, so that the lines of those before stay right.
    for target, exercise in sorted(targets, key=lambda pair: -pair[0].first):
        name = target.path.relative_to(ROOT).as_posix()
        what = f"exercise {exercise.number:02}, {exercise.qualified_name}, is yours to write"
        body = emptied(target).replace(NOT_WRITTEN, f'{NOT_WRITTEN}("{what}")')
        texts[name] = target.replaced(texts.get(name, target.path.read_text()), body)
    return texts


def _split(page: str) -> list[str]:
    return re.split("(?m)(?=^## For )", (ROOT / page).read_text(), maxsplit=1)
