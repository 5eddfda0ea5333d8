"""Pipeline plans on paper: messages are added to them, and the time of every rank is simulated.

    rank 0  F0 F1 B0 B1    ->  spans (rank, action, start, end), or an error that names
    rank 1  F0 B0 F1 B1        which ranks wait for each other

Each rank runs its plan in order, and waits for what an action needs: what comes before it on the
way of its micro-batch, forward through all stages and back. Standard library only.
"""

from collections import Counter, deque
from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

from picotron_min import pipeline_schedule
from picotron_min.pipeline_schedule import SCHEDULES, Action, Kind, Plan, forward_only, loop

Event = tuple[int, Action]  # a rank, and something that it does
Place = Callable[[int, int], tuple[int, int]]  # see Schedule.place


def build_plans(
    engine: str, ranks: int, num_micro_batches: int, chunks: int = 1, training: bool = True
) -> list[Plan]:
    """Every rank's plan with its sends and receives; without training, the forwards only."""
    if problem := pipeline_schedule.chunks_problem(engine, chunks):
        raise ValueError(problem)
    schedule = SCHEDULES[engine]
    plans = [forward_only([num_micro_batches], chunks)] * ranks
    if training:
        plans = [schedule.plan(rank, ranks, num_micro_batches, chunks) for rank in range(ranks)]
    return insert_communication(plans, schedule.place)


def insert_communication(plans: list[Plan], place: Place = loop) -> list[Plan]:
    """Add the sends and receives to the plans of all ranks, so that they cannot deadlock.

    Write ONE list of what all ranks do, in the order in which it ends if messages take no time.
    Behind each action whose result another rank needs, put the message that carries it: a send in
    the plan of the one rank, a receive in that of the other. A rank's plan is its part of the list.

    There is no deadlock, even when sends and receives block until their other end is posted: before
    the first entry of the list that is not done all is done, so each of its ranks has reached it.
    Two ranks have their messages in the same order, as gloo (no tags) and NCCL (one queue) need it.
    """
    ways = _ways(plans, place)
    following = dict(pair for way in ways for pair in pairwise(way))  # whose result goes where
    # Of what ends together, backwards come first, then what is further upstream: so the next rank,
    # which often ends something in that moment too, has posted its receive before.
    order = {
        e: i - len(way) * (e[1].kind is Kind.BACKWARD) for way in ways for i, e in enumerate(way)
    }
    complete: list[Plan] = [[] for _ in plans]
    for span in sorted(simulate(plans, place=place).spans, key=lambda s: (s.end, order[s[:2]])):
        event = span[:2]
        for rank, action in [event, *_message(event, following.get(event, event))]:
            complete[rank].append(action)  # a receive: posted while its rank still computes
    return complete


def _ways(plans: list[Plan], place: Place) -> list[list[Event]]:
    """The way of each micro-batch: its forwards through all stages, its backwards back."""
    actions = {action for plan in plans for action in plan}
    num_stages = len(plans) * (1 + max(action.chunk for action in actions))
    places = [place(stage, len(plans)) for stage in range(num_stages)]
    there_and_back = [(Kind.FORWARD, *at) for at in places]
    if any(action.kind is Kind.BACKWARD for action in actions):
        there_and_back += [(Kind.BACKWARD, *at) for at in reversed(places)]
    micro_batches = {action.micro_batch for action in actions}
    return [[(rank, Action(kind, i, c)) for kind, rank, c in there_and_back] for i in micro_batches]


def _message(source: Event, target: Event) -> list[Event]:
    """The send and the receive between two actions; none on one rank."""
    (rank, made), (peer, needing) = source, target
    if rank == peer:
        return []
    send = made._replace(kind=pipeline_schedule.SENDS[made.kind], peer=peer)
    receive = needing._replace(kind=pipeline_schedule.RECEIVES[made.kind], peer=rank)
    return [(rank, send), (peer, receive)]


class ScheduleError(ValueError):
    """Plans that cannot run: something is missing, or ranks wait for each other in a circle."""


class Span(NamedTuple):
    rank: int
    action: Action
    start: float
    end: float


class Timeline(NamedTuple):
    """When every rank did what, simulated or measured; each rank's spans in their order."""

    num_ranks: int
    spans: list[Span]

    @property
    def makespan(self) -> float:
        return max(span.end for span in self.spans) - min(span.start for span in self.spans)

    def bubble(self, rank: int) -> float:
        """The fraction of the makespan in which the rank does not compute."""
        mine = (s for s in self.spans if s.rank == rank and s.action.peer is None)
        return 1 - sum(span.end - span.start for span in mine) / self.makespan


def simulate(
    plans: list[Plan],
    time_of: Callable[[int, Action], float] = lambda _, action: (
        1.0 + (action.kind is Kind.BACKWARD)
    ),
    send_time: float = 0.0,
    blocking: bool = False,
    place: Place = loop,
) -> Timeline:
    """Run the plans of all ranks on paper; `time_of` is by default 1 for a forward, else 2.

    A message arrives `send_time` after both its ends are posted; messages do not slow each other
    down. A rank posts its end, continues, and waits when it computes with what it receives; with
    `blocking` it waits at either end of every message. In plans without communication, results are
    at once where they are needed. Raises ScheduleError where the plans cannot run to their end.
    """
    needs = _needs(plans, place, blocking)
    todo, clocks, spans = [deque(plan) for plan in plans], [0.0] * len(plans), []
    known: dict[Event, float] = {}  # when it was computed or, of an end of a message, posted

    def waits_for(rank: int) -> Event | None:
        """What the rank's next action still needs; if that is a message, it is posted."""
        event = rank, todo[rank][0]
        if event[1].peer is not None:
            known.setdefault(event, clocks[rank])
        return next((other for other in needs[event] if other not in known), None)

    while any(todo):
        ready = [rank for rank, plan in enumerate(todo) if plan and waits_for(rank) is None]
        if not ready:
            raise ScheduleError(_describe_circle(todo, waits_for))
        for rank in ready:
            event, start = (rank, todo[rank].popleft()), clocks[rank]
            arrivals = [known[o] + send_time * (o[1].peer is not None) for o in needs[event]]
            clocks[rank] = max([start, *arrivals])
            if event[1].peer is None:
                start = clocks[rank]
                known[event] = clocks[rank] = start + time_of(*event)
            spans.append(Span(*event, start, clocks[rank]))
    return Timeline(len(plans), spans)


def _needs(plans: list[Plan], place: Place, blocking: bool) -> dict[Event, list[Event]]:
    """What each action waits for; ScheduleError where the plans lack some, or have too many."""
    found = Counter((rank, action) for rank, plan in enumerate(plans) for action in plan)
    communicates = any(action.peer is not None for _, action in found)
    needs: dict[Event, list[Event]] = {}
    for way in _ways(plans, place):
        needs[way[0]] = []
        for source, event in pairwise(way):
            needs[event] = [source]
            if communicates and (message := _message(source, event)):
                send, receive = needs[event] = message
                needs[send] = [source, receive] if blocking else [source]
                needs[receive] = [send] if blocking else []
    for rank, action in [*needs, *found]:
        if times := found[rank, action] - 1:
            problem = f"is there {times + 1} times" if times > 0 else "is missing"
            raise ScheduleError(f"rank {rank}: '{action}' {problem}")
        if (rank, action) not in needs:
            raise ScheduleError(f"rank {rank}: '{action}' carries nothing that its peer needs")
    return needs


def _describe_circle(todo: list[deque[Action]], waits_for: Callable[[int], Event]) -> str:
    """Follow who waits for whom until a rank recurs: from there on it is the circle."""
    path = [next(rank for rank, plan in enumerate(todo) if plan)]
    while (rank := waits_for(path[-1])[0]) not in path:
        path.append(rank)
    waits = [(rank, *waits_for(rank)) for rank in path[path.index(rank) :]]
    return "deadlock: " + "; ".join(
        f"rank {rank} waits in '{todo[rank][0]}' for '{needed}' of rank {other}"
        for rank, other, needed in waits
    )
