"""Pipeline plans with messages, for exercise 15: run on simulated ranks, and timed."""

import torch

from exercises.ranks import Rank
from picotron_min.pipeline_schedule import Action, Plan

Stages = dict[tuple[int, int], int]  # rank, chunk -> stage
Item = tuple[str, int, int]  # F or B, micro-batch, stage: what is computed there


def made(action: Action, rank: int, stages: Stages) -> Item | None:
    """What an action computes; None for W."""
    kind = action.kind.value
    return None if kind == "W" else (kind, action.micro_batch, stages[rank, action.chunk])


def needed(action: Action, rank: int, stages: Stages) -> Item | None:
    """What an action begins with, a send sends, and a receive brings: F or B of a stage."""
    kind, i, stage = action.kind.value, action.micro_batch, stages[rank, action.chunk]
    if kind == "W":
        return "B", i, stage
    if kind.startswith("send"):
        return kind[-1], i, stage
    if kind[-1] == "F":
        return ("F", i, stage - 1) if stage else None
    is_last = stage == max(stages.values())
    return ("F", i, stage) if is_last else ("B", i, stage + 1)


def run_messages(
    rank: Rank, plan: Plan, stages: Stages, send_time: float
) -> tuple[dict[str, float], float]:
    """Run a rank's plan on the simulated network, where both ends of a message wait.

    Each action adds 1 to what it gets, and returns it by its name: that of F0 begins at 0, of F1 at
    1000, ... Also the time on paper when the rank ends: F takes 1, B 2, or B 1 and W 1. A message
    travels once both its ends are posted, and carries with it when it was sent.
    """
    collectives, axis = rank.course.collectives, rank.axis("pp")
    splits = any(action.kind.value == "W" for action in plan)
    times = {"F": 1.0, "B": 1.0 if splits else 2.0, "W": 1.0}
    values, numbers, clock = {}, {}, 0.0  # an item -> its number, and when it is here
    for action in plan:
        item, kind = needed(action, rank.number, stages), action.kind.value
        if kind.startswith("receive"):
            message = torch.zeros(2, dtype=torch.float64)
            collectives.start_receive(message, axis, action.peer).wait()
            number, posted = message.tolist()
            values[item] = number, max(posted, clock) + send_time
            continue
        if item and item not in values:
            raise ValueError(f"'{action}' comes before what it needs is there")
        number, ready = values[item] if item else (1000.0 * action.micro_batch - 1, 0.0)
        if action.peer is not None:
            message = torch.tensor([number, clock], dtype=torch.float64)
            collectives.start_send(message, axis, action.peer).wait()
        else:
            clock = max(clock, ready) + times[kind]
            values[made(action, rank.number, stages)] = number + 1, clock
            numbers[f"{kind}{action.micro_batch}.{action.chunk}"] = number + 1
    return numbers, clock
