"""The commands: `python -m exercises` lists the exercises, and --help the rest."""

import argparse
import ast
import json
import os
import signal
import sys
import textwrap
from pathlib import Path

from exercises import exercise as catalogue
from exercises import gradescope, hunts, progress
from exercises.exercise import FOLDER, GATES, Exercise
from exercises.grade import grade, grade_one, summary, tasks_of
from exercises.pictures import WIDTH
from exercises.sandbox import HAS_FORK, Sandbox
from exercises.source import NOT_WRITTEN, parse, reading, starter
from exercises.training import compare


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m exercises",
        description="Write functions of the course again, and see them at work.",
    )
    commands, added = parser.add_subparsers(dest="command"), {}
    for name, function, about in COMMANDS:
        added[name] = commands.add_parser(name, help=about, description=about)
        added[name].set_defaults(function=function)
        if name not in ("list", *FOR_TEACHERS):
            what = name if name in ("hunt", "design") else "exercise"
            added[name].add_argument("number", type=int, help=f"of the {what}")
    for name in ("check", "grade", "autograder"):
        added[name].add_argument("--seed", type=int, default=0, help="for other sizes and data")
    added["read"].add_argument("--all", action="store_true", help="also what it does not use")
    added["check"].add_argument("--solution", action="store_true", help="check the course's own")
    option, config = added["train"].add_argument, FOLDER.parent / "config.json"
    option("--config", type=Path, default=config, help="of the run; default: config.json")
    option("--steps", type=int, default=10, help="at most so many; default: 10")
    added["hunt"].add_argument("--run", help="measure this layout: dp=1,cp=2,optimizer=adamw")
    about = "name the first wrong tensor in this layout: see docs/difference.md"
    added["hunt"].add_argument("--difference", metavar="RUN", help=about)
    added["hunt"].add_argument("--answer", metavar="FILE:FUNCTION", help="where the mistake is")
    for name in ("hunt", "design"):
        added[name].add_argument("--student", metavar="NAME", help="draw one for this student")
    option = added["grade"].add_argument
    option("folder", type=Path, nargs="?", help="with a folder for each student")
    option("--one", type=Path, metavar="FILE", help="instead: a file, or one student's folder")
    option("--csv", type=Path, default=Path("marks.csv"), help="the table; pages lie beside it")
    option("--json", type=Path, help="with --one: write results.json of Gradescope")
    option(
        "--wrap",
        default="",
        metavar="COMMAND",
        help="put before each process of checks: a container",
    )
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    option("--jobs", type=int, default=cores, help="checks at a time; default: cores")
    option = added["handout"].add_argument
    option("folder", type=Path, help="what to write: outside of this one, and new")
    option("--exercises", nargs="+", default=[], metavar="N", help="default: all")
    added["autograder"].add_argument("zip", type=Path, help="what to write")
    for name in ("grade", "autograder"):
        about = "4, 4=20 for 20 points, hunt5, design1; default: all exercises, 10 points each"
        added[name].add_argument("--exercises", nargs="+", default=[], metavar="N", help=about)
    given = parser.parse_args(arguments or ["list"])
    try:
        return given.function(given)
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # what ran has ended: see Sandbox and training.py
        print("\nstopped", file=sys.stderr)
        return 128 + signal.SIGINT


def show_list(given: argparse.Namespace) -> int:
    for number, path in catalogue.files().items():
        done = progress.read(number)
        mark = "solved" if done["passed"] else f"{done['tries']} tries" if done["tries"] else ""
        print(f"{mark:>8}  {Exercise(path).title}")
    print("\nNext: python -m exercises start NUMBER, then check NUMBER; hint NUMBER where stuck")
    return 0


def start(given: argparse.Namespace) -> int:
    path = file_of(exercise := catalogue.load(given.number))
    if path.exists():
        raise ValueError(f"{path} is there already: delete it to start again")
    path.write_text(starter(exercise))
    print(f"The file it is from, without its body: python -m exercises read {given.number:02}")
    print(f"Write your version in {path}, then: python -m exercises check {given.number:02}")
    return 0


def read(given: argparse.Namespace) -> int:
    print(reading(catalogue.load(given.number), given.all), end="")
    return 0


def file_of(exercise: Exercise) -> Path:
    return FOLDER / f"{exercise.stem.removeprefix('e')}.py"


def written(exercise: Exercise) -> Path:
    """The student's file; ValueError if it is not there."""
    path = file_of(exercise)
    if not path.exists():
        raise ValueError(f"there is no {path}: run  python -m exercises start {exercise.number:02}")
    return path


def check(given: argparse.Namespace) -> int:
    exercise = catalogue.load(given.number)
    path = "solution" if given.solution else written(exercise)
    verdict = Sandbox().check(given.number, path, given.seed)
    print(show(exercise, verdict))
    if verdict["mistake"] == "unknown" and not exercise.no_training:
        print(f"The first tensor that it makes wrong: python -m exercises train {given.number:02}")
    if not given.solution:
        before = progress.read(given.number)
        passed, tries = verdict["passed"] or before["passed"], before["tries"] + 1
        progress.update(given.number, passed=passed, tries=tries)
    return 0 if verdict["passed"] else 1


def show(exercise: Exercise, verdict: dict) -> str:
    """What the checker answers."""
    where = f"{exercise.qualified_name} in {exercise.source_module.rpartition('.')[2]}.py"
    lines = [f"{exercise.number:02} {exercise.name}: {where}, {verdict['seconds']} s"]
    lines += [""] if verdict["gates"] else []  # a check that was stopped has none
    for gate, problem in verdict["gates"].items():
        result = "passed" if not problem else problem if problem == "not checked" else "failed"
        lines.append(f"  {gate} {GATES[gate]:8}{result}")
        if result == "failed":
            lines += [" " * 6 + line for line in textwrap.wrap(problem, WIDTH - 6)]
    if verdict["printed"]:
        lines += ["", "printed:", verdict["printed"].rstrip()]
    lines += ["", verdict["picture"], ""] if verdict["picture"] else [""]
    message = ("Passed. Remember: " if verdict["passed"] else "") + verdict["message"]
    for line in message.splitlines():
        indent = " " * 8 if line.startswith(" ") else ""
        lines += textwrap.wrap(line, WIDTH, subsequent_indent=indent)
    following = [number for number in catalogue.files() if number > exercise.number]
    if verdict["passed"] and following:
        lines.append(f"Next: python -m exercises start {following[0]:02}")
    return "\n".join(lines)


def hint(given: argparse.Namespace) -> int:
    exercise = catalogue.load(given.number)
    used = min(len(exercise.hints), progress.read(given.number)["hints"] + 1)
    progress.update(given.number, hints=used)
    for i, text in enumerate(exercise.hints[:used], 1):
        print(f"hint {i} of {len(exercise.hints)}: {text}")
    return 0


def train(given: argparse.Namespace) -> int:
    exercise = catalogue.load(given.number)
    if exercise.no_training:
        raise ValueError(f"exercise {given.number:02} is not for train: {exercise.no_training}")
    if not HAS_FORK:
        raise ValueError("train forks processes, which this system cannot: use Linux, macOS or WSL")
    path, config = written(exercise), json.loads(given.config.read_text())
    if NOT_WRITTEN in ast.unparse(parse(exercise, path.read_text())):
        raise ValueError(f"{path} is not written yet: replace `{NOT_WRITTEN}` by your code")
    return 0 if compare(exercise, path, exercise.changed(config), given.steps) else 1


def design(given: argparse.Namespace) -> int:
    from exercises import designs  # which imports torch

    return designs.command(given.number, given.student)


def grade_all(given: argparse.Namespace) -> int:
    # So that it ends what it has started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    if bool(given.folder) == bool(given.one):
        raise ValueError("name either a folder with a folder for each student, or --one FILE")
    common = given.seed, given.wrap, given.exercises
    if given.one:
        rows = grade_one(given.one, *common)
    else:
        rows = grade(given.folder, given.csv, given.jobs, *common)
        print(f"the table is {given.csv}, a page for each student in {given.csv.with_suffix('')}/")
    if given.json:
        gradescope.write_results(given.json, rows)
    print(*summary(rows), sep="\n")
    return 0


def autograder(given: argparse.Namespace) -> int:
    if "hunt 5" in [task.name for task in tasks_of(given.exercises, [])]:
        raise ValueError("hunt 5 is a student's own, and Gradescope names none: use grade for it")
    gradescope.write_zip(given.zip, given.exercises, given.seed)
    print(f"{given.zip} is for Gradescope; it has the answers: students must not get it")
    return 0


def hand_out(given: argparse.Namespace) -> int:
    from exercises.handout import handout

    if other := [word for word in given.exercises if not word.isdecimal()]:
        text = "name exercises by their numbers; hunts and designs are always in"
        raise ValueError(f"{', '.join(other)}: {text}")
    print(*handout(given.folder, [*map(int, given.exercises)]), sep="\n")
    return 0


COMMANDS = [
    ("list", show_list, "the exercises, and which are solved"),
    ("start", start, "write a file to begin with"),
    ("read", read, "the file that the function is in, without the function's body"),
    ("check", check, "check your version"),
    ("hint", hint, "the next of three hints"),
    ("train", train, "the real training with your version in it"),
    ("hunt", hunts.command, "a course with one wrong statement: find it from its symptoms"),
    ("design", design, "a task without a single right answer: three marks by measurement"),
    ("handout", hand_out, "write the tree for a class: without answers"),
    ("grade", grade_all, "check the files of a class"),
    ("autograder", autograder, "write the zip for Gradescope"),
]
FOR_TEACHERS = ("handout", "grade", "autograder")

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
