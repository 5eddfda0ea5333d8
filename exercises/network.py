"""The messages between simulated ranks, and the rules of the network.

    rank 0  isend ─────── wait    ╲ a message is delivered when both ends are posted, into the
    rank 1  irecv ── wait         ╱ buffer of a receive when its own `wait` returns

The network is as strict as the strictest real one. A send is done only when it is received. Until
`wait`, a buffer that is received into is full of NaN. What is sent must not change before `wait`:
the receiver may get the new content. Collectives of a group match in the order of their start.
"""

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from exercises.world import RankThread, Wait, World


class Group:
    """A process group, as one of its ranks sees it."""

    def __init__(
        self, world: World, ranks: tuple[int, ...], me: int, copy: int, timeout: Any = None
    ) -> None:
        self.world, self.ranks, self.me, self.key = world, ranks, me, (ranks, copy)
        self.timeout = timeout

    def rank(self) -> int:
        return self.ranks.index(self.me)

    def size(self) -> int:
        return len(self.ranks)


class Work:
    """An operation that has begun: `wait` returns when it is done."""

    def __init__(self, thread: RankThread, what: str, wait: Wait, finish: Callable[[], None]):
        self.thread, self.what, self.until, self.finish = thread, what, wait, finish
        self.number = thread.operations
        self.is_done = False
        thread.operations += 1

    def wait(self, timeout: object = None) -> bool:
        if not self.is_done:
            self.thread.record("wait", self.what, number=self.number)
            self.thread.pause(self.until)
            self.finish()
            self.is_done = True
        return True


class Channel:
    """Messages from one rank to another in a group: the n-th receive gets the n-th send."""

    def __init__(self) -> None:
        self.sends: list[Tensor | None] = []
        self.receives: list[Tensor | None] = []
        self.contents: dict[int, Tensor] = {}  # of messages that are on their way

    def deliver(self, index: int) -> Tensor:
        """What the message holds, from the moment that the first of its two ends waits for it."""
        if index not in self.contents:
            sent, buffer = self.sends[index], self.receives[index]
            if sent.shape != buffer.shape or sent.dtype != buffer.dtype:
                what = f"a message of {_shape(sent)} is received into a buffer of {_shape(buffer)}"
                raise RuntimeError(f"{what}: both must have the same shape and dtype")
            self.contents[index] = sent.detach().clone()
            self.sends[index] = self.receives[index] = None  # the network keeps no tensor alive
        return self.contents[index]


class Meeting:
    """One collective: what each rank has brought, as it was when the rank started it."""

    def __init__(self, what: str, signature: str, rank: int) -> None:
        self.what, self.signature, self.first = what, signature, rank
        self.brought: dict[int, list[Tensor]] = {}  # by rank; parts are for each rank


def me() -> RankThread:
    thread = threading.current_thread()
    assert isinstance(thread, RankThread), "only ranks communicate"
    return thread


def post(what: str, tensor: Tensor, group: Group, peer: int) -> Work:
    """Begin to send to a rank of the group, or to receive from it."""
    thread, other = me(), group.ranks[peer]
    _check_contiguous(tensor, what)
    ends = (thread.rank, other) if what == "send" else (other, thread.rank)
    channel = thread.world.channels.setdefault((group.key, ends), Channel())
    mine, theirs = channel.sends, channel.receives
    if what == "receive":
        mine, theirs = theirs, mine
        _spoil(tensor)
    index = len(mine)
    mine.append(tensor)

    def finish() -> None:
        content = channel.deliver(index)
        if what == "receive":
            tensor.data.copy_(content)

    text = "waits to send to {}" if what == "send" else "waits to receive from {}"
    wait = Wait(text, lambda: len(theirs) > index, lambda: [other])
    work = Work(thread, what, wait, finish)
    size = tensor.nbytes if what == "send" else 0
    thread.record("start", what, number=work.number, bytes=size, peer=other)
    return work


def meet(
    what: str,
    group: Group,
    brought: list[Tensor],
    share: float,
    finish: Callable[[Meeting], None],
    signature: str = "",
) -> Work:
    """Begin a collective: `finish` writes the result, when all ranks have brought their tensors.

    This rank sends `share` of what it brings.
    """
    thread = me()
    index = thread.world.joined[thread.rank, group.key]
    thread.world.joined[thread.rank, group.key] += 1
    signature = signature or (f"{what} of {_shape(*brought)}" if brought else what)
    new = Meeting(what, signature, thread.rank)
    meeting = thread.world.meetings.setdefault((group.key, index), new)
    if meeting.signature != signature:
        which = f"collective {index + 1} of this group is {signature} on rank {thread.rank}"
        other = f"and {meeting.signature} on rank {meeting.first}"
        remedy = "all ranks must start the same collectives in the same order"
        raise RuntimeError(f"{which}, {other}: {remedy}")
    for tensor in brought:
        _check_contiguous(tensor, what)
    meeting.brought[thread.rank] = [tensor.detach().clone() for tensor in brought]

    def missing() -> list[int]:
        return [rank for rank in group.ranks if rank not in meeting.brought]

    wait = Wait(f"waits in {what} for {{}}", lambda: not missing(), missing)
    work = Work(thread, what, wait, lambda: finish(meeting))
    size = share * sum(tensor.nbytes for tensor in brought)
    thread.record("start", what, number=work.number, bytes=size, alone=group.size() == 1)
    return work


def spoil_output(output: Tensor, *inputs: Tensor) -> None:
    """Make the buffer of a result unusable until `wait`, unless an input lies in it."""
    places = {tensor.untyped_storage().data_ptr() for tensor in inputs}
    if output.untyped_storage().data_ptr() not in places:
        _spoil(output)


def _spoil(tensor: Tensor) -> None:
    is_float = tensor.is_floating_point()
    tensor.data.fill_(float("nan") if is_float else torch.iinfo(tensor.dtype).min)


def _check_contiguous(tensor: Tensor, what: str) -> None:
    if not tensor.is_contiguous():
        shape = tuple(tensor.shape)
        raise RuntimeError(f"{what} of a non-contiguous tensor {shape}: gloo would send others")


def _shape(*tensors: Tensor) -> str:
    return " and ".join(f"{tuple(t.shape)} {str(t.dtype).rpartition('.')[2]}" for t in tensors)
