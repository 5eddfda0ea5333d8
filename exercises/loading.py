"""Put a student's definition into the real package, in place of the course's own.

    def ring(...):              ring = _replacement("ring")     runs the student's code, which sees
        ...                ->                                   the names of the module around it

The module is changed as a syntax tree while it is imported. So classes that contain the target,
tables that list it, and modules that import it all get the student's version, and a traceback has
the lines of the student's file.
"""

import ast
import contextlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from exercises import source
from exercises.exercise import Exercise

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
    tops = source.COURSE.parent / f"{name}.py", source.COURSE / f"{name}.py"  # train.py is outside
    found = [file for file in tops if file.exists()] or [*source.COURSE.rglob(f"{name}.py")]
    if len(found) != 1:
        raise AttributeError(f"the course has {len(found)} files {name}.py, not one")
    return ".".join(found[0].relative_to(source.COURSE.parent).with_suffix("").parts)


@contextlib.contextmanager
def course_with(exercise: Exercise, text: str, path: Path, watch: Watch) -> Iterator[Course]:
    """Within, the course is imported anew, with the definition that a student's file has.

    BadFile where the file cannot be used; whatever its own code raises when it is imported.
    """
    tree = source.parse(exercise, text)
    with fresh_modules(), imported_with(exercise, tree, path, watch):
        importlib.import_module(exercise.source_module)
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


@contextlib.contextmanager
def asked_first(finder: importlib.abc.MetaPathFinder) -> Iterator[None]:
    """Within, imports ask this finder before all others."""
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


def imported_with(
    exercise: Exercise, tree: ast.Module, path: Path, watch: Watch = lambda definition: definition
) -> contextlib.AbstractContextManager[None]:
    """Within, an import of the target's module gets the definition in the student's tree."""
    return asked_first(Finder(exercise, tree, path, watch))


class Finder(importlib.abc.MetaPathFinder):
    """Finds the one module that is to be changed; all others are found as usual."""

    def __init__(self, exercise: Exercise, tree: ast.Module, path: Path, watch: Watch) -> None:
        self.exercise, self.student = exercise, (tree, path, watch)

    def find_spec(self, name: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        # A module that is run as a script (python -m) is not found by this way, and has no target.
        if name != self.exercise.source_module:
            return None
        changed = Loader(self.exercise, *self.student)
        return importlib.util.spec_from_file_location(
            name, source.course_file(self.exercise), loader=changed
        )


class Loader(importlib.machinery.SourceFileLoader):
    def __init__(self, exercise: Exercise, tree: ast.Module, path: Path, watch: Watch) -> None:
        super().__init__(exercise.source_module, str(source.course_file(exercise)))
        self.exercise, self.tree, self.student, self.watch = exercise, tree, path, watch

    def get_code(self, fullname: str) -> Any:  # not from a cache of bytecode, and not into one
        tree = ast.parse(self.get_data(self.path))
        target = source.lookup(tree, self.exercise.qualified_name)
        call = ast.parse(f"{target.name} = {FUNCTION}({target.name!r})").body[0]
        for parent in ast.walk(tree):
            if isinstance(parent, ast.Module | ast.ClassDef) and target in parent.body:
                place = parent.body.index(target)
                parent.body[place] = ast.fix_missing_locations(ast.copy_location(call, target))
        return compile(tree, self.path, "exec")

    def exec_module(self, module: ModuleType) -> None:
        define = _definer(module, self.tree, self.student, self.exercise)
        module.__dict__[FUNCTION] = lambda name: self.watch(define(name))
        super().exec_module(module)
        _add_helpers(module, self.tree, self.student, self.exercise)


def _definer(
    module: ModuleType, tree: ast.Module, path: Path, exercise: Exercise
) -> Callable[[str], Any]:
    """A function that runs the student's imports, and the definition with a name, in a module."""

    def define(name: str) -> Any:
        imports = [node for node in tree.body if _is_foreign_import(node)]
        _run(imports, path, module.__dict__, found := {})
        for key, value in found.items():  # not over what the course calls by this name
            if module.__dict__.setdefault(key, value) is not value:
                where = exercise.source_module
                raise source.BadFile(
                    f"{key} is another thing in {where}: import it by another name"
                )
        definitions = [n for n in tree.body if isinstance(n, source.Definition) and n.name == name]
        _run(definitions[-1:], path, module.__dict__, found)
        return found[name]

    return define


def _add_helpers(module: ModuleType, tree: ast.Module, path: Path, exercise: Exercise) -> None:
    """Put all else that the student's file defines among the names of the module."""
    own = exercise.qualified_name.rpartition(".")[2]
    rest = [n for n in tree.body if not isinstance(n, ast.Import | ast.ImportFrom)]
    rest = [n for n in rest if getattr(n, "name", None) != own]
    _run(rest, path, module.__dict__, helpers := {})
    if taken := sorted(helpers.keys() & module.__dict__.keys()):
        where = f"{exercise.source_module} has its own {taken[0]}"
        raise source.BadFile(f"{where}: give the helper another name")
    module.__dict__.update(helpers)


def _is_foreign_import(node: ast.AST) -> bool:
    # Names of the course are those of the module itself: an import could go round in a circle.
    if isinstance(node, ast.Import):
        return not any(alias.name.startswith("picotron_min") for alias in node.names)
    return isinstance(node, ast.ImportFrom) and not node.module.startswith("picotron_min")


def _run(nodes: list[ast.stmt], path: Path, names: dict, into: dict) -> None:
    module = ast.Module(nodes, type_ignores=[])
    exec(compile(module, str(path), "exec"), names, into)


def edited(changes: dict[str, tuple[str, str]]) -> contextlib.AbstractContextManager[None]:
    """Within, files are imported with a text, which each has once, replaced: {file: (old, new)}."""
    return asked_first(EditedFinder(changes))


class EditedFinder(importlib.abc.MetaPathFinder):
    def __init__(self, changes: dict[str, tuple[str, str]]) -> None:
        self.changes = {f.removesuffix(".py").replace("/", "."): (f, c) for f, c in changes.items()}

    def find_spec(self, name: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        if name not in self.changes:
            return None
        file, change = self.changes[name]
        path = source.COURSE.parent / file
        loader = EditedLoader(name, str(path), change)
        return importlib.util.spec_from_file_location(name, path, loader=loader)


class EditedLoader(importlib.machinery.SourceFileLoader):
    def __init__(self, name: str, path: str, change: tuple[str, str]) -> None:
        super().__init__(name, path)
        self.change = change

    def get_code(self, fullname: str) -> Any:  # not from a cache of bytecode, and not into one
        text, (old, new) = self.get_data(self.path).decode(), self.change
        assert text.count(old) == 1, f"{fullname} has {old!r} {text.count(old)} times, not once"
        return compile(text.replace(old, new), self.path, "exec")
