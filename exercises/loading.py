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
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
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
    target = source.find(exercise)
    call = f"{target.node.name} = {FUNCTION}({target.node.name!r})"
    call += "\n#" * (target.node.end_lineno - target.first)  # so that lines keep their numbers
    text = target.replaced(target.path.read_text(), call)

    def fill(module: ModuleType) -> None:
        names, helpers = module.__dict__, {}

        def defined(name: str) -> Any:
            return watch(_defined(name, tree, path, names, helpers, exercise))

        names[FUNCTION] = defined
        exec(compile(text, module.__file__, "exec"), names)
        _add_imports(tree, path, names, exercise)
        _add_helpers(tree.body, path, names, helpers, exercise)
        made = {key: value for found in helpers.values() for key, value in found.items()}
        _refuse([key for key in made if names[key] is not made[key]], exercise)

    _import(target.path, fill)


def _import(file: Path, fill: Callable[[ModuleType], None]) -> None:
    """Import the module of a file, which a function fills: whoever imports it later gets this."""
    name = ".".join(file.relative_to(ROOT).with_suffix("").parts)
    spec = importlib.util.find_spec(name)  # imports the packages that it is in
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    fill(module)
    package, _, attribute = name.rpartition(".")
    if package:
        setattr(sys.modules[package], attribute, module)


def _defined(
    name: str, tree: ast.Module, path: Path, names: dict, helpers: dict, exercise: Exercise
) -> Any:
    """Run the student's definition, and all before it, among the names of the module."""
    # A module that imports this one cannot be imported yet, nor can this one itself: later.
    _add_imports(tree, path, names, exercise, ignored=ImportError)
    target = [n for n in tree.body if isinstance(n, source.Definition) and n.name == name][-1]
    before = tree.body[: tree.body.index(target)]
    # What the module defines further down is not there yet.
    _add_helpers(before, path, names, helpers, exercise, ignored=NameError)
    return _run([target], path, names)[name]


def _add_imports(
    tree: ast.Module, path: Path, names: dict, exercise: Exercise, ignored: type | tuple = ()
) -> None:
    for node in (n for n in tree.body if isinstance(n, ast.Import | ast.ImportFrom)):
        with contextlib.suppress(ignored):
            for key, value in _run([node], path, names).items():
                if names.setdefault(key, value) is not value:  # the course calls another thing so
                    where = exercise.source_module
                    what = f"{key} is another thing in {where}: import it by another name"
                    raise source.BadFile(what)


def _add_helpers(
    nodes: list[ast.stmt],
    path: Path,
    names: dict,
    helpers: dict[ast.stmt, dict[str, Any]],
    exercise: Exercise,
    ignored: type | tuple = (),
) -> None:
    """Put all else that the student's file defines among the names of the module, each once."""
    own = exercise.qualified_name.rpartition(".")[2]
    for node in nodes:
        is_import = isinstance(node, ast.Import | ast.ImportFrom)
        if is_import or getattr(node, "name", None) == own or node in helpers:
            continue
        with contextlib.suppress(ignored):
            found = _run([node], path, names)
            mine = {key for earlier in helpers.values() for key in earlier}
            _refuse(found.keys() & names.keys() - mine, exercise)
            helpers[node] = found
            names.update(found)


def _refuse(taken: Iterable[str], exercise: Exercise) -> None:
    if taken := sorted(taken):
        where = f"{exercise.source_module} has its own {taken[0]}"
        raise source.BadFile(f"{where}: give the helper another name")


def _run(nodes: list[ast.stmt], path: Path, names: dict) -> dict[str, Any]:
    """What the statements define, each of which sees the names and what was defined before."""
    exec(compile(ast.Module([*nodes], type_ignores=[]), str(path), "exec"), names, found := {})
    return found
