"""Do the messages of several ranks fit together? Each send needs its receive, each sum all ranks.

Every rank's messages are a list. The first ones of all ranks are done together where they fit, then
the next ones, as if each rank waited for the end of each message: what can be done so cannot
deadlock when messages overlap. A send or receive of the plan needs its counterpart first in line at
the other end, for the same micro-batch, of the same shape and dtype. A collective needs all ranks
of its group, and the same shape and dtype; so does a hop of a ring.

Of a large cluster one rank of each kind is enough: ranks in between do what these do. Messages to
ranks that are not among them are left out.
"""

from collections.abc import Iterator

import numpy as np

from picotron_min.dry_run.recorder import Message
from picotron_min.layout import Coordinates, Layout
from picotron_min.pipeline_schedule import RECEIVES, SENDS

BACK = {SENDS[kind]: RECEIVES[kind] for kind in SENDS}
BACK |= {receive: send for send, receive in BACK.items()}
Messages = dict[int, list[Message]]  # by rank


def kinds_of_ranks(layout: Layout) -> list[int]:
    """All stages at the first place of the other axes; of the first and last stage all ends."""
    sizes = layout.sizes
    last = {axis: size - 1 for axis, size in sizes._asdict().items() if axis != "pp"}
    ends = [{axis: place} for axis, place in last.items()] + [last]
    first = Coordinates(0, 0, 0, 0)
    places = [first._replace(pp=stage) for stage in range(layout.pp)]
    places += [places[stage]._replace(**end) for stage in (0, -1) for end in ends]
    return sorted({int(np.ravel_multi_index(place, sizes)) for place in places})


def misfit(runs: Messages) -> str | None:
    """Where these ranks would wait for ever, or get what they do not expect; None: nowhere."""
    waiting = {rank: list(with_hops_joined(messages)) for rank, messages in runs.items()}
    waiting = {rank: messages[::-1] for rank, messages in waiting.items()}  # the next one is last
    moves = True
    while moves:
        moves = False
        for rank, mine in waiting.items():
            while mine and misfitting_rank(rank, waiting) is None:
                moves = True
                for other in others_of(rank, waiting):
                    waiting[other].pop()
                mine.pop()
    stuck = {rank: misfitting_rank(rank, waiting) for rank, mine in waiting.items() if mine}
    at = {rank: mine[-1] if mine else "the end of its step" for rank, mine in waiting.items()}
    lines = (f"rank {rank} is at {at[rank]}, but rank {o} at {at[o]}" for rank, o in stuck.items())
    return "\n".join(lines) or None


def others_of(rank: int, waiting: Messages) -> list[int]:
    """Of the ranks here, those that a rank's next message is with."""
    message = waiting[rank][-1]
    ranks = message.ranks if message.peer is None else (message.peer,)
    return [other for other in ranks if other in waiting and other != rank]


def misfitting_rank(rank: int, waiting: Messages) -> int | None:
    """One whose next message is not the counterpart of this rank's."""
    for other in others_of(rank, waiting):
        if not waiting[other] or not fits(waiting[rank][-1], rank, waiting[other][-1], other):
            return other
    return None


def fits(ours: Message, rank: int, theirs: Message, other: int) -> bool:
    if ours.peer is not None:  # a send or a receive of the plan
        if theirs.peer != rank or ours.action.kind is not BACK.get(theirs.action.kind):
            return False
        same_result = ours.action.micro_batch == theirs.action.micro_batch
        return same_result and ours.tensors == theirs.tensors
    if (ours.kind, ours.ranks) != (theirs.kind, theirs.ranks):
        return False
    if not any(ours.rows):
        return ours.tensors == theirs.tensors
    here, there = ours.ranks.index(rank), ours.ranks.index(other)
    (arrive, leave), (arrive_there, leave_there) = ours.rows, theirs.rows
    return (arrive[there], leave[there]) == (leave_there[here], arrive_there[here])


def with_hops_joined(messages: list[Message]) -> Iterator[Message]:
    """A ring's hop is a send and a receive that begin together: one call of all its ranks."""
    messages = iter(messages)
    for message in messages:
        if message.kind == "send" and message.action.kind not in BACK:
            next(messages)  # the receive
            message = message._replace(kind="hop", peer=None)
        yield message
