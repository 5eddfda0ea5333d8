"""What an exercise is: a function of the course, cases to try it on, gates, and known mistakes.

Each file `e07_overlap.py` in this folder is one: its number and name are the file's. What is
to be written stands in its docstring, the sheet. CONTRIBUTING.md explains how to write one.
"""

import ast
import hashlib
import importlib
import json
import random
import re
import textwrap
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from symtable import symtable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:  # torch takes seconds to import, and the list of exercises does not need it
    from torch import Tensor

ROOT = Path(__file__).parents[1]  # of the course
FOLDER = ROOT / "exercises"  # of what a student writes: a class has another one, see launch.py
GATES = {"V": "value", "B": "bytes", "M": "memory", "O": "order"}
GATE_OF = {"expected": "V", "traffic": "B", "memory": "M", "order": "O", "ORDER": "O"}
FUNCTIONS = {"cases", "on_rank", *GATE_OF, "ORDER"}
Dice = random.Random


class Case(SimpleNamespace):
    """One situation that a function is tried in: a number of ranks, and whatever else varies."""

    def __init__(self, ranks: int, **sizes: Any) -> None:
        super().__init__(ranks=ranks, **sizes)

    def __hash__(self) -> int:
        return hash(str(sorted(vars(self).items())))

    def __str__(self) -> str:
        """The sizes that a reader can use: "2 ranks, length=6"."""
        sizes = [f"{key}={value}" for key, value in sizes_of(self).items()]
        return ", ".join([f"{self.ranks} ranks", *sizes] if self.ranks > 1 else sizes)


def sizes_of(case: Case) -> dict[str, Any]:
    return {key: value for key, value in vars(case).items() if key not in ("ranks", "seed")}


class Sent(NamedTuple):
    """What a rank sends by one kind of operation in a case."""

    calls: int | None  # None: any number
    bytes: float  # algorithmic, as in collectives.py


def together(sends: Iterable[tuple[str, Sent]]) -> dict[str, Sent]:
    """All that is sent under a name, added up."""
    found: dict[str, Sent] = {}
    for what, (calls, size) in sends:
        before = found.get(what, Sent(0, 0.0))
        found[what] = Sent(None if calls is None else before.calls + calls, before.bytes + size)
    return found


class Verdict(NamedTuple):
    """The result of a check; only text and numbers, since it is written to a file."""

    passed: bool
    gates: dict[str, str]  # gate -> "" if passed, what is wrong, or "not checked"
    mistake: str  # the name of a known mistake, or of a kind: unknown, pattern, exception, ...
    message: str
    picture: str = ""
    printed: str = ""  # by the student's code


class Mistake(NamedTuple):
    """A known mistake, as edits of the course's text: (what stands there once, what instead)."""

    name: str
    sentence: str
    edits: list[tuple[list[str] | str, list[str] | str]]  # lists of whole lines, or words of one

    def apply(self, source: str) -> str:
        for old, new in self.edits:
            found = [*re.finditer(_pattern(old), source, re.M)]
            assert len(found) == 1, f"{self.name}: the source has {old!r} {len(found)} times"
            if isinstance(new, list):
                new = textwrap.indent("\n".join(new), found[0][1])
            source = source[: found[0].start()] + new + source[found[0].end() :]
        return source


def _pattern(old: list[str] | str) -> str:
    """Lines are found with any indentation, which all of them have, and comments at their ends."""
    if isinstance(old, str):
        return re.escape(old)
    return r"^( *)" + r"\n\1".join(rf"{re.escape(line)}(?:  #.*)?$" for line in old)


def mistakes_in(text: str) -> list[Mistake]:
    """What stands in MISTAKES: `name: sentence`, then edits: `old => new`, or - and + lines."""
    found: list[Mistake] = []
    before = ""
    for line in text.strip("\n").splitlines():
        if head := re.match(r"(\w+):(?: (.*))?$", line):
            found.append(Mistake(*head.groups(), []))
        elif line[0] in "-+":
            if line[0] == "-" != before[0]:
                found[-1].edits.append(([], []))
            found[-1].edits[-1]["-+".index(line[0])].append(line[2:])
        elif edit := re.match(r" +(.*?) =>(?: (.*))?$", line):
            found[-1].edits.append((edit[1], edit[2] or ""))
        else:
            found[-1] = found[-1]._replace(sentence=f"{found[-1].sentence} {line.strip()}")
        before = line
    return found


class Exercise:
    """One exercise, by its file, whose functions are imported when one is first used.

    CONTRIBUTING.md says what each of FUNCTIONS does; one that a file does not have is None.
    """

    def __init__(self, path: Path) -> None:
        self.stem, text = path.stem, path.read_text()
        number, _, self.name = path.stem.partition("_")
        self.number = int(number[1:])
        tree = ast.parse(text)
        about, _, sheet = ast.get_docstring(tree).partition("\n\ntarget: ")
        self.title = about.partition("\n")[0]
        head, _, sheet = f"target: {sheet}".partition("\n\n")
        head = dict(line.split(": ", 1) for line in head.replace("\n  ", " ").splitlines())
        self.target = head["target"]  # "collectives:Shift.__init__"
        self.train = head.get("train", "")  # settings with which the real training uses it
        # What is to be written; hints: what is wanted, with which names, how; what to remember.
        self.task, *marked = re.split(r"\n+(?=[?!] )", sheet)
        *self.hints, self.remember = [" ".join(text[2:].split()) for text in marked]
        defined = {symbol.get_name() for symbol in symtable(text, "", "exec").get_symbols()}
        self.gates = [*dict.fromkeys(gate for name, gate in GATE_OF.items() if name in defined)]
        assigned = (node for node in tree.body if isinstance(node, ast.Assign))
        values = {ast.unparse(node.targets[0]): node.value for node in assigned}
        self.mistakes = mistakes_in(values["MISTAKES"].value)

    def __getattr__(self, name: str) -> Any:
        if name not in FUNCTIONS:
            raise AttributeError(name)
        return _function(self.stem, name)

    def factors(self, case: Case) -> dict[str, float]:
        """Numbers that a result may be too large or too small by, with their names."""
        layout = getattr(case, "layout", {})
        numbers = {"the number of ranks": case.ranks} | sizes_of(case) | layout
        return {name: n for name, n in numbers.items() if type(n) in (int, float)}

    @property
    def source_module(self) -> str:  # of the target
        return f"picotron_min.{self.target.partition(':')[0]}"

    @property
    def qualified_name(self) -> str:
        return self.target.partition(":")[2]

    def changed(self, config: dict[str, dict]) -> dict[str, dict]:
        """A training config with what this exercise needs, so that its function is used."""
        config = {section: dict(keys) for section, keys in config.items()}
        for section, key, value in re.findall(r"(\w+)\.(\w+)=(\S+)", self.train):
            config.setdefault(section, {})[key] = json.loads(value)
        return config

    def seeded_cases(self, seed: int) -> list[Case]:
        cases = self.cases(Dice(f"{seed} {self.name}"))
        for case in cases:
            case.seed = seed
        return cases


@cache
def _function(stem: str, name: str) -> Any:
    function = getattr(importlib.import_module(f"exercises.{stem}"), name, None)
    # What a case expects is the same for all versions of a function: nobody may change it.
    return cache(function) if name == "expected" else function


def draw(case: Case, *key: object, shape: Sequence[int]) -> "Tensor":
    """Normal numbers in float64 that depend on the case's seed and on the key, and nothing else."""
    import torch

    digest = hashlib.sha256(repr((case.seed, key, tuple(shape))).encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little"))
    return torch.randn(tuple(shape), dtype=torch.float64, generator=generator)


def files() -> dict[int, Path]:
    """The file of each exercise, by number."""
    paths = (ROOT / "exercises").glob("e[0-9][0-9]_*.py")
    return {int(path.stem[1:3]): path for path in sorted(paths)}


def load(number: int) -> Exercise:
    """The exercise with this number; ValueError if there is none."""
    there = files()
    if number not in there:
        numbers = ", ".join(f"{n:02}" for n in there)
        raise ValueError(f"there is no exercise {number:02}: use one of {numbers}")
    return Exercise(there[number])
