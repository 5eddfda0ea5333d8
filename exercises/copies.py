"""Equal submissions: the same syntax tree, apart from names, comments and annotations.

Names are those of variables and inner functions; what is defined outermost, and methods, count.

A flag is no proof. A body of a few statements is often written in the same way by two people: the
number of statements is in the flag.
"""

import ast
from collections import defaultdict
from itertools import chain
from pathlib import Path

from exercises.exercise import load
from exercises.source import Definition, solution


def flag_copies(rows: list[dict], tasks: list[tuple[Path, tuple]]) -> None:
    """Add `flags` to rows of exercises whose file is equal to the course's, or to others' files."""
    by_shape = defaultdict(list)
    for row, (student, task) in zip(rows, tasks, strict=True):
        found = sorted(student.glob(task.files)) if task.kind == "exercise" else []
        if len(found) == 1 and row["mistake"] not in ("not_written", "no_plain_file"):
            shape, statements = shape_of(found[0].read_text(errors="replace"))
            by_shape[task.number, shape, statements].append(row)
    for (number, shape, statements), equal in by_shape.items():
        own = ["as the course's own"] * (shape == shape_of(solution(load(number)))[0])
        for row in equal if shape else ():
            others = [other["student"] for other in equal if other is not row]
            if texts := own + [f"equal to {', '.join(others)}"] * bool(others):
                row["flags"] = f"{'; '.join(texts)} ({statements} statements)"


def shape_of(text: str) -> tuple[str, int]:
    """The definitions of a file without names of variables, and how many statements they have."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return "", 0
    nodes = [node for node in tree.body if isinstance(node, Definition)]
    statements = sum(isinstance(n, ast.stmt) for node in nodes for n in ast.walk(node))
    return "\n".join(sorted(_plain(node) for node in nodes)), statements


class _Unannotated(ast.NodeTransformer):
    """Assignments without annotations."""

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.stmt:
        return ast.Assign([node.target], node.value) if node.value else node


def _plain(definition: ast.AST) -> str:
    nodes, names = [*ast.walk(_Unannotated().visit(definition))], {}
    inner = chain(*([*ast.walk(f)][1:] for f in nodes if isinstance(f, ast.FunctionDef)))
    bound = {n.arg for n in nodes if isinstance(n, ast.arg)}
    bound |= {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    bound |= {n.name for n in inner if isinstance(n, ast.FunctionDef)}
    for node in nodes:
        node.returns = node.annotation = None
        if isinstance(node, Definition):
            node.body = node.body[bool(ast.get_docstring(node)) :]
        field = {ast.arg: "arg", ast.Name: "id", ast.FunctionDef: "name"}.get(type(node))
        if field and (name := getattr(node, field)) in bound:
            setattr(node, field, names.setdefault(name, f"v{len(names)}"))
    return ast.dump(definition)
