"""The text of a target: found in the course by its name, emptied for a student, checked again.

Nothing marks the targets in the course. A starter is made from what the source is today, so the two
cannot drift apart.
"""

import ast
import builtins
import textwrap
from pathlib import Path
from symtable import symtable
from typing import NamedTuple

from exercises.exercise import FOLDER, GATES, ROOT, Exercise

COURSE = ROOT / "picotron_min"
NOT_WRITTEN = "raise NotImplementedError"
# Names that an exercise never needs. They are refused to catch accidents, not attackers.
REFUSED_MODULES = (  # separated by blanks, as the names
    "os sys subprocess socket shutil pathlib signal ctypes importlib builtins multiprocessing "
    "threading pickle requests exercises inspect gc io tempfile urllib http asyncio"
)
REFUSED_NAMES = (
    "open exec eval compile __import__ globals locals vars input breakpoint exit quit "
    "__builtins__ __loader__"
)


class BadFile(ValueError):
    """A student's file cannot be used; the message is for the student."""


Definition = ast.FunctionDef | ast.ClassDef


class Target(NamedTuple):
    """A definition in the course, and the file around it."""

    path: Path
    tree: ast.Module
    node: Definition
    first: int  # line in the file, of its decorators where there are some
    text: str  # from there on, not indented

    def replaced(self, text: str, new: str) -> str:
        """The file's text with another definition, which is not indented, in this one's place."""
        lines, margin = text.splitlines(), " " * self.node.col_offset
        lines[self.first - 1 : self.node.end_lineno] = [textwrap.indent(new, margin).rstrip()]
        return "\n".join(lines) + "\n"


def course_file(exercise: Exercise) -> Path:
    return ROOT / f"{exercise.source_module.replace('.', '/')}.py"


def find(exercise: Exercise) -> Target:
    path = course_file(exercise)
    return target_in(path.read_text(), exercise.qualified_name, path)


def target_in(source: str, qualified_name: str, path: Path) -> Target:
    tree = ast.parse(source, str(path))
    node = lookup(tree, qualified_name)
    first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
    lines = source.splitlines()[first - 1 : node.end_lineno]
    return Target(path, tree, node, first, textwrap.dedent("\n".join(lines)) + "\n")


def lookup(tree: ast.Module, qualified_name: str) -> Definition:
    """The one definition with this name; ValueError if there is not exactly one."""
    node = tree
    for part in qualified_name.split("."):
        (node,) = (n for n in node.body if isinstance(n, Definition) and n.name == part)
    return node


def solution(exercise: Exercise) -> str:
    """The file of a student who has copied the source."""
    target = find(exercise)
    return f"{_imports(exercise, target)}\n\n{target.text}"


def starter(exercise: Exercise) -> str:
    """What a student begins with: task, imports, signature and docstring, and no body."""
    target = find(exercise)
    gates = ", ".join(f"{gate} {GATES[gate]}" for gate in exercise.gates)
    read = target.path.relative_to(ROOT)
    comment = [exercise.title, "", *exercise.task.splitlines(), ""]
    comment += [f"It replaces {exercise.qualified_name} in {read}. Gates: {gates}.", ""]
    comment += [f"    python -m exercises check {exercise.number:02}"]
    header = "\n".join(f"# {line}".rstrip() for line in comment)
    return f"{header}\n\n{_imports(exercise, target)}\n\n{emptied(target)}"


def reading(exercise: Exercise) -> str:
    """The file of the target, without the solution."""
    # As a class has it, where other bodies may be missing, too.
    path = FOLDER.parent / course_file(exercise).relative_to(ROOT)
    target = target_in(path.read_text(), exercise.qualified_name, path)
    return target.replaced(path.read_text(), emptied(target))


def emptied(target: Target) -> str:
    node, lines = ast.parse(target.text).body[0], target.text.splitlines()
    # A function within a function goes with the body of the outer one.
    outer = [node] if isinstance(node, ast.FunctionDef) else node.body
    functions = [n for n in outer if isinstance(n, ast.FunctionDef)]
    for function in reversed(functions):  # so that the line numbers of those before stay right
        first = function.body[0]
        last = first.end_lineno if ast.get_docstring(function) else first.lineno - 1
        # Comments between signature and body would give hints away.
        while last < first.lineno and lines[last - 1].lstrip().startswith("#"):
            last -= 1
        lines[last : function.end_lineno] = [" " * first.col_offset + NOT_WRITTEN]
    return "\n".join(lines) + "\n"


def _imports(exercise: Exercise, target: Target) -> str:
    """Imports of all names of the module that the definition uses, so that an editor knows them."""
    used = {n.id for n in ast.walk(target.node) if isinstance(n, ast.Name)}
    lines, symbols = [], symtable(target.path.read_text(), "", "exec").get_symbols()
    for node in target.tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            node.names = [a for a in node.names if (a.asname or a.name.partition(".")[0]) in used]
            lines += [ast.unparse(node)] if node.names else []
    own = {symbol.get_name() for symbol in symbols if not symbol.is_imported()}
    if own := sorted(own & used - {exercise.qualified_name} - vars(builtins).keys()):
        lines.append(f"from {exercise.source_module} import {', '.join(own)}")
    return "\n".join(lines)


def parse(exercise: Exercise, text: str) -> ast.Module:
    """A student's file as a tree; BadFile in plain words where it cannot be used."""
    tree = parse_checked(text)
    name = exercise.qualified_name.rpartition(".")[2]
    if name not in [n.name for n in tree.body if isinstance(n, Definition)]:
        raise BadFile(f"the file does not define {name}: it must, at the top level")
    return tree


def parse_checked(text: str) -> ast.Module:
    """Python without refused names as a tree; BadFile for all else."""
    try:
        compile(tree := ast.parse(text), "", "exec")  # which finds a `return` outside a function
    except (SyntaxError, ValueError) as error:  # a null byte
        line = getattr(error, "lineno", None) or 1
        raise BadFile(f"line {line} is not Python: {getattr(error, 'msg', error)}") from None
    for node in ast.walk(tree):
        if problem := _refused(node):
            line = getattr(node, "lineno", 0)
            raise BadFile(f"line {line}: {problem} is refused: no exercise needs it")
    return tree


def _refused(node: ast.AST) -> str:
    if isinstance(node, ast.Name):
        return node.id if node.id in REFUSED_NAMES.split() else ""
    # Of `import os`, `from os import path` and `torch.os`.
    modules = (getattr(node, key, None) or "" for key in ("name", "module", "attr"))
    return next((m for m in modules if m.partition(".")[0] in REFUSED_MODULES.split()), "")
