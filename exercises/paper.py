"""Pipeline plans with messages, for exercise 15: run on simulated ranks, and timed on paper."""

import math

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


def time_of(plans: list[Plan], stages: Stages, send_time: float) -> float:
    """The makespan, where a message travels once both its ends are posted: F 1, B 2 or B 1, W 1.

    Infinite where something that is needed never comes.
    """
    splits = any(action.kind.value == "W" for plan in plans for action in plan)
    times = {"F": 1.0, "B": 1.0 if splits else 2.0, "W": 1.0}
    clock, left = [0.0] * len(plans), [[*plan] for plan in plans]
    posted: dict[tuple[Item, str], float] = {}  # an item, send or receive -> when
    ended: dict[tuple[Item, int], float] = {}  # an item -> when it is on a rank
    moved = True
    while moved:
        moved = False
        for rank, rest in enumerate(left):
            while rest:
                action, item = rest[0], needed(rest[0], rank, stages)
                if action.peer is not None:
                    end = action.kind.value.split()[0]
                    posted[item, end] = clock[rank]
                    both = [posted.get((item, e)) for e in ("send", "receive")]
                    if None not in both:
                        to = rank if end == "receive" else action.peer
                        ended[item, to] = max(both) + send_time
                elif item and (item, rank) not in ended:
                    break
                else:
                    ready = ended.get((item, rank), 0.0)
                    clock[rank] = max(clock[rank], ready) + times[action.kind.value]
                    ended[made(action, rank, stages), rank] = clock[rank]
                del rest[0]
                moved = True
    return math.inf if any(left) else max(clock)


def run_messages(rank: Rank, plan: Plan, stages: Stages) -> dict[str, float]:
    """Run a rank's plan on the simulated network, where both ends of a message wait.

    Each action adds 1 to what it gets, and returns it by its name: that of F0 begins at 0, of F1 at
    1000, ...
    """
    collectives, axis = rank.course.collectives, rank.axis("pp")
    values, numbers = {}, {}
    for action in plan:
        item = needed(action, rank.number, stages)
        if action.kind.value.startswith("receive"):
            values[item] = torch.zeros(1, dtype=torch.float64)
            collectives.start_receive(values[item], axis, action.peer).wait()
            continue
        if item and item not in values:
            raise ValueError(f"'{action}' comes before what it needs is there")
        if action.peer is not None:
            collectives.start_send(values[item], axis, action.peer).wait()
        else:
            i = action.micro_batch
            start = values[item] + 1 if item else torch.tensor([1000.0 * i], dtype=torch.float64)
            values[made(action, rank.number, stages)] = start
            numbers[f"{action.kind.value}{i}.{action.chunk}"] = start.item()
    return numbers
