"""Pipeline schedules as data: what each rank does in a step, as a plain list.

The layers are cut into stages, one behind the other; a micro-batch runs forward through all of them
and its gradient runs back. Where a rank has nothing to work on is the *bubble*:

    time -->
    rank 0  F0 F1 F2 F3                   B0    B1    B2    B3       AFAB, 4 micro-batches, 2 ranks
    rank 1     F0 F1 F2 F3 B0    B1    B2    B3

    rank 0  F0 F1       B0    F2 B1    F3 B2       B3                1F1B: just as long, but only
    rank 1     F0 B0    F1 B1    F2 B2    F3 B3                      2 micro-batches alive, not 4

A schedule is a pure function of (rank, ranks, micro-batches, chunks). `insert_communication` adds
the sends and receives, `simulate` runs plans on paper, the interpreter in pipeline_parallel.py runs
them on tensors. With one stage 1F1B *is* gradient accumulation, F0 B0 F1 B1 ..., so there is no
second way to train that could disagree with the pipelined one. A rank may hold several stages, its
*chunks*: stage s lives on rank s % ranks as chunk s // ranks.

Look at one:  python -m picotron_min.pipeline_schedule --engine 1f1b --stages 4 --microbatches 8

Cost: a boundary between stages sends one activation, and one gradient of its shape, a micro-batch;
chunks multiply the boundaries. In production: `torch.distributed.pipelining`.
Standard library only: a schedule can be looked at, and tested, without torch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from itertools import zip_longest
from typing import NamedTuple


class Kind(Enum):
    FORWARD = "F"
    BACKWARD = "B"
    SEND_ACTIVATION = "send F"
    RECEIVE_ACTIVATION = "receive F"
    SEND_GRADIENT = "send B"
    RECEIVE_GRADIENT = "receive B"


SENDS = {Kind.FORWARD: Kind.SEND_ACTIVATION, Kind.BACKWARD: Kind.SEND_GRADIENT}
RECEIVES = {Kind.FORWARD: Kind.RECEIVE_ACTIVATION, Kind.BACKWARD: Kind.RECEIVE_GRADIENT}


class Action(NamedTuple):
    """One thing that a rank does. A receive carries the chunk that will use what is received."""

    kind: Kind
    micro_batch: int
    chunk: int = 0
    peer: int | None = None  # the rank at the other end of a send or receive

    def __str__(self) -> str:
        name = f"{self.kind.value}{self.micro_batch}" + (f".{self.chunk}" if self.chunk else "")
        if self.peer is None:
            return name
        return f"{name} {'to' if self.kind in SENDS.values() else 'from'} rank {self.peer}"


Plan = list[Action]


def afab(rank: int, ranks: int, num_micro_batches: int, chunks: int = 1) -> Plan:
    """All forwards, then all backwards: every micro-batch's activations live at once.

    Source: Huang et al. 2019, "GPipe", section 2.3; with chunks it is Lamy-Poirier 2023,
    "Breadth-First Pipeline Parallelism".
    """
    return forward_only(num_micro_batches, chunks) + [
        Action(Kind.BACKWARD, i, c) for c in reversed(range(chunks)) for i in range(num_micro_batches)
    ]


def one_f_one_b(rank: int, ranks: int, num_micro_batches: int, chunks: int = 1) -> Plan:
    """After a warm-up, one forward and one backward in turn: at most `ranks - rank` live at once.

    Source: Narayanan et al. 2021, "Efficient Large-Scale Language Model Training", section 2.2.1.
    """
    if chunks != 1:
        raise ValueError(f"1f1b has 1 chunk a rank, not {chunks}: use interleaved, or 1 chunk")
    forwards = forward_only(num_micro_batches)
    backwards = [Action(Kind.BACKWARD, i) for i in range(num_micro_batches)]
    return _warm_up_then_alternate(forwards, backwards, warmup=ranks - rank - 1)


def interleaved(rank: int, ranks: int, num_micro_batches: int, chunks: int = 2) -> Plan:
    """1F1B over chunks: the bubble is `chunks` times smaller, there are as many times more sends.

    Micro-batches go in groups: a group runs through the first chunk, then through the second, ...
    A group of at least `ranks` is never waited for: its first micro-batch has been round all ranks
    and is back by the time the last one has started. So where `ranks` does not divide the number of
    micro-batches, the groups are made larger, not the last one smaller; the largest come first,
    because the warm-up is counted for the first group and has to suffice for all.

    The warm-up has two forwards for each rank that follows, where 1F1B has one. That many more
    micro-batches in flight are what hides the time of sends.

    Source: Narayanan et al. 2021, section 2.2.2 (which wants `ranks` to divide the micro-batches).
    """
    num_groups = max(1, num_micro_batches // ranks)
    forwards, backwards = [], []
    for g in range(num_groups):
        group = range(num_micro_batches)[g::num_groups]
    raise NotImplementedError


def forward_only(num_micro_batches: int, chunks: int = 1) -> Plan:
    """Evaluation."""
    return [Action(Kind.FORWARD, i, c) for c in range(chunks) for i in range(num_micro_batches)]
