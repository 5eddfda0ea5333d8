"""Pipeline plans on paper: messages are added to them, and the time of each rank is simulated.

    rank 0  F0 F1 B0 B1    ->    F0, send, F1, send, receive, B0, receive, B1
    rank 1  F0 B0 F1 B1    ->    receive, receive, F0, B0, send, F1, B1, send

A first reading may skip this file. What the others use of it is `build_plans`: it adds a send and a
receive wherever the next stage is on another rank. `runtime/draw.py` draws what `simulate` returns.
"""

from collections import Counter
from collections.abc import Callable
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from typing import NamedTuple

from picotron_min.pipeline_action import (
    RECEIVES,
    SENDS,
    Action,
    Kind,
    Place,
    Plan,
    splits_backward,
)
from picotron_min.pipeline_schedule import SCHEDULES, chunks_problem, loop

Event = tuple[int, Action]  # a rank, and something that it does


def build_plans(
    engine: str, ranks: int, num_micro_batches: int, chunks: int = 1, training: bool = True
) -> list[Plan]:
    """Every rank's plan with its sends and receives; without training, the forwards only."""
    if problem := chunks_problem(engine, chunks):
        raise ValueError(problem)
    schedule = SCHEDULES[engine]
    plans = [schedule.plan(rank, ranks, num_micro_batches, chunks) for rank in range(ranks)]
    if not training:
        plans = [[action for action in plan if action.kind is Kind.FORWARD] for plan in plans]
    return insert_communication(plans, schedule.place)


def insert_communication(plans: list[Plan], place: Place = loop) -> list[Plan]:
    """Add the sends and receives to the plans of all ranks, so that they cannot deadlock.

    Write ONE list of what all ranks do, in the order in which it ends, and behind each action the
    message that carries its result. A rank's plan is its part of the list. There is no deadlock,
    even if both ends of a message block: all ranks of the first entry that is not done have reached
    it. And two ranks have their messages in the same order, as gloo (no tags) and NCCL (one queue)
    need it. As other ranks' actions lie between, a receive is posted while its rank still computes.
    """
    needs, complete = _needs(plans, place), [[] for _ in plans]
    # Whose result goes to whom. W has its input from a B, too, but always on the same rank.
    ways = {event: sources for event, sources in needs.items() if event[1].kind is not Kind.WEIGHT}
    followers = {source: event for event, sources in ways.items() for source in sources}
    # A message takes a moment. So of two ranks that would end together, the one upstream comes
    # first in the list, and the one downstream has posted its receive before it computes.
    spans = simulate(plans, send_time=2**-20, place=place).spans
    for rank, action, *_ in sorted(spans, key=lambda span: (span.end, span.rank)):
        complete[rank].append(action)
        peer, follower = followers.get((rank, action), (rank, None))
        if peer != rank:
            complete[rank].append(action._replace(kind=SENDS[action.kind], peer=peer))
            complete[peer].append(follower._replace(kind=RECEIVES[action.kind], peer=rank))
    return complete


class Span(NamedTuple):
    rank: int
    action: Action
    start: float
    end: float


class Timeline(NamedTuple):
    """When every rank computed what, simulated or measured; each rank's spans in their order."""

    num_ranks: int
    spans: list[Span]

    @property
    def makespan(self) -> float:
        return max(span.end for span in self.spans) - min(span.start for span in self.spans)

    def bubble(self, rank: int) -> float:
        """The fraction of the makespan in which the rank does not compute."""
        busy = sum(span.end - span.start for span in self.spans if span.rank == rank)
        return 1 - busy / self.makespan


def simulate(
    plans: list[Plan],
    time_of: Callable[[int, Action], float] | None = None,
    send_time: float = 0.0,
    place: Place = loop,
) -> Timeline:
    """Run the plans of all ranks on paper; ValueError if they cannot run to their end.

    A result is on another rank `send_time` after it is made: sends and receives in the plans are
    passed over, as if each receive were posted in time. By default times are the textbook's.
    """
    time_of = time_of or textbook_times(plans)
    needs = _needs(plans, place)
    for rank, plan in enumerate(plans):
        for before, action in pairwise(action for action in plan if action.peer is None):
            needs[rank, action].append((rank, before))
    try:
        order = list(TopologicalSorter(needs).static_order())
    except CycleError as error:
        circle = [f"'{action}' of rank {rank}" for rank, action in reversed(error.args[1])]
        message = f"deadlock, each waits for the next: {', '.join(circle)}"
        raise ValueError(message) from None
    ended, spans = {}, []
    for event in order:
        arrivals = [ended[e] + send_time * (e[0] != event[0]) for e in needs[event]]
        start = max(arrivals, default=0.0)
        ended[event] = start + time_of(*event)
        spans.append(Span(*event, start, ended[event]))
    return Timeline(len(plans), spans)


def textbook_times(plans: list[Plan]) -> Callable[[int, Action], float]:
    """Forward takes 1, each of the two products of backward as well: they are of equal size."""
    backward = 1.0 if any(map(splits_backward, plans)) else 2.0
    return lambda rank, action: backward if action.kind is Kind.BACKWARD else 1.0


def _needs(plans: list[Plan], place: Place) -> dict[Event, list[Event]]:
    """What each action has its input from: the one before it on the way of its micro-batch.

    The way leads forward through all stages, and back; there each B may have its W, which leads
    nowhere. ValueError if it has gaps.
    """
    found = Counter((rank, action) for rank, plan in enumerate(plans) for action in plan)
    actions = [action for _, action in found if action.peer is None]
    num_stages = len(plans) * (1 + max(action.chunk for action in actions))
    way = [(Kind.FORWARD, *place(stage, len(plans))) for stage in range(num_stages)]
    if any(action.kind is Kind.BACKWARD for action in actions):  # not in evaluation
        way += [(Kind.BACKWARD, rank, chunk) for _, rank, chunk in reversed(way)]
    splits, needs = any(map(splits_backward, plans)), {}
    for i in {action.micro_batch for action in actions}:
        before = []
        for kind, rank, chunk in way:
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
