"""Marks for a class: `python -m exercises grade FOLDER --csv marks.csv`.

FOLDER/alice/04_shift.py        one folder a student, with the files that `start` writes
FOLDER/bob/04_shift.py          a file that is missing is a line in the table, too
marks.csv                       a line for each student and exercise
"""

import csv as tables
import json as texts
import os
import re
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from exercises.exercise import GATES, files, load
from exercises.sandbox import WARNING, Sandbox

# What there is about an exercise where nothing was handed in. Such records make the table and
# Gradescope's results.
ROW = {"student": "", "exercise": "", "points": 0, "of": 0, "passed": 0, **dict.fromkeys(GATES, "")}
ROW |= {"mistake": "", "message": ""}
POINTS = 10  # of an exercise, where nothing else is given
Row = dict[str, Any]


class Task(NamedTuple):
    number: int  # of the exercise
    of: float = POINTS  # points


def tasks_of(words: list[str]) -> list[Task]:
    """4, or 4=20, as named; else all exercises. ValueError for other words."""
    tasks = []
    for word in words or map(str, files()):
        found = re.fullmatch(r"(\d+)(?:=(\d+(?:\.\d+)?))?", word)
        if not found:
            raise ValueError(f"{word!r} is no exercise: use 4, or 4=20 for 20 points")
        load(int(found[1]))  # which may refuse it
        tasks.append(Task(int(found[1]), float(found[2] or POINTS)))
    return tasks


def students_in(folder: Path) -> list[Path]:
    students = sorted(p for p in folder.iterdir() if p.is_dir() and p.name[0] not in "._")
    if not students:
        raise ValueError(f"{folder} has no folders: name one that has a folder for each student")
    return students


def grade(folder: Path, csv: Path, json: Path | None, seed: int, exercises: list[str]) -> None:
    """Check the files of a class; with --json, of one student."""
    students, tasks = [folder] if json else students_in(folder), tasks_of(exercises)
    (json or csv).open("a").close()  # now, and not after all checks, if it cannot be written
    print(WARNING)
    rows: list[Row] = []
    try:
        # The first optimizer of a process imports this.
        check_all(Sandbox("torch._dynamo"), students, tasks, seed, rows)
    finally:  # what is done stays, if this is ended
        (write_results if json else write_table)(json or csv, rows)


def check_all(
    sandbox: Sandbox, students: list[Path], tasks: list[Task], seed: int, rows: list[Row]
) -> None:
    """Add a row for each exercise of each student, and print a line for each student."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        try:
            for row in pool.map(lambda job: row_of(sandbox, *job, seed), product(students, tasks)):
                rows.append(row)
                if len(rows) % len(tasks) == 0:
                    print(summary(rows[-len(tasks) :]), flush=True)
        except BaseException:  # Ctrl-C, too: leave nothing running
            pool.shutdown(wait=False, cancel_futures=True)
            sandbox.end()
            raise


def row_of(sandbox: Sandbox, student: Path, task: Task, seed: int) -> Row:
    row = ROW | {"student": student.name, "exercise": f"{task.number:02}", "of": task.of}
    path = student / f"{load(task.number).stem[1:]}.py"
    # A link may lead to another student's file, and whoever reads a pipe may wait for ever.
    if path.is_symlink() or not path.is_file():
        there = ", ".join(sorted(path.name for path in student.iterdir())[:50]) or "nothing"
        return row | {"mistake": "missing", "message": f"no file {path.name}: there is {there}"}
    verdict = sandbox.check(task.number, path.resolve(), seed)
    gates, passed = verdict.gates, verdict.passed
    row |= {gate: str(int(not text)) for gate, text in gates.items() if text != "not checked"}
    row |= {"passed": int(passed), "points": task.of * passed}
    row["mistake"] = re.sub(r"\W", "", verdict.mistake)[:40]  # a student's code has run beside it
    lines = [f"{gate} {GATES[gate]}: {text or 'passed'}" for gate, text in gates.items()]
    row["message"] = "\n".join(["passed"] if passed else [verdict.message, *lines])
    return row


def write_table(path: Path, rows: list[Row]) -> None:
    with path.open("w", newline="") as stream:
        writer = tables.DictWriter(stream, [*ROW])
        writer.writeheader()
        writer.writerows(rows)


def write_results(path: Path, rows: list[Row]) -> None:
    """results.json of Gradescope: a test for each exercise of one student."""
    tests = [
        {"name": row["exercise"], "score": row["points"], "max_score": row["of"]}
        | {"status": "passed" if row["passed"] else "failed", "output": row["message"]}
        for row in rows
    ]
    path.write_text(texts.dumps({"stdout_visibility": "hidden", "tests": tests}, indent=2) + "\n")


def summary(own: list[Row]) -> str:
    """What a student has passed, and which files are missing."""
    passed = sum(row["passed"] for row in own)
    points = " of ".join(f"{sum(row[key] for row in own):g}" for key in ("points", "of"))
    text = f"{own[0]['student']}: {passed} of {len(own)}, {points} points"
    missing = ", ".join(row["exercise"] for row in own if row["mistake"] == "missing")
    return f"{text}, missing {missing}" if missing else text
