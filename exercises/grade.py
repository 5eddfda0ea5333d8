"""Marks for a class: `python -m exercises grade FOLDER --csv marks.csv`.

FOLDER/alice/04_shift.py        one folder a student, with the files that `start` writes
FOLDER/alice/hunt_2.py          hunts and designs, too
FOLDER/bob/04_shift.py          a file that is missing is a line in the table, too
marks.csv                       a line for each student and task
"""

import csv as tables
import json as texts
import os
import re
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from exercises.design import measure
from exercises.exercise import GATES, constant, files, load
from exercises.hunts import HUNTS, judge
from exercises.sandbox import WARNING, Sandbox

# What there is about a task where nothing was handed in. The table and Gradescope's results are
# made of such records.
ROW = {"student": "", "exercise": "", "points": 0, "of": 0, "passed": 0, **dict.fromkeys(GATES, "")}
ROW |= {"mistake": "", "message": ""}
POINTS = 10  # of an exercise, where nothing else is given
OTHERS = {"design": [1], "hunt": [*HUNTS]}  # by number
Row = dict[str, Any]


class Task(NamedTuple):
    kind: str  # "exercise", "hunt" or "design"
    number: int
    of: float = POINTS  # points

    @property
    def name(self) -> str:
        return f"{self.number:02}" if self.kind == "exercise" else f"{self.kind} {self.number}"

    @property
    def file(self) -> str:
        name = load(self.number).stem[1:] if self.kind == "exercise" else self.name
        return f"{name.replace(' ', '_')}.py"


def parse_task(text: str) -> Task:
    """4, 4=20, hunt2, design1=15; ValueError for all else."""
    found = re.fullmatch(r"(hunt|design|)(\d+)(?:=(\d+(?:\.\d+)?))?", text)
    if not found:
        raise ValueError(f"{text!r} is no task: use 4, 4=20 for 20 points, hunt2, design1")
    kind, number = found[1] or "exercise", int(found[2])
    if kind == "exercise":
        load(number)
    elif number not in OTHERS[kind]:
        numbers = ", ".join(map(str, OTHERS[kind]))
        raise ValueError(f"there is no {kind} {number}: use one of {numbers}")
    return Task(kind, number, float(found[3] or POINTS))


def tasks_of(words: list[str]) -> list[Task]:
    """What is named; else all exercises."""
    return [*map(parse_task, words or map(str, files()))]


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
    """Add a row for each task of each student, and print a line for each student."""
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
    row = ROW | {"student": student.name, "exercise": task.name, "of": task.of}
    # A link may lead to another student's file, and whoever reads a pipe may wait for ever.
    if (path := student / task.file).is_symlink() or not path.is_file():
        there = ", ".join(sorted(path.name for path in student.iterdir())[:50]) or "nothing"
        return row | {"mistake": "missing", "message": f"no file {path.name}: there is {there}"}
    try:
        share, more = MEASURES[task.kind](sandbox, path.resolve(), task, seed)
    except (ValueError, OSError) as error:  # of a hunt or a design that cannot be read
        return row | {"mistake": "no_answer", "message": str(error)}
    row |= more | {"passed": int(share == 1), "points": round(share * task.of, 2)}
    row["mistake"] = re.sub(r"\W", "", row["mistake"])[:40]  # a student's code has run beside it
    return row


def _exercise(sandbox: Sandbox, path: Path, task: Task, seed: int) -> tuple[float, Row]:
    verdict = sandbox.check(task.number, path, seed)
    gates, passed = verdict.gates, verdict.passed
    marks = {gate: str(int(not text)) for gate, text in gates.items() if text != "not checked"}
    lines = [f"{gate} {GATES[gate]}: {text or 'passed'}" for gate, text in gates.items()]
    text = "\n".join(["passed"] if passed else [verdict.message, *lines])
    return float(passed), marks | {"mistake": verdict.mistake, "message": text}


def _hunt(sandbox: Sandbox, path: Path, task: Task, seed: int) -> tuple[float, Row]:
    answer, reason = constant(path, "ANSWER"), constant(path, "REASON")
    near = judge(HUNTS[task.number], str(answer))
    name = {"right": "", "file": "right_file_alone"}.get(near, near)
    return float(not name), {"mistake": name, "message": f"{answer}: {near}\nreason: {reason}"}


def _design(sandbox: Sandbox, path: Path, task: Task, seed: int) -> tuple[float, Row]:
    marks, text, _ = measure(path, sandbox)
    return marks / 3, {"message": f"{text}\n{marks} of 3 marks"}


MEASURES = {"exercise": _exercise, "hunt": _hunt, "design": _design}


def write_table(path: Path, rows: list[Row]) -> None:
    with path.open("w", newline="") as stream:
        writer = tables.DictWriter(stream, [*ROW])
        writer.writeheader()
        writer.writerows(rows)


def write_results(path: Path, rows: list[Row]) -> None:
    """results.json of Gradescope: a test for each task of one student."""
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
