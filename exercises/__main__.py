"""The commands: `python -m exercises` lists the exercises, and --help the rest.

A command is a function of COMMANDS: its parameters are OPTIONS, and its docstring is its help.
"""

import argparse
import ast
import inspect
import json
import signal
import sys
import textwrap
from pathlib import Path

from exercises import exercise as catalogue
from exercises import progress
from exercises.design import design
from exercises.exercise import FOLDER, GATES, ROOT, Exercise, Verdict
from exercises.grade import grade
from exercises.handout import handout
from exercises.hunts import hunt
from exercises.sandbox import Sandbox
from exercises.source import NOT_WRITTEN, parse, reading, starter
from exercises.training import compare

WIDTH = 100  # columns of what is printed
TASKS = "4, or 4=20 for 20 points; default: all, 10 points each"
OPTIONS = {
    "number": {"type": int, "help": "of the exercise, hunt or design"},
    "folder": {"type": Path, "help": "to write: outside of this one, and new; or what to grade"},
    "--solution": {"action": "store_true", "help": "check the course's own"},
    "--seed": {"type": int, "default": 0, "help": "for other sizes and data"},
    "--run": {"help": "measure this layout: dp=1,cp=2,optimizer=adamw"},
    "--difference": {"metavar": "RUN", "help": "name its first wrong tensor: docs/difference.md"},
    "--answer": {"metavar": "FILE:FUNCTION", "help": "where the mistake is"},
    "--csv": {"type": Path, "default": Path("marks.csv"), "help": "the table"},
    "--json": {"type": Path, "help": "instead: results.json of Gradescope, of one student"},
    "--exercises": {"nargs": "+", "default": [], "metavar": "N", "help": TASKS},
}


def main(arguments: list[str] | None = None) -> int:
    about = "Write functions of the course again, and see them at work."
    parser = argparse.ArgumentParser(prog="python -m exercises", description=about)
    commands = parser.add_subparsers()
    for function in COMMANDS:
        about = inspect.getdoc(function)
        command = commands.add_parser(function.__name__.strip("_"), help=about, description=about)
        command.set_defaults(function=function)
        for name in inspect.signature(function).parameters:
            option = name if name in OPTIONS else f"--{name}"
            command.add_argument(option, **OPTIONS[option])
    given = vars(parser.parse_args(arguments or ["list"]))
    try:
        return given.pop("function")(**given) or 0
    except (ValueError, OSError, ModuleNotFoundError) as error:
        # Only torch and what the course needs can be missing.
        is_missing = isinstance(error, ModuleNotFoundError)
        remedy = f": run  pip install -e .  in {FOLDER.parent}" if is_missing else ""
        print(f"{error}{remedy}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # what ran has ended: see Sandbox and training.py
        print("\nstopped", file=sys.stderr)
        return 128 + signal.SIGINT


def list_() -> None:
    """The exercises, and which are solved."""
    for number, path in catalogue.files().items():
        mark = "solved" if progress.read(number)["passed"] else ""
        print(f"{mark:>8}  {Exercise(path).title}")
    print("\nNext: python -m exercises start NUMBER, then check NUMBER; hint NUMBER where stuck")


def start(number: int) -> None:
    """Write a file to begin with."""
    path = file_of(exercise := catalogue.load(number))
    if path.exists():
        raise ValueError(f"{path} is there already: delete it to start again")
    path.write_text(starter(exercise))
    print(f"The file that it is in: python -m exercises read {number:02}")
    print(f"Write your version in {path}, then: python -m exercises check {number:02}")


def read(number: int) -> None:
    """The file that the function is in, without the function's body."""
    print(reading(catalogue.load(number)), end="")


def file_of(exercise: Exercise) -> Path:
    return FOLDER / f"{exercise.stem.removeprefix('e')}.py"


def written(exercise: Exercise) -> Path:
    """The student's file; ValueError if it is not there."""
    path = file_of(exercise)
    if not path.exists():
        raise ValueError(f"there is no {path}: run  python -m exercises start {exercise.number:02}")
    return path


def check(number: int, seed: int, solution: bool) -> int:
    """Check your version."""
    exercise = catalogue.load(number)
    verdict = Sandbox().check(number, "solution" if solution else written(exercise), seed)
    print(show(exercise, verdict))
    if verdict.mistake == "unknown":
        print(f"Whether training differs, and where first: python -m exercises train {number:02}")
    if verdict.passed and not solution:
        progress.update(number, passed=True)
    return int(not verdict.passed)


def show(exercise: Exercise, verdict: Verdict) -> str:
    """What the checker answers."""
    where = f"{exercise.qualified_name} in {exercise.source_module.rpartition('.')[2]}.py"
    lines = [f"{exercise.number:02} {exercise.name}: {where}", ""]
    for gate, problem in verdict.gates.items():
        result = "passed" if not problem else problem if problem == "not checked" else "failed"
        lines.append(f"  {gate} {GATES[gate]:8}{result}")
        lines += [wrapped(" " * 6 + problem)] if result == "failed" else []
    lines += ["", "printed:", verdict.printed.rstrip()] if verdict.printed else []
    lines += ["", verdict.picture, ""] if verdict.picture else [""]
    message = ("Passed. Remember: " if verdict.passed else "") + verdict.message
    return "\n".join([*lines, *map(wrapped, message.splitlines())])


def wrapped(line: str) -> str:
    return textwrap.fill(line, WIDTH, subsequent_indent=" " * 8 * line.startswith(" "))


def hint(number: int) -> None:
    """The next of three hints."""
    print(*progress.next_hint(number, catalogue.load(number).hints), sep="\n")


def train(number: int) -> int:
    """The real training with your version in it."""
    exercise = catalogue.load(number)
    path, settings = written(exercise), json.loads((ROOT / "config.json").read_text())
    if NOT_WRITTEN in ast.unparse(parse(exercise, path.read_text())):
        raise ValueError(f"{path} is not written yet: replace `{NOT_WRITTEN}` by your code")
    return int(not compare(exercise, path, exercise.changed(settings)))


COMMANDS = (list_, start, read, check, hint, train, hunt, design, handout, grade)

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
