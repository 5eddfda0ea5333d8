"""The tree of a class: what a checker needs of the course, where bodies are taken out of it.

`handout` empties functions in picotron_min/ and packs the whole texts of these files into
exercises/sealed.txt: a check of one exercise runs all other functions, and the known mistakes.

Packed is not secret: it keeps an answer from being read by accident, or found by a search. Whoever
unpacks it has the answers. Standard library only: the list of exercises reads it.
"""

import ast
import base64
import importlib.abc
import importlib.machinery
import importlib.util
import json
import linecache
import re
import sys
import zlib
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).parents[1]
FILE = ROOT / "exercises/sealed.txt"
WARNING = "Packed texts of the course, for the checker. Unpacking them is looking up the answers."


@cache
def sealed() -> dict[str, str]:
    """Whole texts by the file's path in the tree; none outside of a handout."""
    return unpack(FILE.read_text()) if FILE.exists() else {}


def unpack(text: str) -> dict[str, str]:
    return json.loads(zlib.decompress(base64.b64decode(text.removeprefix(WARNING))))


def pack(texts: dict[str, str]) -> str:
    packed = base64.b64encode(zlib.compress(json.dumps(texts).encode(), 9)).decode()
    return "\n".join([WARNING, *re.findall(".{1,100}", packed)]) + "\n"


def text_of(path: Path) -> str:
    """The whole text of a file, also where the tree has it without bodies."""
    key = path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else ""
    return sealed().get(key) or path.read_text()


class Importer(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports modules of some files, by path in the tree, by a function that fills them."""

    def __init__(self, files: Iterable[str], fill: Callable[[ModuleType], None]) -> None:
        self.files, self.exec_module = {*files}, fill

    def find_spec(self, name: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        # A module that is run as a script (python -m) is not found by this way, and has no target.
        if (file := f"{name.replace('.', '/')}.py") in self.files:
            return importlib.util.spec_from_file_location(name, ROOT / file, loader=self)
        return None


def run_whole(module: ModuleType) -> None:
    """Run the whole text of a module's file."""
    path = Path(module.__file__)
    lines = text_of(path).splitlines(keepends=True)
    linecache.cache[str(path)] = (1, None, lines, str(path))  # for tracebacks
    exec(compile("".join(lines), str(path), "exec"), module.__dict__)


def install() -> None:
    """From now on this process imports whole texts: to be called by commands, first of all."""
    if sealed():
        sys.meta_path.insert(0, Importer(sealed(), run_whole))


def without_answers(text: str) -> str:
    """The file of an exercise, or of hunts, without its texts: known mistakes, another version."""
    lines = text.splitlines()
    for node in reversed(ast.parse(text).body):
        if isinstance(node, ast.Assign) and "\n" in str(getattr(node.value, "value", "")):
            lines[node.lineno - 1 : node.end_lineno] = []
    return "\n".join(lines).rstrip() + "\n"


def lines_in(text: str, least: int = 30) -> set[str]:
    """The lines of a text that are long enough to be recognised elsewhere."""
    return {line for line in map(str.strip, text.splitlines()) if len(line) >= least}
