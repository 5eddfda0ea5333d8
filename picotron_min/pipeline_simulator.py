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
from picotron_min.pipeline_schedule import SCHEDULES, Action, Kind, Plan, loop

Event = tuple[int, Action]  # a rank, and something that it does
Place = Callable[[int, int], tuple[int, int]]  # see Schedule.place


def build_plans(
    engine: str, ranks: int, num_micro_batches: int, chunks: int = 1, training: bool = True
) -> list[Plan]:
    """Every rank's plan with its sends and receives; without training, the forwards only."""
    if problem := pipeline_schedule.chunks_problem(engine, chunks):
        raise ValueError(problem)
    plan, place = SCHEDULES[engine].plan, SCHEDULES[engine].place
    plans = [pipeline_schedule.forward_only([num_micro_batches], chunks)] * ranks
    if training:
        plans = [plan(rank, ranks, num_micro_batches, chunks) for rank in range(ranks)]
    return insert_communication(plans, place)


def insert_communication(plans: list[Plan], place: Place = loop) -> list[Plan]:
    """Add the sends and receives to the plans of all ranks, so that they cannot deadlock.

    Write ONE list of what all ranks do, in the order in which it ends if messages take no time, and
    behind each action the message that carries its result. A rank's plan is its part of the list.
    There is no deadlock, even if both ends of a message block: all ranks of the first entry that is
    not done have reached it. And two ranks have their messages in the same order, as gloo (no tags)
    and NCCL (one queue) need it.
    """
    ways, complete = _ways(plans, place), [[] for _ in plans]
    messages = {a: _message(a, b) for way in ways for a, b in pairwise(way)}
    # Of what ends together, backwards come first, then what is further upstream: so the next rank,
    # which often ends something in that moment too, has posted its receive before.
    order = {e: (e[1].kind is Kind.FORWARD, i) for way in ways for i, e in enumerate(way)}
    for span in sorted(simulate(plans, place=place).spans, key=lambda s: (s.end, order[s[:2]])):
        for rank, action in [span[:2], *messages.get(span[:2], [])]:
            complete[rank].append(action)  # a receive: posted while its rank still computes
    return complete


def _ways(plans: list[Plan], place: Place) -> list[list[Event]]:
    """The way of each micro-batch: its forwards through all stages, its backwards back."""
    actions = {action for plan in plans for action in plan}
    num_stages = len(plans) * (1 + max(action.chunk for action in actions))
    way = [(Kind.FORWARD, *place(stage, len(plans))) for stage in range(num_stages)]
    if any(action.kind is Kind.BACKWARD for action in actions):
        way += [(Kind.BACKWARD, rank, c) for _, rank, c in reversed(way)]  # not in evaluation
    micro_batches = {action.micro_batch for action in actions}
    return [[(rank, Action(kind, i, c)) for kind, rank, c in way] for i in micro_batches]


def _message(source: Event, target: Event) -> list[Event]:
    """The send and the receive between two actions; none on one rank."""
    (rank, made), (peer, needing) = source, target
    if rank == peer:
        return []
    send = made._replace(kind=pipeline_schedule.SENDS[made.kind], peer=peer)
    receive = needing._replace(kind=pipeline_schedule.RECEIVES[made.kind], peer=rank)
    return [(rank, send), (peer, receive)]


class ScheduleError(ValueError):
    """Something is missing in plans, or ranks wait for each other in a circle."""


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
    time_of: Callable[[int, Action], float] = lambda rank, a: 1.0 + (a.kind is Kind.BACKWARD),
    send_time: float = 0.0,
    blocking: bool = False,
    place: Place = loop,
) -> Timeline:
    """Run the plans of all ranks on paper; ScheduleError if they cannot run to their end.

    A message arrives `send_time` after both its ends are posted. A rank posts its end, continues,
    and waits when it computes with what it receives; with `blocking`, at either end of a message.
    In plans without communication, results are at once where they are needed.
    """
    needs = _needs(plans, place, blocking)
    todo, clocks, spans = [deque(plan) for plan in plans], [0.0] * len(plans), []
    known: dict[Event, float] = {}  # when it was computed or, of an end of a message, posted
    while any(todo):
        reached = {rank: plan[0] for rank, plan in enumerate(todo) if plan}
        for rank, action in reached.items():
            if action.peer is not None:
                known.setdefault((rank, action), clocks[rank])  # posted once
        missing = {e: [need for need in needs[e] if need not in known] for e in reached.items()}
        if all(missing.values()):
            raise ScheduleError(_describe_circle(missing))  # no rank can continue
        for rank, action in (event for event in missing if not missing[event]):
            start = clocks[rank]
            arrivals = [known[o] + send_time * (o[1].peer is not None) for o in needs[rank, action]]
            clocks[rank] = max([start, *arrivals])  # the wait, if any, is over
            if action.peer is None:  # the span of an action that computes is without its wait
                start = clocks[rank]
                known[rank, action] = clocks[rank] = start + time_of(rank, action)
            spans.append(Span(rank, todo[rank].popleft(), start, clocks[rank]))
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
                send, receive = needs[event] = message  # it needs both ends posted
                needs[send] = [source, receive] if blocking else [source]  # what it carries
                needs[receive] = [send] if blocking else []
    for rank, action in [*needs, *found]:
        if (times := found[rank, action]) != 1:
            problem = f"is there {times} times" if times else "is missing"
            raise ScheduleError(f"rank {rank}: '{action}' {problem}")
        if (rank, action) not in needs:
            raise ScheduleError(f"rank {rank}: '{action}' carries nothing that its peer needs")
    return needs


def _describe_circle(missing: dict[Event, list[Event]]) -> str:
    """Follow who waits for whom until a rank recurs: from there on it is the circle."""
    waits = {rank: (action, *needs[0]) for (rank, action), needs in missing.items()}
    path = [min(waits)]  # it may lead to the circle without being part of it
    while (other := waits[path[-1]][1]) not in path:
        path.append(other)
    circle = [(rank, *waits[rank]) for rank in path[path.index(other) :]]
    parts = [f"rank {r} waits in '{a}' for '{need}' of rank {peer}" for r, a, peer, need in circle]
    return "deadlock: " + "; ".join(parts)
