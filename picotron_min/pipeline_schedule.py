"""Pipeline schedules as data: what each rank does in a step, as a plain list.

The layers are cut into stages, one behind the other; a micro-batch runs forward through all of them
and its gradient runs back. The time in which a rank has nothing to work on is the *bubble*:

    rank 0  F0F1F2F3······B0══B1══B2══B3══
    rank 1  ··F0F1F2F3B0══B1══B2══B3══····    AFAB: all 4 micro-batches are alive at once

    rank 0  F0F1····B0══F2B1══F3B2══··B3══
    rank 1  ··F0B0══F1B1══F2B2══F3B3══····    1F1B takes as long, but at most 2 are alive

A schedule is a pure function of (rank, ranks, micro-batches, chunks). `insert_communication` adds
the sends and receives; `simulate` runs plans on paper, pipeline_parallel.py runs them on tensors.
With one stage 1F1B *is* gradient accumulation, F0 B0 F1 B1 ..., so there is no second way to train
that could disagree with the pipelined one. A rank may hold several stages, its *chunks*: stage s
lives on rank s % ranks and is chunk s // ranks there. Every schedule here runs the backwards of a
stage in the order of the micro-batches, so all add up the same gradients in the same order.

Look at one:  python -m picotron_min.pipeline_schedule --engine 1f1b --stages 4 --microbatches 8

Cost: per micro-batch and boundary between stages, one activation forward and one gradient of its
shape back; v chunks make about v times as many boundaries. In production: torch's
`torch.distributed.pipelining`. Standard library only: schedules are looked at without torch.
"""

import runpy
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
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
    """One thing that a rank does; `chunk` is always its own: the one that made or will use it."""

    kind: Kind
    micro_batch: int
    chunk: int = 0
    peer: int | None = None  # of a send or receive: the rank at its other end

    def __str__(self) -> str:
        name = f"{self.kind.value}{self.micro_batch}" + (f".{self.chunk}" if self.chunk else "")
        if self.peer is None:
            return name
        return f"{name} {'to' if self.kind in SENDS.values() else 'from'} rank {self.peer}"


Plan = list[Action]  # of one rank
Event = tuple[int, Action]  # a rank, and something that it does


def afab(rank: int, ranks: int, num_micro_batches: int, chunks: int = 1) -> Plan:
    """All forwards, then all backwards: every micro-batch's activations live at once.

    Source: Huang et al. 2019, "GPipe", section 2.2; with chunks, Lamy-Poirier 2023, "Breadth-First
    Pipeline Parallelism".
    """
    return forward_only(num_micro_batches, chunks) + [
        Action(Kind.BACKWARD, i, c)
        for c in reversed(range(chunks))
        for i in range(num_micro_batches)
    ]


def one_f_one_b(rank: int, ranks: int, num_micro_batches: int, chunks: int = 1) -> Plan:
    """After a warm-up, one forward and one backward in turn: at most `ranks - rank` live at once.

    Source: Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters
    Using Megatron-LM", section 2.2.1.
    """
    if chunks != 1:
        raise ValueError(f"1f1b has 1 chunk a rank, not {chunks}: use interleaved, or 1 chunk")
    forwards = forward_only(num_micro_batches)
    backwards = [Action(Kind.BACKWARD, i) for i in range(num_micro_batches)]
    return _alternate(forwards, backwards, warmup=ranks - rank - 1)


def interleaved(rank: int, ranks: int, num_micro_batches: int, chunks: int = 1) -> Plan:
    """1F1B over chunks: the bubble is `chunks` times smaller, the sends as many times more.

    A group of micro-batches goes through the first chunk, then through the second, and so on. When
    the group has at least `ranks` of them, its first one is back from the last rank just when it is
    wanted, and nobody waits: see `group_sizes` for where `ranks` does not divide them.

    The warm-up has two forwards for every rank behind this one, where 1F1B has one. Those further
    micro-batches in flight cost memory and hide the time of the sends.

    Source: Narayanan et al. 2021, section 2.2.2 (which wants `ranks` to divide the micro-batches).
    """
    forwards, backwards, first = [], [], 0
    sizes = group_sizes(ranks, num_micro_batches)
    for size in sizes:
        group = range(first, first + size)
        first += size
        forwards += [Action(Kind.FORWARD, i, c) for c in range(chunks) for i in group]
        backwards += [Action(Kind.BACKWARD, i, c) for c in reversed(range(chunks)) for i in group]
    warmup = (chunks - 1) * sizes[0] + 2 * (ranks - rank - 1)
    return _alternate(forwards, backwards, warmup)


def group_sizes(ranks: int, num_micro_batches: int) -> list[int]:
    """As many groups of at least `ranks` as there can be, as even as can be.

    A smaller last group instead would be waited for, or deadlock. The largest come first: the
    warm-up, counted for the first group, then suffices for all.
    """
    groups = max(1, num_micro_batches // ranks)
    return [num_micro_batches // groups + (g < num_micro_batches % groups) for g in range(groups)]


def _alternate(forwards: Plan, backwards: Plan, warmup: int) -> Plan:
    """The first `warmup` forwards, then a forward and a backward in turn while there are both."""
    plan = forwards[:warmup]
    for forward, backward in zip_longest(forwards[warmup:], backwards):
        plan += [forward, backward] if forward else [backward]
    return plan


def forward_only(num_micro_batches: int, chunks: int = 1) -> Plan:
    """All forwards: evaluation, and the first half of AFAB."""
    return [Action(Kind.FORWARD, i, c) for c in range(chunks) for i in range(num_micro_batches)]


ENGINES: dict[str, Callable[[int, int, int, int], Plan]] = {
    "afab": afab,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
}


def build_plans(engine: str, ranks: int, num_micro_batches: int, chunks: int = 1) -> list[Plan]:
    """Every rank's plan, with its sends and receives."""
    schedule = ENGINES[engine]
    plans = [schedule(rank, ranks, num_micro_batches, chunks) for rank in range(ranks)]
    return insert_communication(plans)


def insert_communication(plans: list[Plan]) -> list[Plan]:
    """Add the sends and receives to the plans of all ranks, so that they cannot deadlock.

    Write ONE list of everything that all ranks do, in the order in which it ends in a run where
    messages take no time; behind each action whose result another rank needs, put the message that
    carries it. A rank's plan is that rank's part of the list: a message is a send in the plan of
    the one rank and a receive in that of the other.

    Why there is no deadlock, even when every send and receive blocks until its other end is there:
    of all that is not done yet, look at what comes first in the list. Everything before it is done,
    so each rank that takes part in it has come to just this point, and it can be done.

    Two ranks have the messages between them, both ways together, in the same order in their plans.
    So gloo needs no tags, and NCCL, which runs a pair's messages in one queue, cannot get stuck.

    A receive comes before whatever ends later than the message is sent: it is posted while the rank
    still works on something else. Between the chunks of a single rank nothing is sent.
    """
    ranks, stages = len(plans), _num_stages(plans)

    def when(span: Span) -> tuple[float, int]:
        # Of what ends together, backwards come first, then what is further upstream: so the next
        # rank, which often ends something in that moment too, has posted its receive before.
        stage = span.action.chunk * ranks + span.rank
        return span.end, stage if span.action.kind is Kind.FORWARD else -stage

    complete: list[Plan] = [[] for _ in plans]
    for span in sorted(simulate(plans).spans, key=when):
        complete[span.rank].append(span.action)
        for rank, action in _message(span.rank, span.action, ranks, stages):
            complete[rank].append(action)
    return complete


def _message(rank: int, action: Action, ranks: int, stages: int) -> tuple[Event, ...]:
    """The send and the receive that carry an action's result; nothing where it stays or ends."""
    target = _neighbour(rank, action, ranks, stages, step=1)
    if target is None or target[0] == rank:
        return ()
    kind, i, (peer, goal) = action.kind, action.micro_batch, target
    send = Action(SENDS[kind], i, action.chunk, peer)
    return (rank, send), (peer, Action(RECEIVES[kind], i, goal.chunk, rank))


def _neighbour(rank: int, action: Action, ranks: int, stages: int, step: int) -> Event | None:
    """Who does the same for the stage that is next (step 1) or was before (-1), if any."""
    onwards = step if action.kind is Kind.FORWARD else -step
    stage = action.chunk * ranks + rank + onwards
    if not 0 <= stage < stages:
        return None
    chunk, peer = divmod(stage, ranks)
    return peer, action._replace(chunk=chunk)


def _num_stages(plans: list[Plan]) -> int:
    return len(plans) * (1 + max(action.chunk for plan in plans for action in plan))


class ScheduleError(ValueError):
    """Plans that cannot run: something is missing, or ranks wait for each other in a circle."""


class Span(NamedTuple):
    rank: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """When every rank did what, on paper or measured; each rank's spans in their order."""

    num_ranks: int
    spans: list[Span]

    @cached_property
    def makespan(self) -> float:
        return max(span.end for span in self.spans) - min(span.start for span in self.spans)

    def bubble(self, rank: int) -> float:
        """The fraction of the makespan in which the rank neither runs a forward nor a backward."""
        mine = (s for s in self.spans if s.rank == rank and s.action.peer is None)
        return 1 - sum(span.end - span.start for span in mine) / self.makespan

    def peak_live(self, rank: int) -> int:
        return peak_live([span.action for span in self.spans if span.rank == rank])


def peak_live(plan: Plan) -> int:
    """The most activations, each of one micro-batch in one chunk, alive at once: backward frees."""
    live = peak = 0
    for action in plan:
        live += (action.kind is Kind.FORWARD) - (action.kind is Kind.BACKWARD)
        peak = max(peak, live)
    return peak


def simulate(
    plans: list[Plan],
    forward_time: float = 1.0,
    backward_time: float = 2.0,
    send_time: float = 0.0,
    blocking: bool = False,
) -> Timeline:
    """Run the plans of all ranks on paper; times are those of one chunk, in any unit.

    A message arrives `send_time` after both its ends are posted. A rank posts its end, goes on, and
    waits when it computes with what it receives; with `blocking` it waits at either end of every
    message. Plans without any communication run as if results were simply there. Messages do not
    slow each other down, as they would on one wire.

    Raises ScheduleError where the plans cannot run to their end.
    """
    needs = _needs(plans, blocking)
    durations = {Kind.FORWARD: forward_time, Kind.BACKWARD: backward_time}
    todo, clocks, spans = [deque(plan) for plan in plans], [0.0] * len(plans), []
    known: dict[Event, float] = {}  # when it was computed or, of an end of a message, posted

    def blocker(rank: int) -> Event | None:
        """What the rank's next action still waits for; if that is a message, it is posted."""
        event = rank, todo[rank][0]
        if event[1].peer is not None:
            known.setdefault(event, clocks[rank])
        return next((other for other in needs[event] if other not in known), None)

    def run_next(rank: int) -> None:
        action = todo[rank].popleft()
        start = ready = clocks[rank]
        for other in needs[rank, action]:
            ready = max(ready, known[other] + (0.0 if other[1].peer is None else send_time))
        if action.peer is None:
            start, ready = ready, ready + durations[action.kind]
            known[rank, action] = ready
        clocks[rank] = ready
        spans.append(Span(rank, action, start, end=ready))

    while any(todo):
        before = len(spans)
        for rank, plan in enumerate(todo):
            while plan and blocker(rank) is None:
                run_next(rank)
        if len(spans) == before:
            stuck = {rank: (plan[0], blocker(rank)) for rank, plan in enumerate(todo) if plan}
            raise ScheduleError(_describe_circle(stuck))
    return Timeline(len(plans), spans)


def _needs(plans: list[Plan], blocking: bool) -> dict[Event, list[Event]]:
    """What each action waits for; ScheduleError where that is in no plan."""
    ranks, stages = len(plans), _num_stages(plans)
    events = [(rank, action) for rank, plan in enumerate(plans) for action in plan]
    communicates = any(action.peer is not None for _, action in events)
    needs: dict[Event, list[Event]] = {}
    for rank, action in events:
        if action.peer is None:
            source = _neighbour(rank, action, ranks, stages, step=-1)
            carried = _message(*source, ranks, stages) if source and communicates else ()
            needs[rank, action] = list(carried) or ([source] if source else [])
            if action.kind is Kind.BACKWARD:
                needs[rank, action].append((rank, action._replace(kind=Kind.FORWARD)))
            if message := _message(rank, action, ranks, stages):
                send, receive = message
                needs[send] = [(rank, action), *(message if blocking else ())]
                needs[receive] = [*(message if blocking else ())]
    count = Counter(events)
    for rank, action in events:
        if count[rank, action] > 1:
            raise ScheduleError(f"rank {rank}: '{action}' is there {count[rank, action]} times")
        if (rank, action) not in needs:
            raise ScheduleError(f"rank {rank}: nothing makes what '{action}' carries")
        for other_rank, other in needs[rank, action]:
            if (other_rank, other) not in count:
                raise ScheduleError(
                    f"rank {rank}: '{action}' needs '{other}', which rank {other_rank} never does"
                )
    return needs


def _describe_circle(stuck: dict[int, tuple[Action, Event]]) -> str:
    """Follow who waits for whom until a rank comes up again: from there on it is the circle."""
    path = [next(iter(stuck))]
    while (rank := stuck[path[-1]][1][0]) not in path:
        path.append(rank)
    circle = path[path.index(rank) :]
    waits = []
    for rank in circle:
        action, (other_rank, other) = stuck[rank]
        waits.append(f"rank {rank} waits in '{action}' for '{other}' of rank {other_rank}")
    return "deadlock: " + "; ".join(waits)


def bubble(ranks: int, num_micro_batches: int, chunks: int = 1) -> float:
    """The textbook's bubble, of every schedule here: (p - 1) / (m v + p - 1) for m >= p.

    The first stage of the last rank starts p - 1 forwards late, the first rank's gradients come as
    many backwards late, and each such wait is that of a chunk: 1/v of the rank's layers. (With
    m < p and chunks, the m micro-batches must also be waited for on each way round the ranks.)
    """
    slots = max(num_micro_batches, ranks) * chunks + min(num_micro_batches, ranks) - 1
    return 1 - num_micro_batches * chunks / slots


def live_activations(
    engine: str, rank: int, ranks: int, num_micro_batches: int, chunks: int = 1
) -> int:
    """The textbook's peak of live activations, in activations of one micro-batch in one chunk.

    Interleaved: the warm-up and one more; p v + p - 1 on the first rank when p divides m
    (Korthikanti et al. 2022, "Reducing Activation Recomputation", section 4.2.3).
    """
    if engine == "afab":
        return num_micro_batches * chunks
    if engine == "1f1b":
        return min(num_micro_batches, ranks - rank)
    warmup = (chunks - 1) * group_sizes(ranks, num_micro_batches)[0] + 2 * (ranks - rank - 1)
    return min(num_micro_batches * chunks, warmup + 1)


if __name__ == "__main__":
    runpy.run_module("picotron_min.runtime.draw", run_name="__main__")
