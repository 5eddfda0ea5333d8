"""Results against what they should be: the first difference, and what kind of difference it is."""

import math
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

TOLERANCE = 1e-10  # of float64 numbers around 1
LONGEST, MANY = 160, 16  # characters of a value that is shown, and numbers of a tensor


class SumOf(Tensor):
    """An expected sum of tensors: recognises a result that lacks some of them."""

    def __new__(cls, parts: Iterable[Tensor]) -> "SumOf":
        parts = list(parts)
        total = torch.stack(parts).sum(0).as_subclass(cls)
        total.parts = parts
        return total

    def has_part(self, sum_of_some: Tensor) -> bool:
        """Whether it is the sum of some of these, but not of all."""
        # At most 2^8 sums: it is asked of every wrong result.
        sizes = range(1, len(self.parts)) if len(self.parts) <= 8 else ()
        some = (one for n in sizes for one in combinations(self.parts, n))
        return any(equal(sum_of_some, torch.stack(parts).sum(0)) for parts in some)


class Wrong(NamedTuple):
    """A wrong result of a rank, with what it should be."""

    rank: int
    name: str
    got: Any
    value: Any


def wrong_results(got: list[dict], expected: list[dict]) -> list[Wrong]:
    """All that is off by more than 1e-10, of what all ranks returned."""
    return [
        Wrong(rank, name, mine.get(name), value)
        for rank, (mine, right) in enumerate(zip(got, expected, strict=True))
        for name, value in right.items()
        if not equal(mine.get(name), value)
    ]


def first_difference(got: list[dict], expected: list[dict]) -> str | None:
    """The first wrong number that a rank returned, and what it should be; None if all are right."""
    for rank, name, mine, right in wrong_results(got, expected):
        index, *pair = next(differences(mine, right))
        place = f"`{name}`" + (f"{list(index)}" if index else "")
        return "rank {}, {} is {}, should be {}".format(rank, place, *shown(*pair))
    return None


def equal(a: Any, b: Any) -> bool:
    return not any(True for _ in differences(a, b))


def described(value: Any) -> str:
    """What a value is, for a student: "a tensor [3, 4] of float64"."""
    if isinstance(value, Tensor | np.ndarray):
        what = "tensor" if isinstance(value, Tensor) else "numpy array"
        return f"a {what} {list(value.shape)} of {str(value.dtype).removeprefix('torch.')}"
    kind = type(value).__name__
    length = f" of {len(value)}" if isinstance(value, list | tuple | dict) else ""
    return "None" if value is None else f"a{'n' * (kind[0] in 'aeiouAEIOU')} {kind}{length}"


def differences(got: Any, expected: Any, at: tuple = ()) -> Iterator[tuple[tuple, Any, Any]]:
    """Where a value is another one than expected: index, what is there, what should be."""
    if isinstance(expected, Tensor):
        yield from _tensor_differences(got, expected, at)
    elif isinstance(expected, list | tuple) and isinstance(got, list | tuple):
        if len(got) != len(expected):
            yield at, list(got), list(expected)
        for i, pair in enumerate(zip(got, expected, strict=False)):
            yield from differences(*pair, (*at, i))
    elif isinstance(expected, dict) and isinstance(got, dict):
        if got.keys() != expected.keys():
            yield at, sorted(map(str, got)), sorted(map(str, expected))
        for key in (key for key in expected if key in got):
            yield from differences(got[key], expected[key], (*at, key))
    elif isinstance(expected, float) and isinstance(got, float | int):
        both_nan = math.isnan(got) and math.isnan(expected)
        if not (both_nan or math.isclose(got, expected, rel_tol=TOLERANCE, abs_tol=TOLERANCE)):
            yield at, got, expected
    elif isinstance(got, Tensor) or ((other := got != expected) is not False and np.any(other)):
        # Of a plain False, np.any would take most of the time.
        yield at, got, expected


def _tensor_differences(got: Any, expected: Tensor, at: tuple) -> Iterator[tuple]:
    if not isinstance(got, Tensor) or got.shape != expected.shape:
        yield at, described(got), described(expected)
    elif got.dtype != expected.dtype or not got.equal(expected):  # most are equal
        is_off = _is_off(got, expected)
        for place in is_off.nonzero()[:1].tolist():
            index = tuple(place)
            yield (*at, *index), got[index].item(), expected[index].item()


def _is_off(got: Tensor, expected: Tensor) -> Tensor:
    # A result may have another dtype: only its numbers are compared.
    a, b = got.detach().to(torch.float64), expected.detach().to(torch.float64)
    return ~torch.isclose(a, b, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True)


def shown(*values: Any) -> list[str]:
    """Values as texts, their numbers with as many digits as are needed to see where they differ."""
    # 17 digits tell any two numbers of float64 apart.
    for digits in (6, 9, 12, 17):
        texts = [_text(value, digits) for value in values]
        if len(set(texts)) == len(texts):
            break
    return [text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..." for text in texts]


def _text(value: Any, digits: int) -> str:
    """The value with the numbers of its tensors, if they have few."""
    if isinstance(value, float):
        return f"{value:.{digits}g}"
    if isinstance(value, Tensor):
        is_short = value.numel() <= MANY
        return _text(value.tolist(), digits) if is_short else f"a tensor {list(value.shape)}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(_text(one, digits) for one in value)}]"
    return str(value)


Runs = list[tuple[dict[str, float], list[dict], list[dict]]]  # factors, results, right results


def common_pattern(runs: Runs) -> str:
    """What is wrong in the same way in all runs; several factors can be as large."""
    found, *more = [dict(patterns(*run)) for run in runs] or [{}]
    # A pattern that one case lacks was chance in the others.
    common = [kind for kind in found if all(kind in others for others in more)]
    if not common:
        return ""
    (how, name), *others = (kind.partition(": ")[::2] for kind in common)  # large: cp
    names = " or ".join([name, *(other for kind, other in others if kind == how)])
    return found[common[0]].replace(f": {name}.", f": {names}.")


def patterns(
    factors: dict[str, float], got: list[dict], expected: list[dict]
) -> Iterator[tuple[str, str]]:
    """What all wrong values of a case have in common: its kind, and a sentence with numbers."""
    wrong = [one for one in wrong_results(got, expected) if not isinstance(one.value, bool)]
    pairs = [(_numbers(one.got), _numbers(one.value)) for one in wrong]
    if wrong and all(a is not None and b is not None and a.shape == b.shape for a, b in pairs):
        # Zeros or NaN in place of what is lost equal another rank's by chance.
        if all(a.nan_to_num(0).any() for a, _ in pairs):
            yield from _of_neighbours(wrong, expected)
        if all(isinstance(one.value, SumOf) and one.value.has_part(one.got) for one in wrong):
            yield "part", "Every wrong result is a part of the right sum: some terms are missing."
        yield from _of_numbers(factors, pairs)


def _of_neighbours(wrong: list[Wrong], expected: list[dict]) -> Iterator[tuple[str, str]]:
    for how, step in (("next", 1), ("previous", -1)):
        # With two ranks the next one is the previous one, and "next" is said.
        others = [expected[(one.rank + step) % len(expected)].get(one.name) for one in wrong]
        if all(equal(one.got, other) for one, other in zip(wrong, others, strict=True)):
            yield how, f"Each rank has what the {how} one should have."


def _of_numbers(
    factors: dict[str, float], pairs: list[tuple[Tensor, Tensor]]
) -> Iterator[tuple[str, str]]:
    off = torch.cat([a[_is_off(a, b)] for a, b in pairs])
    right = torch.cat([b[_is_off(a, b)] for a, b in pairs])
    if not len(off):  # right numbers in another form
        return
    for name, factor in factors.items():
        for times, how in ((factor, "large"), (1 / (factor or 1), "small")):
            if factor not in (0, 1) and equal(off, times * right):
                what = f"too {how} by a factor of {factor:g}: {name}."
                yield f"{how}: {name}", f"Every wrong number is {what}"
    if all(a.ndim == 2 and equal(a.mT, b) for a, b in pairs):
        yield "transposed", "Every wrong matrix is the transpose of the right one."
    if all(equal(*(x.flatten().sort().values for x in pair)) for pair in pairs):
        yield "reordered", "Every wrong result has the right numbers in another order."
    if off.isnan().all():
        why = "memory that nothing was written to, a message before its `wait`, 0 / 0 or inf / inf"
        yield "nan", f"Every wrong number is NaN: {why}."
    if not off.any():
        yield "zero", "Every wrong number is 0."


def _numbers(value: Any) -> Tensor | None:
    """Numbers, tensors or lists of them that are equally long, as one tensor of float64."""
    with suppress(ValueError, TypeError, RuntimeError):  # whatever else it is
        if isinstance(value, list | tuple):
            value = torch.stack([_numbers(part) for part in value])
        value = torch.as_tensor(value).detach().to(torch.float64)
        if value.numel():
            return value
    return None
