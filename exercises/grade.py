"""Marks for a class: `python -m exercises grade FOLDER --csv marks.csv`.

FOLDER/alice/04_shift.py        one folder a student, with the files that `start` writes
FOLDER/bob/04_shift.py          a file that is missing is a line in the table, too
"""

import csv
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from exercises.exercise import GATES, files
from exercises.sandbox import WARNING, Sandbox, is_plain

COLUMNS = ["student", "exercise", "passed", *GATES, "mistake", "seconds"]


def grade(folder: Path, table: Path, seed: int, wrap: str, jobs: int, numbers: list[int]) -> None:
    """Check the files of all students, and write one line for each student and exercise."""
    there = folder.iterdir() if folder.is_dir() else ()
    students = sorted(path for path in there if path.is_dir())
    if not students:
        problem = "has no folders" if folder.is_dir() else "is no folder"
        raise ValueError(f"{folder} {problem}: name one that has a folder for each student")
    print(WARNING)
    sandbox, tasks = Sandbox(wrap), [(s, n) for s in students for n in numbers or files()]

    def line(task: tuple[Path, int]) -> dict:
        return line_of(sandbox, *task, seed)

    with table.open("w", newline="") as stream, ThreadPoolExecutor(jobs) as pool:
        writer = csv.DictWriter(stream, COLUMNS)
        writer.writeheader()
        try:
            for done, row in enumerate(pool.map(line, tasks), 1):  # in the order of the tasks
                writer.writerow(row)
                stream.flush()  # what is done stays, if this is ended
                if row["mistake"] != "missing":  # these are in the summary
                    what = "passed" if row["passed"] else row["mistake"]
                    where = f"{row['student']}  {row['exercise']}"
                    print(f"{done} of {len(tasks)}  {where}  {what}", flush=True)
        except BaseException:  # Ctrl-C and SIGTERM, too: leave nothing running
            pool.shutdown(wait=False, cancel_futures=True)
            sandbox.end()
            raise


def line_of(sandbox: Sandbox, student: Path, number: int, seed: int) -> dict:
    """A line of the table."""
    row = {"student": student.name, "exercise": f"{number:02}", "passed": 0, "seconds": 0}
    found = sorted(student.glob(f"{number:02}_*.py"))
    if len(found) != 1:
        return row | {"mistake": "two_files" if found else "missing"}
    if not is_plain(found[0]):
        return row | {"mistake": "no_plain_file"}
    verdict = sandbox.check(number, found[0].resolve(), seed)
    row |= {gate: _mark(problem) for gate, problem in verdict["gates"].items()}
    mistake = re.sub(r"\W", "", verdict["mistake"])[:40]  # from a process with a student's code
    return row | {
        "passed": int(verdict["passed"]),
        "mistake": mistake,
        "seconds": verdict["seconds"],
    }


def _mark(problem: str) -> str:
    return "" if problem == "not checked" else str(int(not problem))


def default_jobs() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def summary(table: Path) -> Iterator[str]:
    """How many exercises each student has passed, and which files are missing."""
    with table.open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    for student in dict.fromkeys(row["student"] for row in rows):
        own = [row for row in rows if row["student"] == student]
        yield f"{student}: {sum(row['passed'] == '1' for row in own)} of {len(own)}"
        missing = [row["exercise"] for row in own if row["mistake"] == "missing"]
        if missing:
            yield f"    missing: {', '.join(missing)}"
