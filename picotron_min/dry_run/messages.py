"""Do the messages of several ranks fit together? Each send needs its receive, each sum all ranks.

Every rank's messages are a list. The first ones of all ranks are done together where they fit, then
the next ones, as if each rank waited for the end of each message: what can be done so cannot
deadlock when messages overlap. A send or receive of the plan needs its counterpart first in line at
the other end, for the same micro-batch, of the same shape and dtype. A collective needs all ranks
of its group, and the same shape and dtype; so does each half of a ring's hop.

Of a large cluster one rank of each kind is enough: ranks in between do what these do. Messages to
ranks that are not among them are left out.
"""

import numpy as np

from picotron_min.dry_run.recorder import Message
from picotron_min.layout import Layout


def kinds_of_ranks(layout: Layout) -> list[int]:
    """All stages at the first place of the other axes; of the first and last stage all ends."""
    _, dp, cp, tp = (size - 1 for size in layout.sizes)
    ends = (dp, 0, 0), (0, cp, 0), (0, 0, tp), (dp, cp, tp)
    places = {(stage, 0, 0, 0) for stage in range(layout.pp)}
    places |= {(stage, *end) for stage in (0, layout.pp - 1) for end in ends}
    return sorted(int(np.ravel_multi_index(place, layout.sizes)) for place in places)


def misfit(runs: dict[int, list[Message]]) -> str | None:
    """Given the messages of each rank, where ranks come to a stop; None: all are done."""
    left = {rank: messages[::-1] for rank, messages in runs.items()}  # the next one is last

    def all_are_there(rank: int) -> bool:
        message = left[rank][-1]
        ranks = [message.peer] if message.is_planned else message.ranks
        return all(
            left[other] and agreed(left[other][-1], other, rank) == agreed(message, rank, other)
            for other in ranks
            if other in left
        )

    while ready := [rank for rank in left if left[rank] and all_are_there(rank)]:
        for rank in ready:
            left[rank].pop()
    if not any(left.values()):
        return None
    return "\n".join(f"rank {r} is at {left[r][-1] if left[r] else 'its end'}" for r in left)


def agreed(message: Message, here: int, there: int) -> tuple:
    """What a message must be alike on two ranks."""
    kind, ranks, peer, tensors, rows, action = message
    if message.is_planned:
        ends = (here, peer) if kind == "send" else (peer, here)
        return ends, action.kind.value[-1], action.micro_batch, tensors
    if rows:  # of different numbers: what leaves here for there must arrive there from here
        arrive, leave = (dict(zip(ranks, each, strict=True)).get(there) for each in rows)
        return ranks, kind, {here: leave, there: arrive}
    return ranks, kind, tensors
