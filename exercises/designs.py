"""Designs: there is no single right answer, and marks are given by measurement.

`design N` writes exercises/design_N.py to begin with and, once it is there, measures it. Design 1
is code, and runs as a check does (sandbox.py). 2 and 3 are numbers, which are read and never run.
"""

from pathlib import Path

from exercises import design_layers, design_layouts, design_schedule, progress
from exercises.exercise import FOLDER
from exercises.marks import Marks, check_drawn_for, constant, student_of
from exercises.sandbox import Sandbox

MARKS = "0", "1", "2", "3"
TASKS = {
    1: lambda student: design_schedule.TASK,
    2: lambda student: design_layers.TASK.format(**design_layers.pipeline_of(student)._asdict()),
    3: design_layouts.task_of,
}


def command(number: int, student: str | None = None) -> int:
    """What `python -m exercises design` does; the exit code: 0 with at least one mark.

    Designs 2 and 3 have other numbers for each student.
    """
    if number not in TASKS:
        raise ValueError(f"there is no design {number}: use one of {', '.join(map(str, TASKS))}")
    path = FOLDER / f"design_{number}.py"
    check_drawn_for(student, path)
    if not path.exists():
        own = f"STUDENT = {student!r}  # whose numbers these are\n" if student else ""
        path.write_text(TASKS[number](student) + own)
        print(f"Read {path}, change it, then: python -m exercises design {number}")
        return 0
    found = measure(number, path)
    if found.picture:
        print(found.picture + "\n")
    print(f"{found.text}\n{found.marks} of 3 marks")
    before = progress.read(f"design {number}")
    progress.update(f"design {number}", passed=found.marks > 0, tries=before["tries"] + 1)
    return 0 if found.marks else 1


def measure(number: int, path: Path, sandbox: Sandbox | None = None) -> Marks:
    """Marks for a file; ValueError where its numbers cannot be read."""
    if number == 1:
        verdict = (sandbox or Sandbox()).check("design", path)
        marks = verdict["mistake"].removeprefix("marks_")
        return Marks(int(marks) if marks in MARKS else 0, verdict["message"], verdict["picture"])
    if number == 2:
        return design_layers.measure_layers(constant(path, "PP_LAYERS"), student_of(path))
    jobs = design_layouts.jobs_of(student_of(path))
    found = design_layouts.measure_layouts(constant(path, "LAYOUTS"), jobs)
    reasons = constant(path, "REASONS")
    return found._replace(text=found.text + "".join(f"\n{k}: {v}" for k, v in reasons.items()))
