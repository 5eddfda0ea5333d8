"""Pipeline schedules: what each rank computes in a step, as a plain list.

The layers are cut into stages. A rank has one, or several: its chunks. A micro-batch runs forward
through all stages and its gradient runs back; a rank with nothing to compute is in the *bubble*:

    rank 0  F0F1F2F3······B0══B1══B2══B3══
    rank 1  ··F0F1F2F3B0══B1══B2══B3══····    AFAB: all 4 micro-batches are alive at once

    rank 0  F0F1····B0══F2B1══F3B2══··B3══
    rank 1  ··F0B0══F1B1══F2B2══F3B3══····    1F1B takes as long, but at most 2 are alive

With one stage 1F1B *is* gradient accumulation, F0 B0 F1 B1 ...: there is only one kind of step.
F0.1 is micro-batch 0 through a rank's second chunk. pipeline_messages.py adds sends and receives,
pipeline_parallel.py runs plans, and
`python -m picotron_min.runtime.draw --engine 1f1b --stages 4 --microbatches 8` draws them.

Cost: two messages per micro-batch and boundary between stages.
Standard library only: a plan can be checked and drawn without any process.
"""

from collections.abc import Callable
from enum import Enum
from itertools import accumulate, zip_longest
from typing import NamedTuple


class Kind(Enum):
    FORWARD = "F"
    BACKWARD = "B"
    WEIGHT = "W"
    SEND_ACTIVATION = "send F"
    RECEIVE_ACTIVATION = "receive F"
    SEND_GRADIENT = "send B"
    RECEIVE_GRADIENT = "receive B"

    __hash__ = object.__hash__  # Enum's is written in Python, and plans are looked up by actions


# No other rank waits for weight gradients: W is neither sent nor received.
SENDS = {Kind.FORWARD: Kind.SEND_ACTIVATION, Kind.BACKWARD: Kind.SEND_GRADIENT}
RECEIVES = {Kind.FORWARD: Kind.RECEIVE_ACTIVATION, Kind.BACKWARD: Kind.RECEIVE_GRADIENT}


class Action(NamedTuple):
    """One thing that a rank does: it computes, or posts its end of a message."""

    kind: Kind
    micro_batch: int
    chunk: int = 0  # of this rank; for a message, the one that made it or that needs it
    peer: int | None = None  # the rank at the other end of a message

    def __str__(self) -> str:
        name = f"{self.kind.value}{self.micro_batch}" + (f".{self.chunk}" if self.chunk else "")
        if self.peer is None:
            return name
        return f"{name} {'to' if self.kind in SENDS.values() else 'from'} rank {self.peer}"


Plan = list[Action]  # of one rank
Place = Callable[[int, int], tuple[int, int]]  # (stage, ranks) -> its rank, its chunk there


def splits_backward(plan: Plan) -> bool:
    """Whether a plan has W: then its B are only a part of backward."""
    return any(action.kind is Kind.WEIGHT for action in plan)


def afab(rank: int, ranks: int, num_micro_batches: int, chunks: int = 1) -> Plan:
    """All forwards, then all backwards (Huang et al. 2019, "GPipe"; chunks: Lamy-Poirier 2023)."""
    return alternating([num_micro_batches], chunks, warmup=num_micro_batches * chunks)


def one_f_one_b(rank: int, ranks: int, num_micro_batches: int, chunks: int = 1) -> Plan:
    """A forward and a backward in turn, once there are gradients (Narayanan et al. 2021, 2.2.1)."""
    return alternating([num_micro_batches], chunks, warmup=ranks - rank - 1)  # one a later rank


def alternating(sizes: list[int], chunks: int, warmup: int) -> Plan:
    """The first `warmup` forwards, then a forward and a backward in turn while there are both.

    Groups of micro-batches, of the given sizes, run through all chunks one after the other.
    """
    forwards, backwards = [], []
    for size, end in zip(sizes, accumulate(sizes), strict=True):
        group = range(end - size, end)
        forwards += [Action(Kind.FORWARD, i, c) for c in range(chunks) for i in group]
        backwards += [Action(Kind.BACKWARD, i, c) for c in reversed(range(chunks)) for i in group]
    plan = forwards[:warmup]
    for pair in zip_longest(forwards[warmup:], backwards):
        plan += [action for action in pair if action]
    return plan


def bubble(ranks: int, num_micro_batches: int, chunks: int = 1) -> float:
    """Of a schedule without W: (p - 1) / (m v + p - 1), but larger if m < p and v > 1."""
    # The last rank waits p - 1 forwards for its first input, rank 0 p - 1 backwards for the last
    # gradient.
    slots = max(num_micro_batches, ranks) * chunks + min(num_micro_batches, ranks) - 1
    return 1 - num_micro_batches * chunks / slots


def loop(stage: int, ranks: int) -> tuple[int, int]:
    """The rank and chunk of a stage, in turn over the ranks: 0 1 0 1 for 2 ranks with 2 chunks."""
    return stage % ranks, stage // ranks


class Schedule(NamedTuple):
    """All that is needed to draw a schedule, to test it and to train with it."""

    # Both of rank, ranks, micro-batches, chunks. A stage runs its backwards in the order of the
    # micro-batches: so all schedules add up the same gradients in the same order.
    plan: Callable[[int, int, int, int], Plan]
    live_activations: Callable[[int, int, int, int], int]  # alive at once, by formula
    about: str  # p ranks, m micro-batches, v chunks
    bubble: Callable[[int, int, int], float] = bubble  # of ranks, micro-batches, chunks
    place: Place = loop
    chunks: int = 1  # stages of a rank, by default
    fixed_chunks: bool = False  # whether that is the only choice
    splits_backward: bool = False  # whether plans have W


SCHEDULES = {
    "afab": Schedule(
        afab,
        lambda rank, p, m, v: m * v,
        about="all forwards first: bubble (p-1) / (mv + p-1) for m >= p, live activations mv",
    ),
    "1f1b": Schedule(
        one_f_one_b,
        lambda rank, p, m, v: min(m, p - rank),
        about="backwards early: bubble (p-1) / (m + p-1), live activations min(m, p - rank)",
        fixed_chunks=True,
    ),
}


def stages_of(schedule: Schedule, rank: int, ranks: int, chunks: int) -> list[int]:
    """The stages of a rank, in the order of its chunks."""
    return [s for s in range(ranks * chunks) if schedule.place(s, ranks)[0] == rank]


def ends_share_rank(schedule: Schedule, ranks: int, chunks: int) -> bool:
    """Whether the first and the last stage are on one rank."""
    return schedule.place(0, ranks)[0] == schedule.place(ranks * chunks - 1, ranks)[0]
