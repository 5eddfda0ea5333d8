"""Pipeline plans with messages, played on paper: for exercise 15.

`play` lets both ends of a message wait for each other, the strictest of all networks. `time_of`
lets messages travel once both ends are posted.
"""

import torch

from exercises.ranks import Rank
from exercises.world import Deadlock
from picotron_min.pipeline_schedule import Action, Plan

Stages = dict[tuple[int, int], int]  # rank, chunk -> stage
Item = tuple[str, int, int]  # F or B, micro-batch, stage: what is computed there


def made(action: Action, rank: int, stages: Stages) -> Item | None:
    """What an action computes; what a send sends; None for receives and W."""
    kind = action.kind.value
    if kind == "W" or kind.startswith("receive"):
        return None
    return kind[-1], action.micro_batch, stages[rank, action.chunk]


def needed(action: Action, rank: int, stages: Stages) -> Item | None:
    """What must be on the rank before an action: of the stage before, on the way of F or of B."""
    kind, i, stage = action.kind.value, action.micro_batch, stages[rank, action.chunk]
    if kind == "W":
        return "B", i, stage
    if kind.startswith("send"):
        return kind[-1], i, stage
    if kind[-1] == "F":
        return ("F", i, stage - 1) if stage else None
    is_last = stage == max(stages.values())
    return ("F", i, stage) if is_last else ("B", i, stage + 1)


def play(plans: list[Plan], stages: Stages) -> str:
    """What is wrong with the plans; Deadlock where ranks wait for each other in a circle."""
    heads, here = [0] * len(plans), [set() for _ in plans]

    def head(rank: int) -> Action | None:
        return plans[rank][heads[rank]] if heads[rank] < len(plans[rank]) else None

    moved = True
    while moved:
        moved = False
        for rank in range(len(plans)):
            while action := head(rank):
                item = needed(action, rank, stages)
                receives = action.kind.value.startswith("receive")
                if item and not receives and item not in here[rank]:
                    return f"rank {rank}: '{action}' comes before what it needs is there"
                if action.peer is not None:
                    other = head(action.peer)
                    if not other or not _fit(action, rank, other, stages):
                        break
                    here[rank if receives else action.peer].add(_item_of(action, rank, stages))
                    heads[action.peer] += 1
                elif action.kind.value != "W":
                    here[rank].add(made(action, rank, stages))
                heads[rank] += 1
                moved = True
    return _why_none_moves([head(rank) for rank in range(len(plans))], stages)


def _why_none_moves(heads: list[Action | None], stages: Stages) -> str:
    """Nothing if all plans have ended; messages that do not match; else raises Deadlock."""
    for rank, action in enumerate(heads):
        other = heads[action.peer] if action else None
        if action and not other:
            return f"rank {rank}: '{action}' has no other end: rank {action.peer} has ended"
        kinds = {a.kind.value.split()[0] for a in (action, other) if a}
        if other and other.peer == rank and kinds == {"send", "receive"}:
            return f"rank {rank}: '{action}' meets '{other}' of rank {action.peer}"
    if any(heads):
        raise Deadlock(_circle(heads))
    return ""


def _item_of(message: Action, rank: int, stages: Stages) -> Item | None:
    return needed(message, rank, stages)  # of a send, what it sends; of a receive, what it brings


def _fit(action: Action, rank: int, other: Action, stages: Stages) -> bool:
    """Whether both are ends of one message."""
    kinds = {action.kind.value.split()[0], other.kind.value.split()[0]}
    if other.peer != rank or kinds != {"send", "receive"}:
        return False
    return _item_of(action, rank, stages) == _item_of(other, action.peer, stages)


def _circle(heads: list[Action | None]) -> str:
    path = [next(rank for rank, action in enumerate(heads) if action)]
    while path[-1] not in path[:-1]:
        path.append(heads[path[-1]].peer)
    start = path.index(path[-1])
    return f"rank {path[start]} " + ", which ".join(f"waits to {heads[r]}" for r in path[start:-1])


def time_of(plans: list[Plan], stages: Stages, send_time: float) -> float:
    """The makespan, where a message travels once both its ends are posted: F 1, B 2 or B 1, W 1."""
    splits = any(action.kind.value == "W" for plan in plans for action in plan)
    times = {"F": 1.0, "B": 1.0 if splits else 2.0, "W": 1.0}
    clock, heads = [0.0] * len(plans), [0] * len(plans)
    posted: dict[tuple[Item, str], float] = {}  # an item, send or receive -> when
    ended: dict[tuple[Item, int], float] = {}  # an item -> when it is on a rank
    while any(heads[rank] < len(plan) for rank, plan in enumerate(plans)):
        for rank, plan in enumerate(plans):
            while heads[rank] < len(plan):
                action = plan[heads[rank]]
                item = needed(action, rank, stages)
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
                    if thing := made(action, rank, stages):
                        ended[thing, rank] = clock[rank]
                heads[rank] += 1
    return max(clock)


def run_messages(rank: Rank, plan: Plan, stages: Stages) -> dict[str, float]:
    """Run a rank's plan on the simulated network, where both ends of a message wait.

    Each action adds 1 to what it gets, and returns it by its name: that of F0 begins at 0, of F1 at
    1000, ...
    """
    collectives, axis = rank.course.collectives, rank.axis("pp")
    values, numbers = {}, {}
    for action in plan:
        item = needed(action, rank.number, stages)
        if action.kind.value.startswith("send"):
            collectives.start_send(values[item], axis, action.peer).wait()
        elif action.peer is not None:
            values[item] = torch.zeros(1, dtype=torch.float64)
            collectives.start_receive(values[item], axis, action.peer).wait()
        else:
            i = action.micro_batch
            start = values[item] + 1 if item else torch.tensor([1000.0 * i], dtype=torch.float64)
            values[made(action, rank.number, stages)] = start
            numbers[f"{action.kind.value}{i}.{action.chunk}"] = start.item()
    return numbers
