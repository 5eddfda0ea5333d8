"""First: all that the ranks have noted, beside the right run, and the first of it that is wrong.

The order is that of the right run: phases, then tensors as it computed them, step after step. One
tolerance serves all: in float64 right layouts differ by 1e-12 of a tensor's largest number at most
(AdamW's weights), and the rounding of float32 is 3e-8.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from difference.places import Here, Indices, here, indices_of, take
from difference.records import PHASES, Key
from difference.runs import RankRun
from difference.tiny import Trial
from difference.whole import Whole

TOLERANCE = 1e-9  # of the whole tensor's largest number


class Compared(NamedTuple):
    """A tensor of a rank, beside what it should be."""

    key: Key
    at: Here
    got: Tensor
    right: Tensor
    indices: Indices  # of the right whole
    error: float  # of the whole tensor's largest number
    ran: list[str]  # functions: see records.py
    running: list[str]

    @property
    def is_wrong(self) -> bool:
        return not self.error <= TOLERANCE  # NaN is wrong


class Found(NamedTuple):
    """What comes first among all that is wrong."""

    wrong: list[Compared]  # the same tensor on several ranks, or in several micro-batches
    num_right: int  # tensors before it, on all ranks
    others: list[Compared]  # also wrong, in the same phase and step
    num_wrong: int


def compare(trial: Trial, whole: Whole, runs: list[RankRun]) -> list[Compared]:
    """Every record of every rank, in the order in which the ranks wrote them."""
    found = []
    for rank, run in enumerate(runs):
        at, notes = here(rank, trial.layout), {}
        for key, got, *ran, note in run.records:
            if key.phase == "initial":
                notes[key.name] = note
            right = torch.tensor(at[1:5]) if key.phase == "built" else whole.get(key)
            is_loss = key[1:3] == ("forward", "loss")
            if right is None or (is_loss and not right.ndim and trial.layout.cp > 1):
                # It has no tap in the right run; or it is a part of what an extension has summed
                # over whole sequences: the step's loss, of all ranks, is compared.
                continue
            of = notes.get(key.name.split(" of ")[-1])
            indices = indices_of(key, right.shape, at, trial.layout, of)
            part = take(right, indices)
            if is_loss:  # of each token in the right run
                part, indices = part.sum(), []
            error = error_of(got, part, right)
            found.append(Compared(key, at, got, part, indices, error, *ran))
    return found


def error_of(got: Tensor, right: Tensor, whole: Tensor) -> float:
    """The largest difference, as a part of the whole tensor's largest number."""
    if got.shape != right.shape:
        return float("inf")
    difference = (got - right).abs()
    if not difference.any():
        return 0.0  # both may be zero, or empty
    return float(difference.max() / whole.abs().max().clamp(min=1e-300))


def first(compared: list[Compared], whole: Whole) -> Found | None:
    """None if nothing is wrong."""
    tensors = {key[1:3]: i for i, key in reversed([*enumerate(whole)])}  # of all micro-batches

    def place(one: Compared) -> tuple:
        step, phase, *_ = one.key
        return step, PHASES.index(phase), tensors.get(one.key[1:3], 0)

    wrong = sorted((one for one in compared if one.is_wrong), key=place)
    if not wrong:
        return None
    least = place(wrong[0])
    mine = [one for one in wrong if place(one) == least]
    others = [one for one in wrong[len(mine) :] if place(one)[:2] == least[:2]]
    return Found(mine, sum(place(one) < least for one in compared), others, len(wrong))
