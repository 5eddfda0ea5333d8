"""Put changed code into the course while it is imported: a student's definition, or an edit.

    def ring(...):              ring = _replacement("ring")     runs the student's code, which sees
        ...                ->                                   the names of the module around it

So classes that contain the target, tables that list it, and modules that import it all get the
student's version, and a traceback has the lines of its file.
"""

import __future__

import ast
import contextlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
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
    # What else holds functions of the course is imported anew, too.
    course = "picotron_min", "train", "difference"
    names = [n for n in sys.modules if n.partition(".")[0] in course]
    return {name: sys.modules.pop(name) for name in names}


def import_edited(file: Path, old: str, new: str) -> None:
    """Import a file with a text, which it has once, replaced."""
    code = compile(file.read_text().replace(old, new), str(file), "exec")
    _import(file, lambda module: exec(code, module.__dict__))


class Names(dict):
    """What a student's code sees: its own names, and behind them those of the course's module.

    So a helper may have any name: the module never sees it.
    """

    def __missing__(self, name: str) -> Any:  # what the module defines further down
        return vars(sys.modules[self["__name__"]])[name]


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
    # What a starter imports of the module itself, for editors, is not all there yet.
    body = [n for n in tree.body if getattr(n, "module", "") != exercise.source_module]
    # Annotations are not evaluated: they may use what is defined further down.
    flag = __future__.annotations.compiler_flag
    code = compile(ast.Module(body, []), str(path), "exec", flag)

    def fill(module: ModuleType) -> None:
        def defined(name: str) -> Any:
            exec(code, names := Names(module.__dict__))
            return watch(names[name])

        module.__dict__[FUNCTION] = defined
        exec(compile(text, module.__file__, "exec"), module.__dict__)

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
