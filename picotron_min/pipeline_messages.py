"""Pipeline messages: a plan gets a send and a receive wherever a result is for another rank.

    rank 0  F0 F1 B0 B1    ->    F0, send, F1, send, receive, B0, receive, B1
    rank 1  F0 B0 F1 B1    ->    receive, receive, F0, B0, send, F1, B1, send

Write ONE list of what all ranks do, in an order in which it can be done, and behind each action the
message that carries its result. A rank's plan is its part of the list. There is no deadlock, even
if both ends of a message block: all ranks of the first entry that is not done have reached it. And
two ranks have their messages in the same order, as gloo (no tags) and NCCL (one queue) need it. As
other ranks' actions lie between, a receive is posted while its rank still computes.

Standard library only.
"""

from collections import Counter
from collections.abc import Callable
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from typing import NamedTuple

from picotron_min.pipeline_schedule import (
    RECEIVES,
    SENDS,
    Action,
    Kind,
    Place,
    Plan,
    Schedule,
    loop,
    splits_backward,
)

Event = tuple[int, Action]  # a rank, and something that it does


class Span(NamedTuple):
    start: float
    end: float


def build_plans(
    schedule: Schedule, ranks: int, num_micro_batches: int, chunks: int = 1, training: bool = True
) -> list[Plan]:
    """Every rank's plan with its sends and receives; without training, the forwards only."""
    plans = [schedule.plan(rank, ranks, num_micro_batches, chunks) for rank in range(ranks)]
    if not training:
        plans = [[action for action in plan if action.kind is Kind.FORWARD] for plan in plans]
    return insert_messages(plans, schedule.place)


def insert_messages(plans: list[Plan], place: Place = loop) -> list[Plan]:
    """Add the sends and receives to the plans of all ranks, so that they cannot deadlock."""
    inputs, complete = inputs_of(plans, place), [[] for _ in plans]
    # Whose result goes to whom: one receiver each. A W needs its B's result, too, on the same rank.
    receiver_of = {
        source: event
        for event, sources in inputs.items()
        for source in sources
        if event[1].kind is not Kind.WEIGHT
    }
    # A message takes a moment. So of two ranks that would end together, the one upstream comes
    # first in the list, and the one downstream has posted its receive before it computes.
    spans = spans_of(in_order(plans, inputs), textbook_times(plans), send_time=2**-20)
    for rank, action in sorted(spans, key=lambda event: (spans[event].end, event[0])):
        complete[rank].append(action)
        peer, receiver = receiver_of.get((rank, action), (rank, None))
        if peer != rank:
            complete[rank].append(action._replace(kind=SENDS[action.kind], peer=peer))
            complete[peer].append(receiver._replace(kind=RECEIVES[action.kind], peer=rank))
    return complete


def inputs_of(plans: list[Plan], place: Place) -> dict[Event, list[Event]]:
    """What each action has its input from: the one before it on the path of its micro-batch.

    The path leads forward through all stages, and back; a W depends on its B, and nothing depends
    on a W. ValueError if it has gaps.
    """
    found = Counter((rank, action) for rank, plan in enumerate(plans) for action in plan)
    actions = [action for _, action in found if action.peer is None]
    num_stages = len(plans) * (1 + max(action.chunk for action in actions))
    path = [(Kind.FORWARD, *place(stage, len(plans))) for stage in range(num_stages)]
    if any(action.kind is Kind.BACKWARD for action in actions):  # not in evaluation
        path += [(Kind.BACKWARD, rank, chunk) for _, rank, chunk in reversed(path)]
    splits, needs = any(map(splits_backward, plans)), {}
    for i in {action.micro_batch for action in actions}:
        before = []
        for kind, rank, chunk in path:
            event = rank, Action(kind, i, chunk)
            needs[event] = before
            before = [event]
            if splits and kind is Kind.BACKWARD:
                needs[rank, Action(Kind.WEIGHT, i, chunk)] = [event]
    for rank, action in needs:
        if (times := found[rank, action]) != 1:
            problem = f"is there {times} times" if times else "is missing"
            raise ValueError(f"rank {rank}: '{action}' {problem}")
    return needs


def in_order(plans: list[Plan], inputs: dict[Event, list[Event]]) -> dict[Event, list[Event]]:
    """What each action needs: its inputs, and the action before it on its rank."""
    needs = {event: list(sources) for event, sources in inputs.items()}
    for rank, plan in enumerate(plans):
        for before, action in pairwise(action for action in plan if action.peer is None):
            needs[rank, action].append((rank, before))
    return needs


def spans_of(
    needs: dict[Event, list[Event]], time_of: Callable[[int, Action], float], send_time: float
) -> dict[Event, Span]:
    """When each action can begin and end; what comes from another rank is `send_time` on its way.

    ValueError with the circle if actions need each other in one.
    """
    try:
        order = list(TopologicalSorter(needs).static_order())
    except CycleError as error:
        circle = [f"'{action}' of rank {rank}" for rank, action in reversed(error.args[1])]
        message = f"deadlock, each waits for the next: {', '.join(circle)}"
        raise ValueError(message) from None
    spans = {}
    for event in order:
        arrivals = [spans[e].end + send_time * (e[0] != event[0]) for e in needs[event]]
        start = max(arrivals, default=0.0)
        spans[event] = Span(start, start + time_of(*event))
    return spans


def textbook_times(plans: list[Plan]) -> Callable[[int, Action], float]:
    """Forward takes 1, each of the two products of backward as well: they are of equal size."""
    backward = 1.0 if any(map(splits_backward, plans)) else 2.0
    return lambda rank, action: backward if action.kind is Kind.BACKWARD else 1.0
