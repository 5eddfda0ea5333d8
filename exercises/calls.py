"""The first call that returns something else than the course's own function, for a student.

Calls are compared one by one, as long as both versions get the same arguments.
"""

import functools
import inspect
import re
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping
from textwrap import shorten
from types import FunctionType, GeneratorType
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from exercises.compare import described, differences, equal, shown

PLAIN = str, int, float, slice, np.ndarray, np.generic, type(None)


def content_of(value: Any) -> Any:
    """A copy that can be compared and shown; of another object its text, with the object's kind."""
    if isinstance(value, Tensor):
        return described(value) if value.is_meta else value.detach().clone()
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, Mapping):
        return {str(key): content_of(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [content_of(part) for part in value]
    text = re.sub(r" at 0x\w+", "", str(value))  # an address is another one in each run
    return type(type(value).__name__, (str,), {})(text)


class Call(NamedTuple):
    name: str
    verb: str  # returned, yielded
    given: dict[str, Any]  # contents of the arguments, by name
    got: Any  # the result's content
    changed: list[str]  # names of arguments that have other contents afterwards

    def __str__(self) -> str:
        texts = {name: shown(value)[0] for name, value in self.given.items()}
        given = (f"{k}={shorten(text, 70, placeholder='...')}" for k, text in texts.items())
        return f"{self.name}({', '.join(given)})"


CallsOfRanks = dict[int | None, list[Call]]


class Calls:
    """Notes the calls of the definitions that it watches, of each rank, without those within."""

    def __init__(self) -> None:
        self.noted: CallsOfRanks = defaultdict(list)
        self.within: set[int | None] = set()

    def take(self) -> CallsOfRanks:
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
            self.within.add(rank)
            try:
                result = function(*args, **options)
            finally:
                self.within.discard(rank)

            def note(verb: str, result: Any) -> None:
                after = content_of(given)
                # An object, whose content is a text, may note what it was used for.
                numbers = [key for key, value in after.items() if not isinstance(value, str)]
                changed = [key for key in numbers if not equal(after[key], before[key])]
                self.noted[rank].append(Call(function.__qualname__, verb, before, result, changed))

            def note_all(result: Iterator) -> Iterator:
                items = []
                for item in result:
                    items.append(content_of(item))
                    yield item
                note("yielded", items)

            if isinstance(result, GeneratorType):
                return note_all(result)
            note("returned", content_of(result))
            return result

        return watched


def wrong_call(found: CallsOfRanks, right: CallsOfRanks) -> str:
    """The first call with another result, and what it should be."""
    for rank in found.keys() & right.keys():
        for call, other in zip(found[rank], right[rank], strict=False):
            if call.name != other.name or not equal(call.given, other.given):
                break  # from here on they do different things
            if not equal(call.got, other.got):
                where, (mine, its) = "", shown(call.got, other.got)
                if mine == its:  # they are too long to be shown
                    index, *pair = next(differences(call.got, other.got))
                    where, (mine, its) = f" at {list(index)}" * bool(index), shown(*pair)
                text = f"{call}\n    {call.verb}{where} {mine}\n    the course's own {its}"
                return f"on rank {rank} {text}" if len(found) > 1 else text
    return ""
