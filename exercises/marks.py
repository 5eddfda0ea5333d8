"""What hunts and designs have in common: marks, and values that are read from a file, never run."""

import ast
from pathlib import Path
from typing import Any, NamedTuple


class Marks(NamedTuple):
    marks: int  # 0 to 3
    text: str
    picture: str = ""


def begin(path: Path, text: str, student: str | None) -> bool:
    """Write a student's file; False if it is there, ValueError if it is somebody else's."""
    if is_new := not path.exists():
        path.write_text(
            f"{text}STUDENT = {student!r}  # for whom it was drawn\n" if student else text
        )
    elif student and (whose := student_of(path)) != student:
        raise ValueError(f"{path} was drawn for {whose or 'all'}: delete it to draw for {student}")
    return is_new


def student_of(path: Path) -> str | None:
    """For whom a file was drawn; None for the course's own."""
    return constant(path, "STUDENT") if "\nSTUDENT = " in path.read_text() else None


def constant(path: Path, name: str) -> Any:
    """What a file assigns to a name, without running it; ValueError if it is no plain value."""
    try:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == name:
                return ast.literal_eval(node.value)
    except (SyntaxError, ValueError):
        problem = f"{path.name}: {name} must be plain numbers, texts, lists, dicts"
        raise ValueError(problem) from None
    raise ValueError(f"{path.name} does not assign {name}")
