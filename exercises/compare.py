"""Results against what they should be: the first difference, and what kind of difference it is."""

import math
from collections.abc import Collection, Iterable, Iterator
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
    if type(value) is tuple:
        number = f"{len(value)} value{'s' * (len(value) != 1)}"
        return f"{number} ({', '.join(map(described, value))})"
    kind = type(value).__name__
    length = f" of {len(value)}" if isinstance(value, list | dict) else ""
    if isinstance(value, list) and value:
        length += f", the first of them {described(value[0])}"
    return "None" if value is None else f"a{'n' * (kind[0] in 'aeiouAEIOU')} {kind}{length}"


def differences(got: Any, expected: Any, at: tuple = ()) -> Iterator[tuple[tuple, Any, Any]]:
    """Where a value is another one than expected: index, what is there, what should be."""
    if isinstance(expected, Tensor):
        yield from _tensor_differences(got, expected, at)
    elif isinstance(expected, list | tuple) and isinstance(got, list | tuple):
        is_shown = len(got) + len(expected) <= MANY and _is_plain(got) and _is_plain(expected)
        if len(got) != len(expected):
            sizes = f"{len(got)} long", f"{len(expected)} long"
            yield at, *((got, expected) if is_shown else sizes)
        for i, (a, b) in enumerate(zip(got, expected, strict=False)):
            for place, *pair in differences(a, b, (*at, i)):
                is_number = is_shown and not isinstance(b, list)
                yield (at, got, expected) if is_number else (place, *pair)
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
    elif got.is_meta or expected.is_meta:  # which have no numbers
        if got.device != expected.device:
            yield at, f"a tensor on {got.device}", f"one on {expected.device}"
    elif got.dtype != expected.dtype or not got.equal(expected):  # most are equal
        is_off = _is_off(got, expected)
        for place in is_off.nonzero()[:1].tolist():
            index = tuple(place)
            yield (*at, *index), got[index].item(), expected[index].item()


def _is_off(got: Tensor, expected: Tensor) -> Tensor:
    a, b = got.detach().to(torch.float64), expected.detach().to(torch.float64)
    return ~torch.isclose(a, b, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True)


def shown(*values: Any) -> list[str]:
    """Values as texts, their numbers with as many digits as are needed to see where they differ."""
    for digits in (6, 9, 12, 17):
        texts = [_text(value, digits) for value in values]
        if len(set(texts)) == len(texts):
            break
    return [text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..." for text in texts]


def _text(value: Any, digits: int, most: float = MANY) -> str:
    """The value with the numbers of its tensors, if they have at most `most`."""
    if isinstance(value, float):
        return f"{value:.{digits}g}"
    if isinstance(value, Tensor):
        few = value.numel() <= most and not value.is_meta
        return _text(value.tolist(), digits) if few else f"a tensor {list(value.shape)}"
    if isinstance(value, slice) and value.step is None:
        ends = [value.stop] if value.start is value.stop is None else [value.start, value.stop]
        return f"slice({', '.join(map(str, ends))})"
    if isinstance(value, list | tuple):
        texts = ", ".join(_text(one, digits, most) for one in value)
        return f"[{texts}]" if isinstance(value, list) else f"({texts})"
    return str(value)


Runs = list[tuple[dict[str, float], list[dict], list[dict]]]  # factors, results, right results


def only_wrong(runs: Runs) -> str:
    """Which results are wrong, where others are right in all runs."""
    names = dict.fromkeys(name for *_, expected in runs for right in expected for name in right)
    wrong = dict.fromkeys(one.name for _, *results in runs for one in wrong_results(*results))
    right = [name for name in names if name not in wrong]
    if not wrong or not right:
        return ""
    if len(wrong) > 3 >= len(right):
        return f" All results differ but {listed(right)}."
    return f" Only {listed(wrong)} differ{'s' * (len(wrong) == 1)}; all other results are right."


def listed(names: Collection[str]) -> str:
    few = [f"`{name}`" for name in names]
    more = [f"{len(few) - 2} others"] if len(few) > 3 else []
    return " and ".join(few[:2] + more if more else few)


def common_pattern(runs: Runs, right: list[dict[str, float]]) -> str:
    """What is wrong in the same way in all runs.

    Several factors can be as large. One that is not 1 in a case that is `right` is meant only if
    there is no other.
    """
    found, *more = [dict(patterns(*run)) for run in runs] or [{}]
    common = [kind for kind in found if all(kind in others for others in more)]
    if not common:
        return ""
    (how, name), *others = (kind.partition(": ")[::2] for kind in common)  # large: cp
    names = [name, *(other for kind, other in others if kind == how)]
    likely = [name for name in names if all(factors.get(name, 1) == 1 for factors in right)]
    return found[common[0]].replace(f": {name}.", f": {' or '.join(likely or names)}.")


def patterns(
    factors: dict[str, float], got: list[dict], expected: list[dict]
) -> Iterator[tuple[str, str]]:
    """What all wrong values of a case have in common: its kind, and a sentence with numbers."""
    wrong = [one for one in wrong_results(got, expected) if not isinstance(one.value, bool)]
    if not wrong:
        return
    names = sorted({one.name for one in wrong})
    listed = ", ".join(f"`{name}`" for name in names)
    yield from _of_ranks(wrong, names, got, expected)
    yield from _of_numbers(factors, wrong)
    if all(_is_reordered(one.got, one.value) for one in wrong):
        yield "reordered", f"{listed}: it is all there, but in another order."


def _of_ranks(
    wrong: list[Wrong], names: list[str], got: list[dict], expected: list[dict]
) -> Iterator[tuple[str, str]]:
    n = len(got)
    if {one.rank for one in wrong} == set(range(1, n)):
        yield "rank 0", "It is right on rank 0 only."
    # Zeros or NaN in place of what is lost equal another rank's by chance.
    if all(x is not None and not x.nan_to_num(0).any() for x in (_numbers(w.got) for w in wrong)):
        return
    is_same = all(equal(one.get(name), got[0].get(name)) for one in got for name in names)
    if is_same and not any(equal(expected[0].get(x), expected[-1].get(x)) for x in names):
        yield "same", "It is the same on all ranks, and should differ."
    for how, step in (("next", 1), ("previous", -1)):
        if all(equal(one.got, expected[(one.rank + step) % n].get(one.name)) for one in wrong):
            yield how, f"Each rank has what the {how} one should have."


def _of_numbers(factors: dict[str, float], wrong: list[Wrong]) -> Iterator[tuple[str, str]]:
    pairs = [(_numbers(one.got), _numbers(one.value)) for one in wrong]
    dicts = [one for one in wrong if isinstance(one.value, dict)]
    if any(not isinstance(x.got, dict) or x.got.keys() != x.value.keys() for x in dicts):
        return
    if any(a is None or b is None or a.shape != b.shape for a, b in pairs):
        return
    off = torch.cat([a[_is_off(a, b)] for a, b in pairs])
    right = torch.cat([b[_is_off(a, b)] for a, b in pairs])
    if not len(off):  # right numbers in another form
        return
    ratio = (off[0] / right[0]).item() if right.all() else math.nan
    is_constant = equal(off, ratio * right)
    for name, factor in factors.items():
        for times, how in ((factor, "large"), (1 / (factor or 1), "small")):
            if factor not in (0, 1) and equal(off, times * right):
                what = f"too {how} by a factor of {factor:g}: {name}."
                yield f"{how}: {name}", f"Every wrong number is {what}"
    if all(a.ndim == 2 and equal(a.mT, b) for a, b in pairs):
        yield "transposed", "Every wrong matrix is the transpose of the right one."
    if all(isinstance(one.value, SumOf) and one.value.has_part(one.got) for one in wrong):
        yield "part", "Every wrong result is a part of the right sum: some terms are missing."
    if off.isnan().all():
        why = "memory that nothing was written to, a message before its `wait`, 0 / 0 or inf / inf"
        yield "nan", f"Every wrong number is NaN: {why}."
    if not off.isfinite().any():
        yield "not finite", "Every wrong number is inf or NaN: a division by 0, or endless growth."
    elif not off.any():
        yield "zero", "Every wrong number is 0."
    # Of equal numbers, a constant factor says nothing.
    elif is_constant and len(off.unique()) > 1 and (text := f"{ratio:.6g}") != "1":  # not inexact
        what = "has the wrong sign" if text == "-1" else f"is {text} times the right one"
        yield f"times {text}", f"Every wrong number {what}."
    is_small = all((a - b).abs().max() <= 1e-6 * b.abs().max() for a, b in pairs)
    if is_small and off.frac().any():
        what = "something was rounded to float32, or a small term such as `eps` is wrong"
        yield "small", f"No error is above 1e-6 of the largest number: {what}."


def _numbers(value: Any) -> Tensor | None:
    """A tensor, a number, a list or a dict of numbers, as a tensor of float64; else None."""
    if isinstance(value, dict):
        value = [value[key] for key in sorted(value, key=str)]
    if _is_plain(value):
        with suppress(ValueError, TypeError):  # lists of different lengths
            value = torch.tensor(value, dtype=torch.float64)
    is_usable = isinstance(value, Tensor) and value.numel() and value.device.type == "cpu"
    return value.detach().to(torch.float64) if is_usable else None


def _is_plain(value: Any) -> bool:
    return type(value) in (int, float) or (type(value) is list and all(map(_is_plain, value)))


def _is_reordered(got: Any, right: Any) -> bool:
    if not all(isinstance(value, Tensor | list | tuple) for value in (got, right)):
        return False
    if isinstance(right, list) and right and all(isinstance(one, Tensor) for one in right):
        pairs = zip(got, right, strict=False)  # one of each rank
        if len(got) == len(right) and all(equal(*p) or _is_reordered(*p) for p in pairs):
            return True
    values = (x.flatten().tolist() if isinstance(x, Tensor) else x for x in (got, right))
    mine, others = (sorted(_text(x, 9, math.inf) for x in value) for value in values)
    return len(mine) > 1 and mine == others
