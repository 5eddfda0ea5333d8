"""Pipeline schedules as data: what one rank does in a step, as a plain list.

A schedule is a pure function of (rank, ranks, micro-batches). The interpreter that runs the list is
in pipeline_parallel.py. With one stage, 1F1B *is* gradient accumulation, F0 B0 F1 B1 ..., so there
is no second way to train that could disagree with the pipelined one.

Standard library only: a schedule can be looked at, and tested, without torch.
"""

from collections.abc import Callable
from enum import Enum
from typing import NamedTuple


class Kind(Enum):
    FORWARD = "F"
    BACKWARD = "B"


class Action(NamedTuple):
    kind: Kind
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind.value}{self.micro_batch}"


def afab(rank: int, ranks: int, num_micro_batches: int) -> list[Action]:
    """All forwards, then all backwards: every micro-batch's activations live at once.

    Source: Huang et al. 2019, "GPipe", section 2.3.
    """
    return forward_only(num_micro_batches) + [
        Action(Kind.BACKWARD, i) for i in range(num_micro_batches)
    ]


def one_f_one_b(rank: int, ranks: int, num_micro_batches: int) -> list[Action]:
    """After a warm-up, one forward and one backward in turn: at most `ranks - rank` live at once.

    Source: Narayanan et al. 2021, "Efficient Large-Scale Language Model Training", section 2.2.1.
    """
    warmup = min(ranks - rank - 1, num_micro_batches)
    plan = [Action(Kind.FORWARD, i) for i in range(warmup)]
    for i in range(num_micro_batches):
        if warmup + i < num_micro_batches:
            plan.append(Action(Kind.FORWARD, warmup + i))
        plan.append(Action(Kind.BACKWARD, i))
    return plan


def forward_only(num_micro_batches: int) -> list[Action]:
    """Evaluation."""
    return [Action(Kind.FORWARD, i) for i in range(num_micro_batches)]


ENGINES: dict[str, Callable[[int, int, int], list[Action]]] = {
    "afab": afab,
    "1f1b": one_f_one_b,
}
