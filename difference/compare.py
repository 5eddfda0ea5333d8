"""Compare: all that the ranks have noted, beside the right run, and the first that is wrong.

The order is the right run's: phases, then tensors as it computed them, step after step. One
tolerance serves all but the norm: in float64 right layouts differ by 1e-12 of a tensor's largest
number at most (AdamW's weights), the norm by 1e-14; the rounding of float32 is 3e-8.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from difference.places import Here, Indices, here, indices_of, take
from difference.taps import BUFFERS, INSIDE, NUMBERS, PHASES, Key, Record
from difference.tiny import Trial
from difference.whole import Whole
from picotron_min.loss import IGNORE_INDEX

TOLERANCE = 1e-9  # of the whole tensor's largest number
OF_THE_NORM = 2e-11  # in which a small parameter may be counted wrongly


class Compared(NamedTuple):
    """A tensor of a rank, beside what it should be."""

    key: Key
    at: Here
    got: Tensor
    right: Tensor
    indices: Indices  # of the right whole
    error: float  # of the whole tensor's largest number
    ran: list[str]  # functions: see Record
    running: list[str]
    when: int = 0  # its place among the records of its rank

    @property
    def is_wrong(self) -> bool:
        most = OF_THE_NORM if self.key.phase == "gradient norm" else TOLERANCE
        return not self.error <= most  # NaN is wrong


class Comparison:
    """Both runs, and what comes first among all that is wrong."""

    def __init__(
        self,
        trial: Trial,
        whole: Whole,
        runs: Sequence[Sequence[Record]] = (),
        makers: Mapping[str, str] = {},  # see Profile
        senders: Collection[str] = (),
    ) -> None:
        self.trial, self.whole, self.runs = trial, whole, runs
        self.makers, self.senders = makers, senders
        self.ranks = [here(rank, trial.layout) for rank in range(trial.layout.world_size)]
        self.all = [
            one for at in self.ranks[: len(runs)] for one in self._beside(at, runs[at.rank])
        ]
        order = {name: i for i, name in enumerate(dict.fromkeys(key[1:3] for key in whole))}

        def place(one: Compared) -> tuple:
            return one.key.step, PHASES.index(one.key.phase), order.get(one.key[1:3], 0)

        wrong = sorted((one for one in self.all if one.is_wrong), key=place)
        # The same tensor on several ranks, or in several micro-batches.
        self.first = [one for one in wrong if place(one) == place(wrong[0])]
        self.others = [o for o in wrong[len(self.first) :] if place(o)[:2] == place(wrong[0])[:2]]
        self.num_wrong = len(wrong)
        self.num_right = sum(place(one) < place(wrong[0]) for one in self.all) if wrong else 0

    def _beside(self, at: Here, records: Sequence[Record]) -> list[Compared]:
        """A rank's records, in the order in which it wrote them."""
        found = []
        cuts = {key.name: got.tolist() for key, got, *_ in records if key.phase == "cuts"}
        for when, (key, got, *ran) in enumerate(records):
            if key.phase in (INSIDE, NUMBERS, BUFFERS):
                continue
            right = torch.tensor(at[1:5]) if key.phase == "built" else self.whole.get(key)
            is_loss = key[1:3] == ("forward", "loss")
            if key.phase == "measure" and right is not None and not right.isfinite().all():
                continue  # nor is it a number in one process
            if right is None or (is_loss and not right.ndim and self.trial.layout.cp > 1):
                # It has no tap in the right run; or it is a part of what an extension has summed
                # over whole sequences: the step's loss, of all ranks, is compared.
                continue
            of = cuts.get(key.name.split(" of ")[-1], ())
            indices = indices_of(key, right.shape, at, self.trial.layout, of)
            part = take(right, indices)
            if is_loss:  # of each token in the right run
                part, indices = part.sum(), []
            found.append(
                Compared(key, at, got, part, indices, error_of(got, part, right), *ran, when)
            )
        return found

    def name_of(self, ranks: list[Here]) -> str:
        """All ranks, or a place on an axis that these have in common, and no others have."""
        if len(ranks) == len(self.ranks):
            return "all ranks"
        name = f"rank{'s' * (len(ranks) > 1)} {', '.join(str(at.rank) for at in ranks[:8])}"
        for axis in ("pp", "dp", "cp", "tp"):
            place = getattr(ranks[0], axis)
            if ranks == [at for at in self.ranks if getattr(at, axis) == place]:
                return f"{axis} {place} ({name})"
        return name

    def num_targets(self, step: int) -> int:
        targets = [t for k, t in self.whole.items() if k.name == "targets" and k.step == step]
        return sum(int((t != IGNORE_INDEX).sum()) for t in targets)

    def weight(self, name: str, step: int) -> Tensor:
        """A parameter at the beginning of a step."""
        step, phase = (step - 1, "weights") if step else (0, "initial")
        return self.whole[Key(step, phase, name)]


def error_of(got: Tensor, right: Tensor, whole: Tensor) -> float:
    """The largest difference, as a part of the whole tensor's largest number."""
    if got.shape != right.shape:
        return float("inf")
    difference = (got - right).abs()
    if not difference.any():
        return 0.0  # both may be zero, or empty
    return float(difference.max() / whole.abs().max().clamp(min=1e-300))
