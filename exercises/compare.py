"""Results against what they should be: the first difference, and what kind of difference it is."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

TOLERANCE = 1e-10  # of float64 numbers around 1
LONGEST, MANY = 160, 16  # characters of a value that is shown, and numbers of a tensor


class SumOf(list):
    """An expected sum of tensors: recognises a result that lacks some of them."""

    def total(self) -> Tensor:
        return torch.stack(list(self)).sum(0)


class Difference(NamedTuple):
    """The first place where a result is not what it should be."""

    rank: int
    name: str  # `received`
    index: tuple[int, ...]
    got: Any
    expected: Any

    def __str__(self) -> str:
        place = f"`{self.name}`" + (f"{list(self.index)}" if self.index else "")
        got, expected = shown(self.got, self.expected)
        return f"rank {self.rank}, {place} is {got}, should be {expected}"


def first_difference(got: list[dict], expected: list[dict]) -> Difference | None:
    """Compare what all ranks returned; None if it is equal to 1e-10."""
    for rank, (mine, right) in enumerate(zip(got, expected, strict=True)):
        for name in right:
            for index, a, b in differences(mine.get(name), _total(right[name])):
                return Difference(rank, name, index, a, b)
    return None


def equal(a: Any, b: Any) -> bool:
    return not any(True for _ in differences(a, b))


def differences(got: Any, expected: Any, at: tuple = ()) -> Iterator[tuple[tuple, Any, Any]]:
    if isinstance(expected, Tensor):
        yield from _tensor_differences(got, expected, at)
    elif isinstance(expected, list | tuple) and isinstance(got, list | tuple):
        if len(got) != len(expected):
            yield at, f"{len(got)} long", f"{len(expected)} long"
        for i, (a, b) in enumerate(zip(got, expected, strict=False)):
            yield from differences(a, b, (*at, i))
    elif isinstance(expected, dict) and isinstance(got, dict):
        if got.keys() != expected.keys():
            yield at, sorted(map(str, got)), sorted(map(str, expected))
        for key in (key for key in expected if key in got):
            yield from differences(got[key], expected[key], (*at, key))
    elif isinstance(expected, float) and isinstance(got, float | int):
        both_nan = got != got and expected != expected
        if not (both_nan or abs(got - expected) <= TOLERANCE * max(1.0, abs(expected))):
            yield at, got, expected
    elif isinstance(got, Tensor) or got != expected:
        yield at, got, expected


def _tensor_differences(got: Any, expected: Tensor, at: tuple) -> Iterator[tuple]:
    if not isinstance(got, Tensor):
        yield at, got, f"a tensor {tuple(expected.shape)}"
    elif got.shape != expected.shape:
        yield at, f"a tensor {tuple(got.shape)}", f"one of {tuple(expected.shape)}"
    else:
        a, b = got.detach().to(torch.float64), expected.detach().to(torch.float64)
        close = torch.isclose(a, b, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True)
        for place in (~close).nonzero()[:1].tolist():
            index = tuple(place)
            yield (*at, *index), a[index].item(), b[index].item()


def shown(*values: Any) -> list[str]:
    """Values as texts, their numbers with as many digits as are needed to see where they differ."""
    for digits in (6, 9, 12, 17):
        texts = [_text(value, digits) for value in values]
        if len(set(texts)) == len(texts):
            break
    return [text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..." for text in texts]


def _text(value: Any, digits: int) -> str:
    if isinstance(value, float):
        return f"{value:.{digits}g}"
    if isinstance(value, Tensor):
        few = value.numel() <= MANY
        return _text(value.tolist(), digits) if few else f"a tensor {list(value.shape)}"
    if isinstance(value, slice) and value.step is None:
        ends = [value.stop] if value.start is value.stop is None else [value.start, value.stop]
        return f"slice({', '.join(map(str, ends))})"
    if isinstance(value, list | tuple):
        texts = ", ".join(_text(one, digits) for one in value)
        return f"[{texts}]" if isinstance(value, list) else f"({texts})"
    return str(value)


def patterns(
    factors: dict[str, float], got: list[dict], expected: list[dict]
) -> Iterator[tuple[str, str]]:
    """What all wrong values of a case have in common: its kind, and a sentence with numbers."""
    wrong = [
        (rank, name, mine.get(name), value)
        for rank, (mine, right) in enumerate(zip(got, expected, strict=True))
        for name, value in right.items()
        if not isinstance(value, bool) and not equal(mine.get(name), _total(value))
    ]
    if not wrong or not all(_is_tensor(a) for *_, a, _ in wrong):
        return
    totals = [(a, _total(b)) for *_, a, b in wrong]
    for name, factor in factors.items():
        for times, how in ((factor, "large"), (1 / (factor or 1), "small")):
            if factor not in (0, 1) and all(equal(a, times * b) for a, b in totals):
                what = f"too {how} by a factor of {factor:g}: {name}."
                yield f"{how}: {name}", f"Every wrong number is {what}"
    if all(a.ndim == 2 and equal(a.mT, b) for a, b in totals):
        yield "transposed", "Every wrong matrix is the transpose of the right one."
    if all(isinstance(b, SumOf) and _is_part(a, b) for *_, a, b in wrong):
        yield "part", "It is a part of the right sum: some of its terms are missing."
    if len(got) > 1 and {rank for rank, *_ in wrong} == set(range(1, len(got))):
        yield "rank 0", "It is right on rank 0 only."
    names = {name for _, name, *_ in wrong}
    is_same = all(equal(one.get(name), got[0].get(name)) for one in got for name in names)
    if is_same and not any(equal(expected[0].get(n), expected[-1].get(n)) for n in names):
        yield "same", "It is the same on all ranks, and should differ."


def _total(value: Any) -> Any:
    return value.total() if isinstance(value, SumOf) else value


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.numel() > 0


def _is_part(a: Tensor, parts: SumOf) -> bool:
    """Whether it is the sum of some of the parts, but not of all."""
    choices = range(1, 2 ** len(parts) - 1) if len(parts) <= 8 else ()
    return any(
        equal(a, SumOf(p for i, p in enumerate(parts) if c >> i & 1).total()) for c in choices
    )
