"""What a version returns, beside what the course's own function returns in the same call.

    part(shape=(5, 3), cuts=[], ...) returned None; it should return 2 values (a slice, a slice)
    part(shape=(5, 3), cuts=[], ...) returned (slice(0, 5), slice(3)), the course's own (...)

The first such call is shown to a student. Calls are compared one by one, as long as both versions
get the same arguments.
"""

import dataclasses
import functools
import inspect
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping
from types import FunctionType, GeneratorType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from torch import Size, Tensor

from exercises.compare import LONGEST, described, differences, equal, shown

WORK = "Work"  # the kind of all that can be awaited
SHORT = 70  # characters of an argument that is shown


def content_of(value: Any, depth: int = 2) -> Any:
    """A copy that can be compared and shown; of another object its text, with the object's kind.

    Beside work in a list or tuple, tensors have no numbers yet.
    """
    if isinstance(value, Tensor):
        return value.detach().clone()
    if value is None or isinstance(value, str | int | float | slice | np.ndarray | np.generic):
        return value
    if isinstance(value, Mapping):
        items = enumerate(value.items())
        return {_key(key, i): content_of(part, depth) for i, (key, part) in items}
    if type(value) in (list, tuple, range, Size):  # not a named tuple, nor a queue that is a list
        parts = [content_of(part, depth) for part in value]
        if any(_kind(part) == WORK for part in parts):
            parts = [part.to("meta") if isinstance(part, Tensor) else part for part in parts]
        return tuple(parts) if isinstance(value, tuple) else parts
    if hasattr(value, "wait"):  # of any class, also a student's own
        return type(WORK, (str,), {})(f"<{WORK}>")
    kind = type(value).__name__
    text = f"<{kind}>"
    if type(value).__str__ is not object.__str__:  # as an action of a pipeline: "F0"
        text = str(value)
    elif depth and (fields := _fields(value)):
        texts = [f"{name}={shown(content_of(x, depth - 1))[0]}" for name, x in fields.items()]
        text = f"{kind}({', '.join(texts)})"
    kind = "iterator" if isinstance(value, Iterator) else kind
    return type(kind, (str,), {})(text)


def _key(key: Any, i: int) -> str:
    is_address = isinstance(key, int) and key > 2**32  # another one in each run
    return f"address {i}" if is_address else str(key)


def _fields(value: Any) -> dict[str, Any]:
    if hasattr(value, "_asdict"):
        return value._asdict()
    is_record = dataclasses.is_dataclass(value) or isinstance(value, SimpleNamespace)
    return getattr(value, "__dict__", {}) if is_record else {}


def fits(got: Any, right: Any) -> bool:
    """Whether a content can stand where the right one is wanted; a list may have another length."""
    if isinstance(right, Tensor | np.ndarray):
        return described(got) == described(right)
    if isinstance(right, list | tuple):
        if not isinstance(got, list | tuple):
            return False
        if isinstance(right, tuple):
            return len(got) == len(right) and all(map(fits, got, right))
        return all(fits(one, right[0]) for one in got if right)
    return _kind(got) == _kind(right) or (_kind(got), _kind(right)) == ("list", "iterator")


def _kind(content: Any) -> str:
    is_number = isinstance(content, int | float | np.generic)
    return "number" if is_number else type(content).__name__


class Call(NamedTuple):
    name: str
    verb: str  # returned, yielded
    given: dict[str, Any]  # contents of the arguments, by name
    got: Any  # the result's content
    changed: list[str]  # names of arguments that have other contents afterwards

    def text(self) -> str:
        texts = []
        for name, value in self.given.items():
            (text,) = shown(value)
            if len(text) > SHORT:
                text = f"a tensor {list(value.shape)}" if isinstance(value, Tensor) else "..."
            texts.append(f"{name}={text}")
        return f"{self.name}({', '.join(texts)})"


class Calls:
    """Notes the calls of the definitions that it watches, of each rank, without those within."""

    def __init__(self) -> None:
        self.noted: dict[int | None, list[Call]] = defaultdict(list)
        self.within: set[int | None] = set()

    def take(self) -> dict[int | None, list[Call]]:
        """All calls since it was last asked."""
        taken, self.noted = self.noted, defaultdict(list)
        return taken

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
        code = inspect.unwrap(function).__code__  # torch.no_grad's has other names
        names = code.co_varnames[: code.co_argcount]

        @functools.wraps(function)
        def watched(*args: Any, **options: Any) -> Any:
            rank = getattr(threading.current_thread(), "rank", None)
            if rank in self.within:
                return function(*args, **options)
            given = dict(zip(names, args, strict=False)) | options
            given.pop("self", None)  # which __init__ has not filled yet
            before = content_of(given)

            def noted(verb: str, result: Any) -> Any:
                after = content_of(given)
                changed = [k for k in given if is_changed(before[k], after[k])]
                call = Call(function.__qualname__, verb, before, content_of(result), changed)
                self.noted[rank].append(call)
                return result

            def noted_at_its_end(result: Iterator) -> Iterator:
                items = []
                for item in result:
                    items.append(content_of(item))
                    yield item
                noted("yielded", items)

            self.within.add(rank)
            try:
                result = function(*args, **options)
            finally:
                self.within.discard(rank)
            noted("returned", result)
            return noted_at_its_end(result) if isinstance(result, GeneratorType) else result

        return watched


def is_changed(before: Any, after: Any) -> bool:
    """Whether there are other numbers; an object may note what it was used for."""
    return not isinstance(before, str) and not equal(after, before)


def changed_argument(calls: list[Call], right: list[Call]) -> str:
    """The first call that changes an argument which the right version leaves as it is."""
    may = {(call.name, name) for call in right for name in call.changed}
    for call in calls:
        if names := [name for name in call.changed if (call.name, name) not in may]:
            return f"{call.name} changes its argument `{names[0]}`, which its caller may use"
    return ""


class WrongCall(NamedTuple):
    """A call that returns something else than the course's own function."""

    text: str
    has_other_form: bool  # another type or shape, or another number of values
    results: tuple[list[dict], list[dict]]  # what it returned, and the right ones, as of one rank


def wrong_call(
    found: dict[int | None, list[Call]], right: dict[int | None, list[Call]]
) -> WrongCall | None:
    """The first call with the same arguments and another result; of another form before others."""
    different = None
    for rank in found.keys() & right.keys():
        for call, other in zip(found[rank], right[rank], strict=False):
            if call[:2] != other[:2] or not equal(call.given, other.given):
                break  # from here on they do different things
            results = [_parts(call.got)], [_parts(other.got)]
            if not fits(call.got, other.got):
                text = f"{call.text()} {call.verb} {described(call.got)}; it should "
                text += f"{other.verb.removesuffix('ed')} {described(other.got)}."
                return WrongCall(text, True, results)
            if not different and not equal(call.got, other.got):
                text = _difference(call, other, rank, len(found))
                different = WrongCall(text, False, results)
    return different


def _parts(result: Any, name: str = "result") -> dict[str, Any]:
    """Each tensor by its place, as in a list of tensors; what has none is one value."""
    if not isinstance(result, list | tuple) or Tensor not in map(type, result):
        return {name: result}
    parts = [_parts(value, f"{name}[{i}]") for i, value in enumerate(result)]
    return {of: value for part in parts for of, value in part.items()}


def _difference(call: Call, other: Call, rank: int | None, ranks: int) -> str:
    index, *pair = next(differences(call.got, other.got))
    where = f" at {list(index)}" if index else ""
    if len(str(call.got)) < LONGEST:  # the whole
        where, pair = "", [call.got, other.got]
    mine, right = shown(*pair)
    on = f"on rank {rank} " * (ranks > 1)
    return f"{on}{call.text()}\n    {call.verb}{where} {mine}\n    the course's own {right}"
