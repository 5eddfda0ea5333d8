"""Marks for a class: `python -m exercises grade FOLDER --csv marks.csv`.

FOLDER/alice/04_shift.py        one folder a student, with the files that `start` writes
FOLDER/alice/hunt_2.py          hunts and designs, too
FOLDER/bob/04_shift.py          a file that is missing is a line in the table, too
marks.csv, marks/alice.md       the table, and a page for each student to hand back
"""

import csv
import json
import re
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from textwrap import indent
from typing import Any, NamedTuple

from exercises.design import measure
from exercises.exercise import GATES, constant, files, load
from exercises.hunts import ANSWER, HUNTS, judge
from exercises.sandbox import WARNING, Sandbox, is_plain

# What there is about a task where nothing was handed in. The table, pages and Gradescope's results
# are made of such records; the page has `message`, and the table has not.
ROW = {"student": "", "exercise": "", "points": 0, "of": 0, "passed": 0, **dict.fromkeys(GATES, "")}
ROW |= {"mistake": "", "seconds": 0, "message": ""}
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
    def files(self) -> str:
        return self.name.replace(" ", "_") + ("_*.py" if self.kind == "exercise" else ".py")


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


def tasks_of(words: list[str], students: list[Path]) -> list[Task]:
    """What is named; else all exercises, and those hunts and designs that somebody handed in."""
    tasks = [*map(parse_task, words)]
    names = [task.name for task in tasks]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"{', '.join(twice)} is named twice: name each task once")
    if words:
        return tasks
    handed_in = {path.name for student in students for path in student.glob("*.py")}
    others = (Task(kind, n) for kind, numbers in OTHERS.items() for n in numbers)
    return [*(Task("exercise", n) for n in files()), *(t for t in others if t.files in handed_in)]


def students_in(folder: Path) -> list[Path]:
    there = folder.iterdir() if folder.is_dir() else ()
    students = sorted(p for p in there if p.is_dir() and p.name[0] not in "._")
    if not students:
        problem = "has no folders" if folder.is_dir() else "is no folder"
        raise ValueError(f"{folder} {problem}: name one that has a folder for each student")
    return students


def grade(
    submissions: Path | None,
    one: Path | None,
    csv: Path,
    json: Path | None,
    wrap: str,
    jobs: int,
    seed: int,
    exercises: list[str],
) -> None:
    """Check the files of a class."""
    # So that it ends what it has started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    if bool(submissions) == bool(one):
        raise ValueError("name either a folder with a folder for each student, or --one FILE")
    if json and not one:
        raise ValueError("--json is the answer to one student: use it with --one")
    common = seed, wrap, exercises
    rows = grade_one(one, *common) if one else grade_class(submissions, csv, jobs, *common)
    if json:
        write_results(json, rows)
    print(*summary(rows), sep="\n")


def grade_class(
    folder: Path, table: Path, jobs: int, seed: int, wrap: str, words: list[str]
) -> list[Row]:
    """Check the files of all students; writes a line for each task, and a page for each student."""
    students, pages, rows = students_in(folder), table.with_suffix(""), []
    if pages.resolve().is_relative_to(folder.resolve()) or pages == table:
        raise ValueError(f"pages would lie in {pages}: name a table outside of {folder}, as a.csv")
    if jobs < 1:
        raise ValueError(f"--jobs {jobs}: at least 1 check has to run at a time")
    tasks = [(student, task) for student in students for task in tasks_of(words, students)]
    sandbox = sandbox_of(wrap)
    pages.mkdir(exist_ok=True)
    table.open("a").close()  # now, and not after all checks, if it cannot be written
    print(WARNING)
    try:
        check_all(sandbox, tasks, seed, jobs, rows)
    finally:  # what is done stays, if this is ended
        with table.open("w", newline="") as stream:
            writer = csv.DictWriter(stream, [*ROW][:-1], extrasaction="ignore")
            writer.writeheader()
            writer.writerows(rows)
    for name, own in by_student(rows).items():
        (pages / f"{name}.md").write_text(page(name, own))
    print(f"the table is {table}, a page for each student in {pages}/")
    return rows


def grade_one(path: Path, seed: int, wrap: str, words: list[str]) -> list[Row]:
    """Rows for the files of one student: a folder, or a single file."""
    if not path.exists():
        raise ValueError(f"there is no {path}")
    folder = path if path.is_dir() else path.parent
    if not path.is_dir():
        found = re.match(r"(hunt_|design_|)0?(\d+)", path.name)
        words = words or [f"{found[1].rstrip('_')}{found[2]}" if found else path.name]
    tasks, rows = [(folder, task) for task in tasks_of(words, [folder])], []
    check_all(sandbox_of(wrap), tasks, seed, 1, rows)
    return rows


def sandbox_of(wrap: str) -> Sandbox:
    """ValueError if checks behind this command cannot run."""
    sandbox = Sandbox(wrap)
    if wrap and not (found := sandbox.check(1, "solution")).passed:
        problem = "with it even the course's own function does not pass"
        raise ValueError(f"--wrap {wrap}: {problem}:\n{found.message}")
    return sandbox


def check_all(
    sandbox: Sandbox, tasks: list[tuple[Path, Task]], seed: int, jobs: int, rows: list[Row]
) -> None:
    """Add a row for each task, in their order."""
    with ThreadPoolExecutor(jobs) as pool:
        try:
            for row in pool.map(lambda task: row_of(sandbox, *task, seed), tasks):
                rows.append(row)
                what = "passed" if row["passed"] else row["mistake"] or f"{row['points']} points"
                what = f"{len(rows)} of {len(tasks)}  {row['student']}  {row['exercise']}  {what}"
                if row["mistake"] != "missing":  # these are in the summary
                    print(what, flush=True)
            for i, row in enumerate(rows):
                if row["mistake"] == "lost":  # perhaps the machine was busy; now nothing else runs
                    rows[i] = row_of(sandbox, *tasks[i], seed)
        except BaseException:  # Ctrl-C and SIGTERM, too: leave nothing running
            pool.shutdown(wait=False, cancel_futures=True)
            sandbox.end()
            raise


def row_of(sandbox: Sandbox, student: Path, task: Task, seed: int) -> Row:
    row = ROW | {"student": student.name, "exercise": task.name, "of": task.of}
    found = sorted(student.glob(task.files))
    if len(found) > 1:
        names = ", ".join(path.name for path in found)
        return row | {"mistake": "two_files", "message": f"hand in one of {names}"}
    if not found:
        there = ", ".join(sorted(path.name for path in student.iterdir())[:50]) or "nothing"
        return row | {"mistake": "missing", "message": f"no {task.files}: there is {there}"}
    if not is_plain(found[0]):
        return row | {"mistake": "no_plain_file", "message": "no plain file"}
    try:
        share, more = MEASURES[task.kind](sandbox, found[0].resolve(), task, seed)
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
    more = {"mistake": verdict.mistake, "seconds": verdict.seconds, "message": text}
    return share_of(passed, marks), marks | more


def share_of(passed: bool, marks: dict[str, str]) -> float:
    """Gate V is half, the others share the rest. Without V none: doing nothing passes some."""
    others = [mark == "1" for gate, mark in marks.items() if gate != "V"]
    if passed or marks.get("V") != "1":
        return float(passed)
    return 0.5 + 0.5 * sum(others) / len(others) if others else 0.0


def _hunt(sandbox: Sandbox, path: Path, task: Task, seed: int) -> tuple[float, Row]:
    answer, reason = constant(path, "ANSWER"), constant(path, "REASON")
    if answer == ANSWER:  # as the sheet has it
        return 0.0, {"mistake": "not_answered", "message": "not answered"}
    near = judge(HUNTS[task.number], str(answer)).replace("file", "right file alone")
    name = "" if near == "right" else near.replace(" ", "_")
    return float(not name), {"mistake": name, "message": f"{answer}: {near}\nreason: {reason}"}


def _design(sandbox: Sandbox, path: Path, task: Task, seed: int) -> tuple[float, Row]:
    found = measure(path, sandbox)
    return found.marks / 3, {"message": f"{found.text}\n{found.marks} of 3 marks"}


MEASURES = {"exercise": _exercise, "hunt": _hunt, "design": _design}


def write_results(path: Path, rows: list[Row]) -> None:
    """results.json of Gradescope: a test for each task of one student."""
    tests = [
        {"name": row["exercise"], "score": row["points"], "max_score": row["of"]}
        | {"status": "passed" if row["passed"] else "failed", "output": row["message"]}
        for row in rows
    ]
    path.write_text(json.dumps({"stdout_visibility": "hidden", "tests": tests}, indent=2) + "\n")


def by_student(rows: list[Row]) -> dict[str, list[Row]]:
    return {name: [*own] for name, own in groupby(rows, itemgetter("student"))}


def page(student: str, rows: list[Row]) -> str:
    """What a student gets back: points, and each task's gates and sentence, as plain text."""
    lines = [f"# {student}: {points_of(rows)} points", ""]
    for row in rows:
        text = indent(row["message"], "    ")
        lines += [f"## {row['exercise']}: {points_of([row])}", "", text, ""]
    return "\n".join(lines)


def points_of(rows: list[Row]) -> str:
    return " of ".join(f"{sum(row[key] for row in rows):g}" for key in ("points", "of"))


def summary(rows: list[Row]) -> Iterator[str]:
    """What each student has passed, and which files are missing."""
    for student, own in by_student(rows).items():
        passed = sum(row["passed"] for row in own)
        yield f"{student}: {passed} of {len(own)}, {points_of(own)} points"
        if missing := [row["exercise"] for row in own if row["mistake"] == "missing"]:
            yield f"    missing: {', '.join(missing)}"
