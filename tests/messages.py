"""Pipeline plans on paper, message by message: does each one arrive, or do ranks wait for ever?

schedules/simulator.py passes over the sends and receives of a plan. Here they are played as well.
"""

from collections import Counter, deque

from picotron_min.extensions.schedules.simulator import Span, Timeline
from picotron_min.pipeline_messages import Event, inputs_of, textbook_times
from picotron_min.pipeline_schedule import RECEIVES, SENDS, Place, Plan, loop


def simulate_messages(
    plans: list[Plan], send_time: float = 0.0, blocking: bool = False, place: Place = loop
) -> Timeline:
    """When each rank computes what; ValueError if the plans cannot run to their end.

    A message arrives `send_time` after both its ends are posted. A rank posts its end, continues,
    and waits when it computes with what it receives; with `blocking`, at either end of a message.
    """
    needs, times = _needs(plans, place, blocking), textbook_times(plans)
    todo, clocks, spans = [deque(plan) for plan in plans], [0.0] * len(plans), []
    known: dict[Event, float] = {}  # when it was computed or, of an end of a message, posted
    while any(todo):
        reached = {rank: plan[0] for rank, plan in enumerate(todo) if plan}
        for rank, action in reached.items():
            if action.peer is not None:
                known.setdefault((rank, action), clocks[rank])  # posted once
        missing = {e: [need for need in needs[e] if need not in known] for e in reached.items()}
        if all(missing.values()):
            waiting = [f"rank {rank} waits in '{action}'" for rank, action in missing]
            raise ValueError(f"deadlock: {'; '.join(waiting)}")
        for rank, action in (event for event in missing if not missing[event]):
            todo[rank].popleft()
            arrivals = [known[e] + send_time * (e[1].peer is not None) for e in needs[rank, action]]
            clocks[rank] = start = max([clocks[rank], *arrivals])
            if action.peer is None:
                known[rank, action] = clocks[rank] = start + times(rank, action)
                spans.append(Span(rank, action, start, clocks[rank]))
    return Timeline(len(plans), spans)


def _needs(plans: list[Plan], place: Place, blocking: bool) -> dict[Event, list[Event]]:
    """What each action waits for; ValueError where messages are missing, or are too many."""
    found = Counter((rank, action) for rank, plan in enumerate(plans) for action in plan)
    needs = {event: list(sources) for event, sources in inputs_of(plans, place).items()}
    for target, sources in list(needs.items()):
        for source in sources:
            (rank, made), (peer, needing) = source, target
            if rank != peer:
                send = rank, made._replace(kind=SENDS[made.kind], peer=peer)
                receive = peer, needing._replace(kind=RECEIVES[made.kind], peer=rank)
                needs[target] = [send, receive]  # both ends posted
                needs[send] = [source, receive] if blocking else [source]  # what it carries
                needs[receive] = [send] if blocking else []
    for rank, action in [*needs, *found]:
        if (times := found[rank, action]) != 1:
            problem = f"is there {times} times" if times else "is missing"
            raise ValueError(f"rank {rank}: '{action}' {problem}")
        if (rank, action) not in needs:
            raise ValueError(f"rank {rank}: '{action}' carries nothing that its peer needs")
    return needs
