"""What an exercise is: a function of the course, cases to try it on, gates, and known mistakes.

Each file `e07_overlap.py` in this folder ends with `EXERCISE = Exercise(__name__, ...)`: its number
and name are those of the file. CONTRIBUTING.md explains how to write one.
"""

import hashlib
import importlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:  # torch takes seconds to import, and the list of exercises does not need it
    from torch import Tensor

    from exercises.ranks import Rank, Record

FOLDER = Path(__file__).parent
GATES = {"V": "value", "B": "bytes", "M": "memory", "O": "order"}


class Case(SimpleNamespace):
    """One situation that a function is tried in: a number of ranks, and whatever else varies."""

    def __init__(self, ranks: int, **sizes: Any) -> None:
        super().__init__(ranks=ranks, **sizes)

    def __str__(self) -> str:
        """The sizes that a reader can use: "2 ranks, length=6"."""
        sizes = [f"{key}={value}" for key, value in vars(self).items() if key not in HIDDEN]
        ranks = [f"{self.ranks} rank{'s' * (self.ranks > 1)}"]
        if self.ranks == 1 and AXES & vars(self).keys():  # a function that is called for each rank
            ranks = []
        return ", ".join([*ranks, *sizes])


HIDDEN = ("ranks", "seed")
AXES = {"dp", "pp", "cp", "tp", "ep", "stages"}


class Sent(NamedTuple):
    """What a rank sends by one kind of operation in a case."""

    calls: int
    bytes: float  # algorithmic, as in collectives.py


class Wrong:
    """A known mistake: the source with `old`, which it has once, replaced by `new`; and so on."""

    def __init__(self, name: str, sentence: str, *edits: str) -> None:
        assert edits and len(edits) % 2 == 0, f"{name}: old, new, old, new, ..."
        self.name, self.sentence = name, sentence
        self.edits = list(zip(edits[::2], edits[1::2], strict=True))

    def apply(self, source: str) -> str:
        for old, new in self.edits:
            times = source.count(old)
            assert times == 1, f"{self.name}: the source has {old!r} {times} times, not once"
            source = source.replace(old, new)
        return source


@dataclass(frozen=True)
class Exercise:
    """One exercise. Gates V, B, M, O are `expected`, `traffic`, `memory`, `order`."""

    module: str  # __name__ of its file
    target: str  # "collectives:Shift.__init__"
    task: str  # what is to be written, in a few lines
    hints: tuple[str, str, str]  # what is wanted; with which names; how, in words
    cases: Callable[[random.Random], list[Case]]
    # What each rank does in a case, by name: numbers, tensors, lists. Run in the student's version.
    on_rank: Callable[["Rank", Case], dict[str, Any]]
    # The same names by an obvious slow way, for each rank. Never by the course's own function.
    expected: Callable[[Case], list[dict[str, Any]]]
    picture: Callable[[list[tuple[Case, list["Record"]]]], str]  # of what the student's version did
    remember: str  # one sentence with a number, shown when it is passed
    wrong: tuple[Wrong, ...]
    traffic: Callable[[Case], list[dict[str, Sent]]] | None = None  # by operation, for each rank
    # What is wrong about memory, or order, in a sentence that names ranks and numbers; else "".
    memory: Callable[[Case, list["Record"]], str] | None = None
    order: Callable[[Case, list["Record"]], str] | None = None
    # Numbers that a result may be too large or too small by, with their names.
    factors: Callable[[Case], dict[str, float]] = field(
        default=lambda case: {"the number of ranks": case.ranks}
    )
    # What `train` changes in the "distributed" section, so that the function is used.
    layout: dict[str, int | str | bool] = field(default_factory=dict)
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)  # and in other sections
    no_training: str = ""  # why there is nothing to train, where no step calls the function
    also_right: tuple[str, ...] = ()  # the function written in other ways, which must pass

    @property
    def number(self) -> int:
        return int(self.module.rpartition(".e")[2].partition("_")[0])

    @property
    def name(self) -> str:
        return self.module.rpartition(".e")[2].partition("_")[2]

    @property
    def source_module(self) -> str:  # of the target
        return f"picotron_min.{self.target.partition(':')[0]}"

    @property
    def qualified_name(self) -> str:
        return self.target.partition(":")[2]

    @property
    def gates(self) -> list[str]:
        optional = {"B": self.traffic, "M": self.memory, "O": self.order}
        return ["V", *(gate for gate, check in optional.items() if check)]

    def changed(self, config: dict[str, dict]) -> dict[str, dict]:
        """A training config with what this exercise needs, so that its function is used."""
        changes = self.settings | {"distributed": self.layout}
        return config | {name: config.get(name, {}) | new for name, new in changes.items()}

    def seeded_cases(self, seed: int) -> list[Case]:
        cases = self.cases(random.Random(f"{seed} {self.module}"))
        for case in cases:
            case.seed = seed
        return cases


def draw(case: Case, *key: object, shape: Sequence[int]) -> "Tensor":
    """Normal numbers in float64 that depend on the case's seed and on the key, and nothing else."""
    import torch

    digest = hashlib.sha256(repr((case.seed, key, tuple(shape))).encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little"))
    return torch.randn(tuple(shape), dtype=torch.float64, generator=generator)


def files() -> dict[int, Path]:
    """The file of each exercise, by number."""
    found = {int(path.stem[1:3]): path for path in sorted(FOLDER.glob("e[0-9][0-9]_*.py"))}
    return dict(sorted(found.items()))


def load(number: int) -> Exercise:
    """The exercise with this number; ValueError if there is none."""
    there = files()
    if number not in there:
        numbers = ", ".join(f"{n:02}" for n in there)
        raise ValueError(f"there is no exercise {number:02}: use one of {numbers}")
    return importlib.import_module(f"exercises.{there[number].stem}").EXERCISE
