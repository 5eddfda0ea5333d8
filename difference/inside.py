"""Inside: what your own functions compute, beside the same functions in one process.

The course's model has taps at known places. Of a function of your extension nothing is known but
its tensors: those that it gets and makes are noted in both runs. A rank's tensor is right where the
one process has it, in the same micro-batch; where it is a part of one; and where the ranks of an
axis add up to one. A function that gets right tensors and makes a wrong one is guilty. This never
raises an alarm: a right extension may also have tensors that one process does not have.
"""

from collections import defaultdict
from collections.abc import Iterator
from itertools import chain, combinations, product
from math import inf

import torch
from torch import Tensor

from difference.algebra import FITS
from difference.calls import TOTAL, Call, calls_of, counts_of
from difference.compare import Comparison
from difference.places import Here, Indices, chunk, positions, take
from difference.taps import INSIDE, MOST_NUMBERS, RESULT, Record

# Activations are noted one by one; of all else, what is noted together.
AT_ONCE = ("summed gradient",), ("scaled gradient",), ("built", "initial")
AT_ONCE += (("loss", "gradient norm", "optimizer state", "biases of routers", "weights"),)


class Inside:
    """All ranks' calls of your functions, beside the tensors of one process."""

    def __init__(self, both: Comparison) -> None:
        self.both, self.layout, config = both, both.trial.layout, both.trial.model_config
        self.num_layers = {config.num_hidden_layers, config.num_layers} - {1}
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
        self.before, self.since = self._before_the_first()

    def _before_the_first(self) -> tuple[list, list]:
        """Calls that can have made the first wrong tensor: up to the last right tap, and since."""
        first, before, since = self.both.first[0].key, [], []
        at_once = next((phases for phases in AT_ONCE if first.phase in phases), ())
        for at in dict.fromkeys([*(one.at for one in self.both.first), *self.both.ranks]):
            mine = [one for one in self.both.all if one.at is at]
            end = min((one.when for one in mine if one.is_wrong), default=inf)
            rights = (o.when for o in mine if o.when < end and o.key.phase not in at_once)
            last_right = max(rights, default=0)
            for call in self.calls[at.rank]:
                # In a later step a call may have read what an update had left wrong.
                if call.when < end and (call.key.step < first.step or not first.step):
                    (since if call.when > last_right else before).append((call, at))
        return before, since

    def first_guilty(self) -> tuple[Call, Here] | None:
        """The first call that gets right tensors and makes wrong ones.

        Those since the last right tap come first: what is guilty before it may be harmless.
        """
        before = [pair for pair in self.before if self._is_guilty(*pair)]
        harmless = {call.key.name for call, _ in before}
        since = (pair for pair in self.since if pair[0].key.name not in harmless)
        may_be_old = self.both.first[0].key.phase in ("forward", "backward", "summed gradient")
        old = before[0] if before and may_be_old else None
        return next((pair for pair in since if self._is_guilty(*pair)), old)

    def _is_guilty(self, call: Call, at: Here) -> bool:
        """Of a sum over ranks nothing is known where one of them has got what is wrong."""
        if all(self.is_right(v, tensor, call, at) for v, tensor in call.made.items()):
            return False
        beside = (other for other in self.both.ranks if other[1:3] == at[1:3])  # of pp and dp
        calls = [(self._call_of(call, other), other) for other in beside]
        got = ((v, t, c, other) for c, other in calls if c for v, t in c.got.items())
        return all(self.is_right(*one) for one in got)

    def is_right(self, variable: str, tensor: Tensor, call: Call, at: Here) -> bool:
        is_there = self.place(tensor, call, at) is not None
        return is_there or bool(self.sum_over(tensor, variable, call, at))

    def sum_over(self, tensor: Tensor, variable: str, call: Call, at: Here) -> str:
        """The axes whose ranks add up to a right tensor."""
        rows = self.rows(tensor, variable, call, at)
        found = (axes for axes, row in rows if self.place(sum(row), call, at) is not None)
        return next(found, "")

    def rows(
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

    def place(self, tensor: Tensor, call: Call, at: Here) -> list[int] | None:
        """Where the one process has it in the same micro-batch: dims along which it is a part.

        So [] if it is a whole tensor; None if it is none, and no part of one.
        """
        most, found = FITS * tensor.abs().max(), None
        for stack in self.pool.get((call.key.step, *call.key[3:]), ()):
            for indices in self.parts(tensor.shape, stack.shape[1:], at):
                error = (take(stack, [range(len(stack)), *indices]) - tensor).abs()
                if (error.reshape(len(stack), -1).amax(1) <= most).any():
                    found = [d for d, of in enumerate(indices) if len(of) < stack.shape[1 + d]]
                    if not found:
                        return found
        return found

    def parts(self, shape: torch.Size, whole: torch.Size, at: Here) -> Iterator[Indices]:
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
                if size in self.num_layers:  # something of each layer, of those of a stage
                    of_dim += [range(i, i + n) for i in range(size - n + 1)]
            choices.append([indices for indices in of_dim if len(indices) == n])
        return product(*choices)
