"""What all designs have in common: marks, and numbers that are read from a file."""

import ast
from pathlib import Path
from typing import Any, NamedTuple


def student_of(path: Path) -> str | None:
    """For whom the numbers of a file were drawn; None for the course's own."""
    return constant(path, "STUDENT") if "\nSTUDENT = " in path.read_text() else None


def check_drawn_for(student: str | None, path: Path) -> None:
    """ValueError if a file is there, and for somebody else than is named."""
    if student and path.exists() and (whose := student_of(path)) != student:
        raise ValueError(f"{path} was drawn for {whose or 'all'}: delete it to draw for {student}")


class Marks(NamedTuple):
    marks: int  # 0 to 3
    text: str
    picture: str = ""


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
