"""Numbers and values as messages show them."""

import json
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


def shown(value: object) -> str:
    """A value as it stands in a JSON file, cut to a readable length."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


def choice(options: Iterable) -> str:
    """1, 2 or 4"""
    *most, last = map(str, options)
    return f"{', '.join(most)} or {last}" if most else last


def divisors(number: int) -> str:
    """1, 2, 4 or 8; those up to 1,024"""
    return choice(n for n in range(1, min(number, 1024) + 1) if number % n == 0)


def mistake(error: dict) -> str:
    """One of pydantic's errors as a sentence: where, the value, and what it must be."""
    where, what = ".".join(map(str, error["loc"])), error["msg"]
    if error["type"] in ("missing", "json_invalid", "none_required"):  # a token is never shown
        return f"{where} {what}".strip()
    what = re.sub(r"^\w+ should", "must", what.replace(" or instance of", " for"))
    return f"{where}={shown(error['input'])}: {what}".lstrip("=")


@contextmanager
def explained(problem: str, remedy: str = "", of: type = Exception) -> Iterator[None]:
    """Raise what readers and libraries raise, of a dozen kinds, as one ValueError for the user."""
    try:
        yield
    except of as error:
        reason = re.sub(r"^\[Errno \d+\] |\n", " ", str(error)).strip() or type(error).__name__
        if hasattr(error, "errors"):  # pydantic's, about several values
            reason = "; ".join(map(mistake, error.errors()))
        raise ValueError(": ".join(filter(None, (problem, reason, remedy)))) from error


def counted(number: int, noun: str) -> str:
    """1 step, 2,000 steps, 2 processes"""
    ending = "" if number == 1 else "es" if noun.endswith(("s", "ch")) else "s"
    return f"{number:,} {noun}{ending}"


def human(number: float) -> str:
    """Three digits and a unit of thousands: 950, 1.24B, 12.3k"""
    unit = next(u for u in range(5) if number < 999.5 * 1000**u or u == 4)
    number /= 1000**unit
    digits = 0 if unit == 0 or number >= 99.95 else 1 if number >= 9.995 else 2
    return f"{number:.{digits}f}{('', 'k', 'M', 'B', 'T')[unit]}"


def duration(seconds: float) -> str:
    """7s, 3m20s or 5h07m"""
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}m{rest:02}s" if minutes else f"{rest}s"
    return f"{minutes // 60}h{minutes % 60:02}m"
