"""Calls: what your functions have got and made, read from the records of a run."""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from difference.taps import INSIDE, RESULT, Key, Record
from difference.watch import BETWEEN

TOTAL = "its sum over all ranks"


class Call(NamedTuple):
    """A call of one of your functions."""

    key: Key  # of what it has noted; the name is the function's
    which: int  # among the calls of this function in this micro-batch
    callers: list[str]  # yours, the nearest first
    got: dict[str, Tensor]
    made: dict[str, Tensor]  # at its end: what it got, too, which it may have changed
    when: int  # the place of its end among its rank's records
    ended: bool = False

    def is_in(self, methods: tuple[str, ...]) -> bool:
        """Whether it is a call of one of these methods, or within one."""
        return any(name.endswith(methods) for name in (self.key.name, *self.callers))


def calls_of(records: Sequence[Record]) -> list[Call]:
    """In the order in which they have returned."""
    calls: dict[str, Call] = {}
    counts: Counter = Counter()
    for when, record in enumerate(records):
        if record.key.phase != INSIDE:
            continue
        number, caller, names, event, variable = record.key.name.split(" ", 4)
        name, *callers = names.split(",")
        if number not in calls:
            key = record.key._replace(name=name)
            counts[key] += 1
            calls[number] = Call(key, counts[key], callers, {}, {}, when)
        call = calls[number]
        if event == "call":
            call.got[variable] = record.tensor
            if caller in calls:  # what it gives to another function is what it makes
                to = name.rpartition(":")[2]
                calls[caller].made[f"{variable} of {to}"] = record.tensor
            continue
        if not call.ended:
            calls[number] = call = calls.pop(number)._replace(when=when, ended=True)
        call.made[variable] = record.tensor
    return [*calls.values()]


def counts_of(calls: list[Call]) -> list[Call]:
    return [call for call in calls if call.key.name.endswith(".counts") and RESULT in call.made]


def counters_of(counts: Call, calls: list[Call]) -> list[str]:
    """The method that fills what `counts` returns: gets tensors, returns none; and its caller."""
    of = counts.key.name.rpartition(".")[0]
    mine = [call for call in calls if call.key.name.rpartition(".")[0] == of]
    others = {c.key.name for c in mine if not c.got or any(v.startswith(RESULT) for v in c.made)}
    others |= {f"{of}.{method}" for method in BETWEEN.split()}
    silent = next((call for call in mine if call.key.name not in others), None)
    return [silent.key.name, *silent.callers[:1]] if silent else []
