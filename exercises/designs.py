"""Designs: there is no single right answer, and marks are given by measurement.

`design N` writes exercises/design_N.py to begin with and, once it is there, measures it. Design 1
is code, and runs as a check does (sandbox.py). 2 and 3 are numbers, which are read and never run.
"""

import importlib
from pathlib import Path
from types import ModuleType

from exercises.exercise import FOLDER
from exercises.marks import Marks, begin
from exercises.sandbox import Sandbox

NAMES = {1: "schedule", 2: "layers", 3: "layouts"}


def design(number: int, student: str | None) -> int:
    """A task without a single right answer: three marks by measurement."""
    if number not in NAMES:
        raise ValueError(f"there is no design {number}: use one of {', '.join(map(str, NAMES))}")
    path = FOLDER / f"design_{number}.py"
    if begin(path, module_of(number).task_of(student), student):
        print(f"Read {path}, change it, then: python -m exercises design {number}")
        return 0
    marks, text, picture = measure(number, path)
    print(*filter(None, (picture, text)), f"{marks} of 3 marks", sep="\n")
    return 0 if marks else 1


def module_of(number: int) -> ModuleType:
    """What states and measures a design; it imports torch, which takes seconds."""
    return importlib.import_module(f"exercises.design_{NAMES[number]}")


def measure(number: int, path: Path, sandbox: Sandbox | None = None) -> Marks:
    """Marks for a file; ValueError where its numbers cannot be read."""
    return module_of(number).measure(path, sandbox or Sandbox())
