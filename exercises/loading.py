"""Put changed code into the course while it is imported: a student's definition, or an edit.

    def ring(...):              ring = _replacement("ring")     runs the student's code, which sees
        ...                ->                                   the names of the module around it

So classes that contain the target, tables that list it, and modules that import it all get the
student's version, and a traceback has the lines of its file.
"""

import ast
import contextlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from symtable import Symbol, symtable
from types import ModuleType
from typing import Any

from exercises import source
from exercises.exercise import ROOT, Exercise

FUNCTION = "_replacement"  # what the changed module calls to get the student's definition
Watch = Callable[[Any], Any]  # a definition -> one that does the same, and is watched


class Course:
    """The modules of a loaded course, by their files' names.

    `course.mesh` is picotron_min/mesh.py, `course.ring` picotron_min/extensions/overlap/ring.py.
    """

    def __getattr__(self, name: str) -> ModuleType:
        return importlib.import_module(module_of(name))


@cache
def module_of(name: str) -> str:
    """The module in a file with this name: at the top of the course, or in the only such folder."""
    tops = ROOT / f"{name}.py", source.COURSE / f"{name}.py"  # train.py is outside
    found = [file for file in tops if file.exists()] or [*source.COURSE.rglob(f"{name}.py")]
    if len(found) != 1:
        raise AttributeError(f"the course has {len(found)} files {name}.py, not one")
    return ".".join(found[0].relative_to(ROOT).with_suffix("").parts)


@contextlib.contextmanager
def course_with(exercise: Exercise, text: str, path: Path, watch: Watch) -> Iterator[Course]:
    """Within, the course is imported anew, with the definition that a student's file has.

    BadFile where the file cannot be used; whatever its own code raises when it is imported.
    """
    tree = source.parse(exercise, text)
    with fresh_modules():
        import_with(exercise, tree, path, watch)
        yield Course()


@contextlib.contextmanager
def fresh_modules() -> Iterator[None]:
    """Within, the course's modules are imported anew; afterwards those from before are back."""
    before = _take_modules()
    try:
        yield
    finally:
        _take_modules()
        sys.modules.update(before)


def _take_modules() -> dict[str, ModuleType]:
    names = [n for n in sys.modules if n.partition(".")[0] in ("picotron_min", "train")]
    return {name: sys.modules.pop(name) for name in names}


def import_edited(file: Path, old: str, new: str) -> None:
    """Import a file with a text, which it has once, replaced."""
    text = file.read_text()
    assert text.count(old) == 1, f"{file} has {old!r} {text.count(old)} times, not once"
    code = compile(text.replace(old, new), str(file), "exec")
    _import(file, lambda module: exec(code, module.__dict__))


def import_with(
    exercise: Exercise,
    tree: ast.Module,
    path: Path,
    watch: Watch = lambda definition: definition,
) -> None:
    """Import the target's module with the definition in the student's tree."""
    target, where = source.find(exercise), exercise.source_module
    call = f"{target.node.name} = {FUNCTION}({target.node.name!r})"
    call += "\n#" * (target.node.end_lineno - target.first)  # so that lines keep their numbers
    text = target.replaced(target.path.read_text(), call)
    *_, own = (n for n in tree.body if getattr(n, "name", "") == target.node.name)
    own_names = {symbol.get_name() for symbol in _symbols(ast.unparse(tree), is_imported=False)}
    for taken in sorted(own_names & {symbol.get_name() for symbol in _symbols(text)}):
        if taken != own.name:
            problem = f"{where} has its own {taken}: give the helper another name"
            raise source.BadFile(problem)

    def fill(module: ModuleType) -> None:
        names, done = module.__dict__, set()

        def run(nodes: list[ast.stmt], ignored: tuple = ()) -> None:
            for node in (n for n in nodes if n not in done and n is not own):
                with contextlib.suppress(*ignored):
                    made = _made(node, path, names)
                    is_import = isinstance(node, ast.Import | ast.ImportFrom)
                    for key, value in made.items() if is_import else ():
                        if names.setdefault(key, value) is not value:
                            what = f"{key} is another thing in {where}: import it by another name"
                            raise source.BadFile(what)
                    names.update(made)
                    done.add(node)

        def defined(name: str) -> Any:
            # What the module defines further down is not there yet, nor what imports it: later.
            run(tree.body[: tree.body.index(own)], ignored=(NameError, ImportError))
            return watch(_made(own, path, names)[name])

        names[FUNCTION] = defined
        exec(compile(text, module.__file__, "exec"), names)
        run(tree.body)

    _import(target.path, fill)


def _symbols(text: str, is_imported: bool = True) -> Iterator[Symbol]:
    """Names that a file defines at its top level, or imports."""
    for symbol in symtable(text, "", "exec").get_symbols():
        if symbol.is_assigned() or (is_imported and symbol.is_imported()):
            yield symbol


def _made(node: ast.stmt, path: Path, names: dict[str, Any]) -> dict[str, Any]:
    """What a statement of the student's defines, which sees the names."""
    exec(compile(ast.Module([node], type_ignores=[]), str(path), "exec"), names, found := {})
    return found


def _import(file: Path, fill: Callable[[ModuleType], None]) -> None:
    """Import the module of a file, which a function fills: whoever imports it later gets this."""
    name = ".".join(file.relative_to(ROOT).with_suffix("").parts)
    spec = importlib.util.find_spec(name)  # imports the packages that it is in
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    fill(module)
    package, _, attribute = name.rpartition(".")
    if package:
        setattr(sys.modules[package], attribute, module)
