"""The forms of what a version returns: type, number of values, shape, dtype; no values.

    joined_view returned None; it should return a tensor [3, 2, 4] of float64

What the right form is in a call is not written down anywhere. The course's own function is called
in the same case, and its results have it. Calls are compared one by one, as long as both versions
get arguments of the same forms.
"""

import functools
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping
from types import FunctionType, GeneratorType
from typing import Any, NamedTuple

import numpy as np
from torch import Size, Tensor

MANY = 6  # values; a tuple of more is not a function's several results


class Form(NamedTuple):
    kind: str
    text: str  # for a student: "a tensor [3, 4] of float64"
    parts: tuple["Form", ...] = ()  # of a list or tuple; the first ones

    def fits(self, right: "Form") -> bool:
        """Whether it can stand where the right one is wanted; a list may have another length."""
        if right.kind in ("list", "tuple"):
            if self.kind not in ("list", "tuple"):
                return False
            if right.kind == "tuple" and len(self.parts) != len(right.parts):
                return False
            of_each = right.parts if right.kind == "tuple" else right.parts[:1] * len(self.parts)
            return all(a.fits(b) for a, b in zip(self.parts, of_each, strict=False))
        return self.kind == right.kind


def form_of(value: Any) -> Form:
    if isinstance(value, Tensor | np.ndarray):
        what = "tensor" if isinstance(value, Tensor) else "numpy array"
        text = f"a {what} {list(value.shape)} of {str(value.dtype).removeprefix('torch.')}"
        return Form(text, text)
    kind = type(value).__name__
    a_kind = f"a{'n' * (kind[0] in 'aeiouAEIOU')} {kind}"
    if isinstance(value, int | float | np.generic):
        return Form("number", a_kind)
    if type(value) in (list, tuple, range, Size):  # not a named tuple, nor a queue that is a list
        parts = tuple(form_of(part) for part in value[:MANY])
        if isinstance(value, tuple) and len(value) <= MANY:
            texts = ", ".join(part.text for part in parts)
            number = f"{len(value)} value{'s' * (len(value) != 1)}"
            return Form("tuple", f"{number} ({texts})", parts)
        first = f", the first of them {parts[0].text}" if parts else ""
        return Form("list", f"a {kind} of {len(value)}{first}", parts)
    if isinstance(value, Mapping):
        return Form("dict", f"{a_kind} of {len(value)}")
    if isinstance(value, Iterator):
        return Form("iterator", a_kind)
    return Form(kind, "None" if value is None else a_kind)


class Call(NamedTuple):
    name: str
    arguments: Form
    verb: str  # returned, yielded
    result: Form


class Calls:
    """Notes the calls of the definitions that it watches, of each rank, without those within."""

    def __init__(self) -> None:
        self.noted: dict[int | None, list[Call]] = defaultdict(list)
        self.within: set[int | None] = set()

    def take(self) -> dict[int | None, list[Call]]:
        """All calls since it was last asked."""
        taken, self.noted, self.within = self.noted, defaultdict(list), set()
        return dict(taken)

    def watch(self, definition: Any) -> Any:
        """A function whose calls are noted; a class with such methods; else what it is."""
        if isinstance(definition, type):
            for name, member in list(vars(definition).items()):
                if (watched := self.watch(member)) is not member:
                    setattr(definition, name, watched)
        elif isinstance(definition, staticmethod | classmethod):
            return type(definition)(self.watch(definition.__func__))
        return self._watched(definition) if isinstance(definition, FunctionType) else definition

    def _watched(self, function: FunctionType) -> FunctionType:
        @functools.wraps(function)
        def watched(*args: Any, **options: Any) -> Any:
            rank = getattr(threading.current_thread(), "rank", None)
            if rank in self.within:
                return function(*args, **options)
            call = function.__qualname__, form_of((*args, *options.values()))
            self.within.add(rank)
            try:
                result = function(*args, **options)
            finally:
                self.within.discard(rank)
            self.noted[rank].append(Call(*call, "returned", form_of(result)))
            return yields(rank, call, result) if isinstance(result, GeneratorType) else result

        def yields(rank: int | None, call: tuple[str, Form], results: Iterator) -> Iterator[Any]:
            for result in results:
                self.noted[rank].append(Call(*call, "yielded", form_of(result)))
                yield result

        return watched


def form_problem(found: dict[int | None, list[Call]], right: dict[int | None, list[Call]]) -> str:
    """The first call whose result has another form than the right one, in a sentence; or ""."""
    for rank in found.keys() & right.keys():
        for call, other in zip(found[rank], right[rank], strict=False):
            if call[:3] != other[:3]:  # from here on they do different things
                break
            if not call.result.fits(other.result):
                verb = other.verb.removesuffix("ed")
                should = f"it should {verb} {other.result.text}"
                return f"{call.name} {call.verb} {call.result.text}; {should}."
    return ""
