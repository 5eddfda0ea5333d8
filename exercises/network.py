"""What simulated ranks send each other, and the rules of the network.

    rank 0  isend ─────── wait    ╲ a message can be awaited when both ends are posted; the
    rank 1  irecv ── wait         ╱ buffer of a receive is filled when its `wait` returns

The network is as strict as the strictest real one. A send is done only when its receive is posted.
What is received, gathered or reduced is NaN, or unchanged where it is done in place, until `wait`.
Collectives take their input when they are started, sends when either end is awaited. Collectives
of a group match in the order of their start.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from exercises.compare import described, equal
from exercises.world import RankThread

Parts = list[list[Tensor]]  # what each end has brought


class Group:
    """A process group, as one of its ranks sees it; `copy` tells groups of equal ranks apart."""

    def __init__(
        self, ranks: tuple[int, ...], me: int, copy: int, timeout: Any = None, first: int = 0
    ) -> None:
        self.ranks, self.me, self.key, self.timeout = ranks, me, (ranks, copy), timeout
        self.numbers = [first + rank for rank in ranks]  # in the world that the course sees

    def rank(self) -> int:
        return self.ranks.index(self.me)

    def size(self) -> int:
        return len(self.ranks)


class Meeting:
    """One collective or message. Its ends are (role, rank of the world)."""

    def __init__(self, ends: list[tuple[str, int]], signature: str, rank: int) -> None:
        self.ends, self.signature, self.first = ends, signature, rank
        self.posted: dict[tuple[str, int], list[Tensor]] = {}
        self.sent: Parts = []  # of a message, as it was when it was started
        self.taken: Parts = []

    def content(self) -> Parts:
        """What each end has brought; of a message, as it is when one of them has waited."""
        if not self.taken:
            self.taken = [[x.detach().clone() for x in self.posted[end]] for end in self.ends]
            if self.sent and not equal(self.sent, self.taken[:1]):
                (_, sender), (_, receiver) = self.ends
                me().world.threads[sender].changed.append(receiver)
            self.posted = {end: [] for end in self.ends}  # the network keeps no tensor alive
        return self.taken


def me() -> RankThread:
    thread = threading.current_thread()
    assert isinstance(thread, RankThread), "only ranks communicate"
    return thread


class Work:
    """A collective that this rank begins; with a `peer` in the group, a "send" or a "receive".

    It sends `share` of what it brings. `wait` writes to the outputs what `combine` makes of what
    all ends have brought, in their order.
    """

    def __init__(
        self,
        what: str,
        group: Group,
        brought: list[Tensor],
        share: float = 1.0,
        outputs: Sequence[Tensor] = (),
        combine: Callable[[Parts], Sequence[Tensor]] = lambda brought: (),
        signature: str = "",
        peer: int | None = None,
    ) -> None:
        self.thread, self.what, self.outputs, self.combine = me(), what, outputs, combine
        self.number, self.is_done = self.thread.operations, False
        self.thread.operations += 1
        signature = signature or " of ".join([what, *map(described, brought)])
        self.text, which, role = f"waits in {what} for {{}}", "collective {} of this group", ""
        ends = [(role, rank) for rank in group.ranks]
        if peer is not None:
            role, peer = what, group.ranks[peer]
            source, to = (self.thread.rank, peer) if what == "send" else (peer, self.thread.rank)
            self.text = "waits to send to {}" if what == "send" else "waits to receive from {}"
            which = f"message {{}} from rank {source} to rank {to}"
            ends = [("send", source), ("receive", to)]
        self.meeting = self._joined(which, role, group, Meeting(ends, signature, self.thread.rank))
        for tensor in (*brought, *outputs):
            if not tensor.is_contiguous():
                what = f"{what} of a non-contiguous tensor {tuple(tensor.shape)}"
                raise RuntimeError(f"{what}: gloo would use other numbers, so make it contiguous")
        places = {tensor.untyped_storage().data_ptr() for tensor in brought}
        if peer is None:  # as it is now: what is added later is lost
            brought = [tensor.detach().clone() for tensor in brought]
        elif what == "send":
            self.meeting.sent = [[tensor.detach().clone() for tensor in brought]]
        self.meeting.posted[role, self.thread.rank] = brought
        for tensor in outputs:
            if tensor.untyped_storage().data_ptr() not in places:  # unusable until `wait`
                is_float = tensor.is_floating_point()
                tensor.data.fill_(float("nan") if is_float else torch.iinfo(tensor.dtype).min)
        # Recorded last: what was refused above was never started.
        size, is_alone = share * sum(tensor.nbytes for tensor in brought), len(ends) == 1
        self.thread.record("start", what, self.number, size, peer, is_alone)

    def _joined(self, which: str, role: str, group: Group, new: Meeting) -> Meeting:
        """The one that another end has begun, if any; RuntimeError if it is of another kind."""
        rank, world = self.thread.rank, self.thread.world
        # The n-th send to a rank meets the n-th receive from it, as if there were no tags.
        index = world.next_index(role, rank, which, group.key)
        there = world.meetings.setdefault((which, group.key, index), new)
        if there.signature != new.signature:
            found = f"{new.signature} on rank {rank}, and {there.signature} on rank {there.first}"
            remedy = "all ranks must start the same operations in the same order"
            if role:
                remedy = "both ends of a message must have the same shape and dtype"
            raise RuntimeError(f"{which.format(index + 1)} is {found}: {remedy}")
        return there

    def missing(self) -> list[int]:
        """The ranks that have not begun it."""
        return [end[1] for end in self.meeting.ends if end not in self.meeting.posted]

    def wait(self, timeout: object = None) -> bool:
        if not self.is_done:
            self.thread.record("wait", self.what, self.number)
            self.thread.pause(self)
            content = self.meeting.content()
            for output, value in zip(self.outputs, self.combine(content), strict=True):
                output.data.copy_(value.view_as(output))
            self.is_done = True
        return True
