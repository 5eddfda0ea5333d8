"""Designs: there is no single right answer, and marks are given by measurement.

`design N` writes exercises/design_N.py to begin with and, once it is there, measures it. Design 1
is code, and runs as a check does (sandbox.py). 2 and 3 are numbers, which are read and never run.
"""

from pathlib import Path
from pprint import pformat

from exercises import design_layers, design_layouts, design_schedule
from exercises.exercise import FOLDER
from exercises.marks import Marks, begin, constant, student_of
from exercises.sandbox import Sandbox

TASKS = {  # of a student, or for all
    1: lambda student: design_schedule.TASK,
    2: lambda student: design_layers.TASK.format(**design_layers.pipeline_of(student)._asdict()),
    3: design_layouts.task_of,
}


def command(number: int, student: str | None = None) -> int:
    """What `python -m exercises design` does; the exit code: 0 with at least one mark."""
    if number not in TASKS:
        raise ValueError(f"there is no design {number}: use one of {', '.join(map(str, TASKS))}")
    path = FOLDER / f"design_{number}.py"
    if begin(path, TASKS[number](student), student):
        print(f"Read {path}, change it, then: python -m exercises design {number}")
        return 0
    found = measure(number, path)
    print(*filter(None, (found.picture, found.text)), f"{found.marks} of 3 marks", sep="\n")
    return 0 if found.marks else 1


def measure(number: int, path: Path, sandbox: Sandbox | None = None) -> Marks:
    """Marks for a file; ValueError where its numbers cannot be read."""
    if number == 1:
        verdict = (sandbox or Sandbox()).check("design", path)
        marks = {f"marks_{n}": n for n in range(4)}.get(verdict["mistake"], 0)
        return Marks(marks, verdict["message"], verdict["picture"])
    if number == 2:
        return design_layers.measure_layers(constant(path, "PP_LAYERS"), student_of(path))
    jobs = design_layouts.jobs_of(student_of(path))
    found = design_layouts.measure_layouts(constant(path, "LAYOUTS"), jobs)
    reasons = pformat(constant(path, "REASONS"), width=100, sort_dicts=False)
    return found._replace(text=f"{found.text}\n{reasons}")
