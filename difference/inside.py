"""Inside: what your own functions, and the router's, compute beside the same in one process.

The course's model has taps at known places. Of a function of your extension nothing is known but
its tensors: those that it gets and makes are noted in both runs. A rank's tensor is right where the
one process has it, in the same micro-batch; where it is a part of one; and where the ranks of an
axis add up to one. A function that gets right tensors and makes a wrong one is guilty. This never
raises an alarm: a right extension may also have tensors that one process does not have.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import product
from math import inf

import torch
from torch import Tensor

from difference.algebra import FITS, REDUCTIONS, same
from difference.calls import TOTAL, Call, calls_of, counts_of
from difference.compare import Comparison
from difference.places import Here, Indices, along, chunk, positions, take
from difference.taps import INSIDE, LAYER, MOST_NUMBERS, RESULT, Record

AFTER = ".updated", ".weights_changed"  # methods of extensions that run once a step
USED_LATER = (*AFTER, ".counts")  # what they make cannot change this step's loss or norm
# Activations are noted one by one; of all else, what is noted together.
AT_ONCE = ("summed gradient",), ("scaled gradient",), ("built", "initial")
LATE = ("loss", "gradient norm", "optimizer state", "biases of routers", "weights")
AT_ONCE += LATE, ("measure", "scaled gradient", *LATE)


class Inside:
    """All ranks' calls of your functions, beside the tensors of one process."""

    def __init__(self, both: Comparison) -> None:
        self.both, self.layout, config = both, both.trial.layout, both.trial.model_config
        self.num_layers = {config.num_hidden_layers, config.num_layers} - {1}
        of_ranks = {(one.at, one.key.name) for one in both.all}
        self.num_layers_of = Counter(at for at, name in of_ranks if re.fullmatch(LAYER, name))
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
        self.before, self.since, self.late = self._before_the_first()

    def _before_the_first(self) -> tuple[list, list, list]:
        """Calls that can have made the first wrong tensor: up to the last right tap, and since.

        And, if it is in a later step, calls of this step: they may have read what an update had
        left wrong.
        """
        first, before, since, late = self.both.first[0].key, [], [], []
        at_once = next((phases for phases in AT_ONCE if first.phase in phases), ())
        for at in dict.fromkeys([*(one.at for one in self.both.first), *self.both.ranks]):
            mine = [one for one in self.both.all if one.at is at]
            end = min((one.when for one in mine if one.is_wrong), default=inf)
            rights = (o.when for o in mine if o.when < end and o.key.phase not in at_once)
            last_right = max(rights, default=0)
            for call in self.calls[at.rank]:
                is_late = first.step and call.key.step == first.step
                is_used_later = first.phase in ("loss", "gradient norm") and call.is_in(USED_LATER)
                if call.when < end and not (is_used_later and call.key.step == first.step):
                    of = late if is_late else since if call.when > last_right else before
                    of.append((call, at))
            if end < inf and not first.step:  # those that still run: what they gave to others
                until = calls_of(self.both.runs[at.rank][:end])
                since += [(call, at) for call in until if not call.ended]
        return before, since, late

    def guilty(self) -> Iterator[tuple[Call, Here]]:
        """The calls that get right tensors and make wrong ones.

        Those since the last right tap come first: what is guilty before it may be harmless.
        """
        before = [pair for pair in self.before if self._is_guilty(*pair)]
        harmless = {call.key.name for call, _ in before}
        since = (pair for pair in self.since if pair[0].key.name not in harmless)
        yield from (pair for pair in since if self._is_guilty(*pair))
        if self.both.first[0].key.phase in ("forward", "backward", "summed gradient"):
            yield from before

    def guilty_later(self) -> Iterator[tuple[Call, Here]]:
        """Those of a later step: they count where no update is guilty."""
        yield from (pair for pair in self.late if self._is_guilty(*pair))

    def _is_guilty(self, call: Call, at: Here) -> bool:
        """Of a sum over ranks nothing is known where one of them has got what is wrong."""
        if all(self.is_right(v, tensor, call, at) for v, tensor in self.made(call, at).items()):
            return False
        beside = (other for other in self.both.ranks if other[1:3] == at[1:3])  # of pp and dp
        calls = [(self.call_of(call, other), other) for other in beside]
        got = ((v, t, c, other) for c, other in calls if c for v, t in c.got.items())
        return all(self.is_right(*one) for one in got if not one[0].startswith("self."))

    def made(self, call: Call, at: Here) -> dict[str, Tensor]:
        """What a call makes; of what its object keeps, that which was right before.

        Without what one process has in another shape, such as each rank's sum of what it has.
        """
        kept = {v for v in call.made if v.startswith("self.")}
        old = {v: t for v, t in call.got.items() if v in kept and not self.is_right(v, t, call, at)}
        known = {v: t for v, t in call.made.items() if v not in kept or v in call.got.keys() - old}
        rights = [right.made for right in self.right_calls if right.key == call.key]
        known = {v: t for v, t in known.items() if self.is_comparable(t, v, rights, at)}
        return {
            v: t for v, t in known.items() if v in kept or not self._is_right_elsewhere(v, call, at)
        }

    def _is_right_elsewhere(self, variable: str, call: Call, at: Here) -> bool:
        """On another stage: a loop over a stage's layers leaves a variable of its last layer."""
        stages = [o for o in self.both.ranks if o[2:] == at[2:] and o.pp != at.pp]
        others = [(self.call_of(call, o), o) for o in stages if call.key.name.endswith(AFTER)]
        sides = ((variable, c.made[variable], c, o) for c, o in others if c and variable in c.made)
        return any(self.is_right(*side) for side in sides)

    def is_comparable(self, tensor: Tensor, variable: str, rights: list[dict], at: Here) -> bool:
        wholes = [made[variable].shape for made in rights if variable in made]
        return not wholes or any([*self.parts(tensor.shape, of, at)] for of in wholes)

    def is_right(self, variable: str, tensor: Tensor, call: Call, at: Here) -> bool:
        # What is handed on may be a part of whatever the other function reduces it to.
        given = call.got.get(variable)
        reductions = REDUCTIONS if " of " in variable else ("sum",)
        if given is not None and same(given, tensor):
            reductions = "sum", "maximum"
        is_there = self.place(tensor, call, at) is not None
        return is_there or bool(self.part_of(tensor, variable, call, at, *reductions))

    def part_of(self, tensor: Tensor, variable: str, call: Call, at: Here, *reductions: str) -> str:
        """Of what it is a rank's part: "a sum over tp"; the reduction gives a right tensor."""
        for axes, row in self.rows(tensor, variable, call, at):
            are_alike = tensor.numel() > 1 and all(same(t, tensor) for t in row.values())
            for name in reductions or ("sum",):
                if are_alike and "sum" in name:  # divided ones add up to ones by accident
                    continue
                # Each rank's is a mean of its layers, and stages may have unlike numbers of them.
                times = self.num_layers_of if name == "mean" and "pp" in axes else {}
                of_ranks = [one for o, one in row.items() for _ in range(times.get(o, 1))]
                if self.place(REDUCTIONS[name](of_ranks), call, at) is not None:
                    return f"a {name} over {axes}"
        return ""

    def rows(
        self, tensor: Tensor, variable: str, call: Call, at: Here
    ) -> Iterator[tuple[str, dict[Here, Tensor]]]:
        """For some axes, what each of their ranks has of a variable in the same call."""
        is_end = call.made.get(variable) is tensor
        for axes, ranks in along(at, self.both.ranks):
            calls = {other: self.call_of(call, other) for other in ranks}
            sides = {o: (c.made if is_end else c.got).get(variable) for o, c in calls.items() if c}
            alike = {o: t for o, t in sides.items() if t is not None and t.shape == tensor.shape}
            if len(alike) == len(ranks):
                yield axes, alike

    def call_of(self, call: Call, at: Here) -> Call | None:
        """The same call on another rank; between micro-batches all have dp 0."""
        found = self.found[at.rank]
        between = found.get((call.key, call.which))
        return found.get((call.key._replace(dp=at.dp), call.which), between)

    def place(self, tensor: Tensor, call: Call, at: Here) -> list[int] | None:
        """Where the one process has it in the same micro-batch: dims along which it is a part.

        So [] if it is a whole tensor; None if it is none, and no part of one.
        """
        if not tensor.isfinite().all():
            return None
        most, found = FITS * tensor.abs().max(), None
        for stack in self.pool.get((call.key.step, *call.key[3:]), ()):
            for indices in self.parts(tensor.shape, stack.shape[1:], at):
                first = stack[(slice(None), *(of[0] for of in indices))]  # of each: rules most out
                near = stack[(first - tensor.flatten()[0]).abs() <= most]
                error = (take(near, [range(len(near)), *indices]) - tensor).abs()
                if len(near) and (error.reshape(len(near), -1).amax(1) <= most).any():
                    found = [d for d, of in enumerate(indices) if len(of) < stack.shape[1 + d]]
                    if not found:
                        return found
        return found

    def has_part(self, tensor: Tensor, whole: Tensor, at: Here) -> bool:
        parts = self.parts(tensor.shape, whole.shape, at)
        return any(same(tensor, take(whole, indices)) for indices in parts)

    def parts(self, shape: torch.Size, whole: torch.Size, at: Here) -> Iterator[Indices]:
        """The ways in which a tensor of this shape can be a rank's part of a whole one."""
        if len(shape) != len(whole):
            return iter(())
        choices = []
        for n, size in zip(shape, whole, strict=True):
            of_dim = [range(size)]
            if n < size:
                axes = ["tp", "ep", "etp", *["dp"] * (self.layout.sharding != "none")]
                of_dim = [chunk(of_dim[0], getattr(at, a), getattr(self.layout, a)) for a in axes]
                if size % (2 * self.layout.cp) == 0:
                    own = positions(at, self.layout, size)
                    of_dim += [own, chunk(own, at.tp, self.layout.tp)]  # of a sequence
                if size in self.num_layers:  # something of each layer, of a stage's layers
                    of_dim += [range(i, i + n) for i in range(size - n + 1)]
            choices.append([indices for indices in of_dim if len(indices) == n])
        return product(*choices)
