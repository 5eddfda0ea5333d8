"""What a version returns, beside what the course's own function returns in the same call.

    joined_view returned None; it should return a tensor [3, 2, 4] of float64
    part(shape=(5, 3), cuts=[], ...) returned (slice(0, 5), slice(3)), the course's own (...)

The first such call is shown to a student. Calls are compared one by one, as long as both versions
get the same arguments: first by form, which is type, number of values, shape and dtype; then by
what they hold.
"""

import dataclasses
import functools
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping
from types import FunctionType, GeneratorType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from torch import Size, Tensor

from exercises.compare import LONGEST, differences, equal, shown

MANY = 6  # values; a tuple of more is not a function's several results
SHORT = 70  # characters of an argument that is shown
MOST = 200  # of a list, that are compared


class Form(NamedTuple):
    kind: str
    text: str  # for a student: "a tensor [3, 4] of float64"
    parts: tuple["Form", ...] = ()  # of a list or tuple; the first ones

    def fits(self, right: "Form") -> bool:
        """Whether it can stand where the right one is wanted; a list may have another length."""
        if right.kind == "iterator":
            return self.kind in ("iterator", "list")
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


def content_of(value: Any, depth: int = 2) -> Any:
    """A copy that can be compared and shown; of other objects their text, fields or kind."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if value is None or isinstance(value, str | int | float | slice):
        return value
    if isinstance(value, Mapping):
        return {str(key): content_of(part, depth) for key, part in value.items()}
    if type(value) in (list, tuple, range, Size):
        return [content_of(part, depth) for part in value[:MOST]]
    has_text = type(value).__str__ is not object.__str__  # as an action of a pipeline: "F0"
    if has_text:
        return str(value)
    kind, fields = type(value).__name__, _fields(value)
    if not fields or not depth:
        return f"<{kind}>"
    texts = [f"{name}={shown(content_of(x, depth - 1))[0]}" for name, x in fields.items()]
    return f"{kind}({', '.join(texts)})"


def _fields(value: Any) -> dict[str, Any]:
    if hasattr(value, "_asdict"):
        return value._asdict()
    is_record = dataclasses.is_dataclass(value) or isinstance(value, SimpleNamespace)
    return getattr(value, "__dict__", {}) if is_record else {}


class Call(NamedTuple):
    name: str
    arguments: Form
    verb: str  # returned, yielded
    result: Form
    given: dict[str, Any]  # the arguments, by name
    got: Any  # what the result holds

    def text(self) -> str:
        texts = {name: shown(value)[0] for name, value in self.given.items()}
        for name, value in self.given.items():
            if len(texts[name]) > SHORT:
                is_tensor = isinstance(value, Tensor)
                texts[name] = f"a tensor {list(value.shape)}" if is_tensor else "..."
        return f"{self.name}({', '.join(f'{name}={text}' for name, text in texts.items())})"


class WrongCall(NamedTuple):
    """The first call whose result is not that of the course's own function."""

    text: str
    is_type: bool  # it has another form


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
        code = function.__code__
        names = code.co_varnames[: code.co_argcount]

        def note(rank: int | None, call: tuple, verb: str, result: Any) -> None:
            name, form, given = call
            call = Call(name, form, verb, form_of(result), given, content_of(result))
            self.noted[rank].append(call)

        @functools.wraps(function)
        def watched(*args: Any, **options: Any) -> Any:
            rank = getattr(threading.current_thread(), "rank", None)
            if rank in self.within:
                return function(*args, **options)
            name, given = function.__qualname__, {**dict(zip(names, args, strict=False)), **options}
            given.pop("self", None)
            call = name, form_of((*args, *options.values())), content_of(given)
            self.within.add(rank)
            try:
                result = function(*args, **options)
            finally:
                self.within.discard(rank)
            note(rank, call, "returned", result)
            return yields(rank, call, result) if isinstance(result, GeneratorType) else result

        def yields(rank: int | None, call: tuple, results: Iterator) -> Iterator[Any]:
            for result in results:
                note(rank, call, "yielded", result)
                yield result

        return watched


def wrong_call(
    found: dict[int | None, list[Call]], right: dict[int | None, list[Call]]
) -> WrongCall | None:
    """The first call with the same arguments and another result: first by form, then by content."""
    different = None
    for rank in found.keys() & right.keys():
        for i, (call, other) in enumerate(zip(found[rank], right[rank], strict=False)):
            if call[:3] != other[:3]:  # from here on they do different things
                break
            should = _wanted_form(call.result, right[rank][i : i + 2])
            if should:
                verb = other.verb.removesuffix("ed")
                should = f"it should {verb} {should}"
                return WrongCall(f"{call.name} {call.verb} {call.result.text}; {should}.", True)
            if not equal(call.given, other.given):
                break
            if not different and not equal(call.got, other.got):
                different = WrongCall(_difference(call, other, rank, len(found)), False)
    return different


def _wanted_form(form: Form, right: list[Call]) -> str:
    """What should be returned, if this form cannot stand for it: right[1] may be what it yields."""
    wanted = right[0].result
    if not form.fits(wanted):
        return wanted.text
    of_items = [call.result for call in right[1:] if call.verb == "yielded"]
    if (
        wanted.kind == "iterator"
        and form.parts
        and of_items
        and not form.parts[0].fits(of_items[0])
    ):
        return f"{wanted.text} of {of_items[0].text}"
    return ""


def _difference(call: Call, other: Call, rank: int | None, ranks: int) -> str:
    index, *pair = next(differences(call.got, other.got))
    where = f" at {list(index)}" if index else ""
    if len(str(call.got)) < LONGEST:  # all of it
        where, pair = "", [call.got, other.got]
    mine, right = shown(*pair)
    on = f"on rank {rank} " * (ranks > 1)
    return f"{on}{call.text()}\n    {call.verb}{where} {mine}\n    the course's own {right}"
