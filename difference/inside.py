"""Inside: what your own functions compute, beside the same functions in one process.

The course's model has taps at known places. Of a function of your extension nothing is known but
its tensors: those that it gets and makes are noted in both runs. A rank's tensor is right where the
one process has it, in the same micro-batch; where it is a part of one; and where the ranks of an
axis add up to one. A function that gets right tensors and makes a wrong one is named first. This
never raises an alarm: a right extension may also have tensors that one process does not have.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import chain, combinations, product
from math import inf
from typing import NamedTuple

import torch
from torch import Tensor

from difference.algebra import FITS, same, weights_of
from difference.compare import Comparison
from difference.places import Here, Indices, chunk, positions, take
from difference.taps import INSIDE, MOST_NUMBERS, RESULT, Key, Record, outer
from difference.why import size_named, times

TOTAL = "its sum over all ranks"


class Call(NamedTuple):
    """A call of one of your functions."""

    key: Key  # of what it has noted; the name is the function's
    which: int  # among the calls of this function in this micro-batch
    caller: str  # yours, or ""
    got: dict[str, Tensor]
    made: dict[str, Tensor]  # at its end: what it got, too, which it may have changed
    when: int  # the place of its end among its rank's records


def calls_of(records: Sequence[Record]) -> list[Call]:
    """In the order in which they have returned."""
    calls: dict[str, Call] = {}
    counts: Counter = Counter()
    for when, record in enumerate(records):
        if record.key.phase != INSIDE:
            continue
        number, name, caller, event, variable = record.key.name.split(" ", 4)
        if number not in calls:
            key = record.key._replace(name=name)
            counts[key] += 1
            calls[number] = Call(key, counts[key], caller, {}, {}, when)
        if event == "return" and not calls[number].made:
            calls[number] = calls.pop(number)._replace(when=when)
        tensors = calls[number].made if event == "return" else calls[number].got
        tensors[variable] = record.tensor
    return [*calls.values()]


def counts_of(calls: list[Call]) -> list[Call]:
    return [call for call in calls if call.key.name.endswith(".counts") and RESULT in call.made]


class Inside:
    """All ranks' calls of your functions, beside the tensors of one process."""

    def __init__(self, both: Comparison) -> None:
        self.both, self.layout = both, both.trial.layout
        of_yours, pool = [], defaultdict(lambda: defaultdict(list))
        for key, tensor in both.whole.items():
            if key.phase == INSIDE:
                of_yours.append(Record(key, tensor, [], []))
            step = key.step + (key.phase == "weights")  # they are read in the step after
            if tensor.numel() <= MOST_NUMBERS:
                pool[(step, *key[3:])][tuple(tensor.shape)].append(tensor)
        self.right_calls = calls_of(of_yours)
        self.pool = {at: [torch.stack(of) for of in shapes.values()] for at, shapes in pool.items()}
        self.calls = [calls_of(records) for records in both.runs]
        self.found = [{call[:2]: call for call in calls} for calls in self.calls]
        # What `counts` returns is summed by the course.
        for calls in zip(*map(counts_of, self.calls), strict=False):
            total = sum(call.made.pop(RESULT) for call in calls)
            for call in calls:
                call.made[TOTAL] = total
        for call in counts_of(self.right_calls):
            call.made[TOTAL] = call.made.pop(RESULT)

    def first_guilty(self) -> tuple[Call, Here] | None:
        """The first call that gets right tensors and makes wrong ones.

        Calls since the last right tap come first: what is guilty before it may be harmless.
        """
        first, before, since = self.both.first[0].key, [], []
        goes_on = first.phase in ("forward", "backward")
        # Others are noted all at once, and these at the end of a step.
        end_of_step = "loss", "gradient norm", "optimizer state", "biases of routers", "weights"
        at_once = end_of_step if first.phase in end_of_step else (first.phase,) * (not goes_on)
        for at in dict.fromkeys([*(one.at for one in self.both.first), *self.both.ranks]):
            mine = [one for one in self.both.all if one.at is at]
            end = min((one.when for one in mine if one.is_wrong), default=inf)
            rights = (o.when for o in mine if o.when < end and o.key.phase not in at_once)
            last_right = max(rights, default=0)
            for call in self.calls[at.rank]:
                # In a later step a call may have read what an update had left wrong.
                if call.when < end and (call.key.step < first.step or not first.step):
                    (since if call.when > last_right else before).append((call, at))
        before = [pair for pair in before if self._is_guilty(*pair)]
        harmless = {call.key.name for call, _ in before}
        since = [pair for pair in since if pair[0].key.name not in harmless]
        may_be_old = goes_on or first.phase == "summed gradient"
        old = before[0] if before and may_be_old else None
        return next((pair for pair in since if self._is_guilty(*pair)), old)

    def _is_guilty(self, call: Call, at: Here) -> bool:
        got, made = (
            all(
                self._is_there(t, call, at) or self._sum_over(t, v, call, at) for v, t in of.items()
            )
            for of in (call.got, call.made)
        )
        return got and not made

    def _sum_over(self, tensor: Tensor, variable: str, call: Call, at: Here) -> str:
        """The axes whose ranks add up to a right tensor."""
        rows = self._rows(tensor, variable, call, at)
        return next((axes for axes, row in rows if self._is_there(sum(row), call, at)), "")

    def _rows(
        self, tensor: Tensor, variable: str, call: Call, at: Here
    ) -> Iterator[tuple[str, list[Tensor]]]:
        """For some axes, what each of their ranks has of a variable in the same call."""
        axes = [axis for axis in ("tp", "cp", "dp", "pp") if getattr(self.layout, axis) > 1]
        is_end = call.made.get(variable) is tensor
        for some in chain.from_iterable(combinations(axes, n + 1) for n in range(len(axes))):
            mine = at._replace(**dict.fromkeys(some, 0))[1:5]
            row = [o for o in self.both.ranks if o._replace(**dict.fromkeys(some, 0))[1:5] == mine]
            calls = [self._call_of(call, other) for other in row]
            sides = [(c.made if is_end else c.got).get(variable) for c in calls if c]
            alike = [t for t in sides if t is not None and t.shape == tensor.shape]
            if len(alike) == len(row):
                yield " and ".join(some), alike

    def _call_of(self, call: Call, at: Here) -> Call | None:
        """The same call on another rank; between micro-batches all have dp 0."""
        found = self.found[at.rank]
        between = found.get((call.key, call.which))
        return found.get((call.key._replace(dp=at.dp), call.which), between)

    def _is_there(self, tensor: Tensor, call: Call, at: Here) -> bool:
        """Whether the one process has it in the same micro-batch, or has it as a part."""
        most = FITS * tensor.abs().max()
        for stack in self.pool.get((call.key.step, *call.key[3:]), ()):
            for indices in self._parts(tensor.shape, stack.shape[1:], at):
                error = (take(stack, [range(len(stack)), *indices]) - tensor).abs()
                if (error.reshape(len(stack), -1).amax(1) <= most).any():
                    return True
        return False

    def _parts(self, shape: torch.Size, whole: torch.Size, at: Here) -> Iterator[Indices]:
        """The ways in which a tensor of this shape can be a rank's part of a whole one."""
        if len(shape) != len(whole):
            return iter(())
        choices = []
        for n, size in zip(shape, whole, strict=True):
            of_dim = [range(size)]
            if n < size:
                axes = "tp", "dp", "ep", "etp"
                of_dim = [chunk(of_dim[0], getattr(at, a), getattr(self.layout, a)) for a in axes]
                of_dim += [positions(at, self.layout, size)] * (size % (2 * self.layout.cp) == 0)
            choices.append([indices for indices in of_dim if len(indices) == n])
        return product(*choices)

    def said(self, call: Call, at: Here) -> Iterator[str]:
        """What is wrong of what a call makes, and what ranks have alike, or in parts."""
        rights = {v: self._is_there(tensor, call, at) for v, tensor in call.made.items()}
        over = {v: self._sum_over(t, v, call, at) for v, t in call.made.items() if not rights[v]}
        shapes = {call.made[variable].shape for variable, axes in over.items() if axes}
        for variable, tensor in call.made.items():
            if not rights[variable]:
                part = over[variable] and f"a part of a sum over {over[variable]}"
                yield f"{variable} is {part or self._wrong(tensor, variable, call, at)}"
            elif tensor.shape in shapes:
                yield f"{variable} is what one process has"

    def _wrong(self, tensor: Tensor, variable: str, call: Call, at: Here) -> str:
        """How it differs from this variable in a call in one process, if that is known."""
        rights = [
            c.made[variable] for c in self.right_calls if c.key == call.key and variable in c.made
        ]
        for right in rights if tensor.isfinite().all() else ():
            for indices in self._parts(tensor.shape, right.shape, at):
                c = weights_of(tensor, [take(right, indices)])
                # Any number is some factor times any other.
                if c and c[0] != 1 and (tensor.numel() > 1 or size_named(c[0], self.both)):
                    return f"{times(c[0], self.both)} what one process has"
        for given, mine in call.got.items():
            for axes, row in self._rows(mine, given, call, at):
                if same(sum(row), tensor):
                    return f"the sum of {given} over {axes}"
        return "wrong"


def named(both: Comparison, said: str) -> tuple[list[str], str]:
    """The guilty function and those that call it, and what is wrong inside; or nothing."""
    if not any(record.key.phase == INSIDE for record in chain(*both.runs)):
        return [], ""
    inside = Inside(both)
    calls = [*chain(*inside.calls)]
    backwards = {c.key.name for c in calls if c.key.name.endswith(".backward")}
    of_autograd = {name.removesuffix(".backward") for name in backwards}

    def function(name: str) -> str:
        """Of the two methods of an autograd.Function, the class."""
        of, _, method = outer(name).rpartition(".")
        return of if of in of_autograd and method in ("forward", "backward") else outer(name)

    def callers(of: list[str]) -> list[str]:
        """Who calls these functions has given them something."""
        names = (function(c.caller) for c in calls if c.caller and function(c.key.name) in of)
        return [*dict.fromkeys(names)]

    if found := inside.first_guilty():
        guilty = found[0]
        names = [function(guilty.key.name)]
        around = [function(guilty.caller)] if guilty.caller else callers(names)
        while around := [name for name in around if name not in names] if guilty.got else []:
            names += around
            around = callers(around)
        return names, "; ".join([*inside.said(*found)][:4])
    if both.first[0].key.phase == "backward" and "the sum is missing" in said:
        # What each rank computes with a tensor that all have alike begins with a copy.
        results = ((c.key.name, c.made[RESULT], c.got) for c in calls if RESULT in c.made)
        copies = (name for name, out, got in results if any(same(out, t) for t in got.values()))
        return [*dict.fromkeys(map(function, copies))], ""
    return [], ""
