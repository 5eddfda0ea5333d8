"""The tree that a class gets: without answers and without history, and what the teacher keeps.

    python -m exercises handout FOLDER --exercises 2 5 10

FOLDER              the course; bodies of the chosen functions raise NotImplementedError
FOLDER/exercises    course.zip, the whole course, with which checks run
FOLDER.teacher.md   solutions, known mistakes, the hunts, answers to the course's questions
"""

import re
import shutil
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from exercises.exercise import FOLDER, ROOT, Exercise, files, load
from exercises.source import COURSE, NOT_WRITTEN, emptied, find

KEPT = ["train.py", "create_config.py", "config.json", "pyproject.toml", "README.md", "LICENSE"]
KEPT += [".gitignore", "CITATION.cff", "tests/published_runs.csv", "tests/published_runs_2.csv"]
FOLDERS = ["picotron_min", "docs", "benchmarks"]  # no tests: they need all bodies, and show some
PACKED = ["train.py", "config.json", "picotron_min", "difference", "exercises"]
# A file of the handout -> the file that it is here. Without __init__.py an installed course would
# be found before a class's tree.
FOR_STUDENTS = {
    "exercises/__init__.py": "exercises/__init__.py",
    "exercises/__main__.py": "exercises/launch.py",
}
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
# Not what somebody has written for an exercise.
OWN = re.compile(r"exercises/(\d|design_\d|hunt_\d|progress.json)")


def handout(folder: Path, exercises: list[str]) -> None:
    """Write the tree for a class: without answers."""
    if other := [word for word in exercises if not word.isdecimal()]:
        problem = "name exercises by their numbers; hunts and designs are always in"
        raise ValueError(f"{', '.join(other)}: {problem}")
    if FOLDER.parent != ROOT:
        raise ValueError("this tree is itself a handout: make others from the whole course")
    teacher = folder.parent / f"{folder.name}.teacher.md"
    if there := [path for path in (folder, teacher) if path.exists()]:
        raise ValueError(f"{there[0]} is there already: name a new folder")
    if folder.resolve().is_relative_to(ROOT):
        raise ValueError(f"{folder} is inside of the course: name a folder outside of {ROOT}")
    chosen = [load(int(number)) for number in exercises or files()]
    copies = {name: name for name in files_in(KEPT + FOLDERS)}
    for name, source in (copies | FOR_STUDENTS).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / source, folder / name)
    for name, part in PARTS.items():
        (folder / name).write_text(_split(name)[part])
    for path in folder.rglob("*.md"):
        path.write_text(_without_links(path, folder))
    ignored = (folder / ".gitignore").read_text()  # not the files that students hand in
    (folder / ".gitignore").write_text(re.sub(r"(?m)^exercises/.*\.py\n", "", ignored))
    for name, text in _without_bodies(chosen).items():
        (folder / name).write_text(text)
    run = (folder / "train.py").read_text().replace("\nimport torch\n", RUN_PACKED)
    (folder / "train.py").write_text(run)
    pack(folder / "exercises/course.zip", chosen)
    teacher.write_text("\n".join(_for_teacher(chosen)))
    print(f"{len(chosen)} exercises in {folder}: give this folder to the class")
    print(f"answers in {teacher}: keep it, with your whole course, which grades")
    print("exercises/course.zip is packed, not secret: it has the answers")


def files_in(names: list[str]) -> Iterator[str]:
    """The files of the course with these names, or in folders with these names."""
    for name in names:
        there = sorted((ROOT / name).rglob("*")) if (ROOT / name).is_dir() else [ROOT / name]
        paths = (path for path in there if path.is_file() and path.suffix != ".pyc")
        own = (path.relative_to(ROOT).as_posix() for path in paths)
        yield from (path for path in own if not OWN.match(path))


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


def _without_links(page: Path, folder: Path) -> str:
    """The page's text, where links to files that were left out are plain words."""
    place = page.parent.relative_to(folder)

    def plain(link: re.Match) -> str:
        target = place / link[2]
        return link[1] if (ROOT / target).exists() and not (folder / target).exists() else link[0]

    return re.sub(r"\[([^]\[]*)\]\(([^)#\s]+)\)", plain, page.read_text())


def _split(page: str) -> list[str]:
    return re.split("(?m)(?=^## For )", (ROOT / page).read_text(), maxsplit=1)


def _for_teacher(chosen: Iterable[Exercise]) -> Iterator[str]:
    from exercises.hunts import HUNTS

    yield "# For the teacher: answers\n\nKeep this file: students' trees do not have it.\n"
    yield _split("docs/course.md")[1]
    yield "## Hunts\n"
    for number, hunt in HUNTS.items():
        old = [f"- {line.strip()}" for line in hunt.old.splitlines()]
        yield f"{number}. {hunt.file}: {hunt.found}\n\n{_block(*old, f'+ {hunt.new}')}"
    for exercise in chosen:
        target = find(exercise)
        file = target.path.relative_to(COURSE)
        yield f"## {exercise.title}\n\n{exercise.qualified_name}, {file}\n"
        yield _block(target.text)
        yield f"Known mistakes, each with its edits:\n\n{_block(exercise.text_of_mistakes)}"


def _block(*texts: str) -> str:
    return "\n".join(["```", *(text.strip("\n") for text in texts), "```\n"])
