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

from exercises.world import RankThread, Wait


class Group:
    """A process group, as one of its ranks sees it; `copy` tells groups of equal ranks apart."""

    def __init__(self, ranks: tuple[int, ...], me: int, copy: int, timeout: Any = None) -> None:
        self.ranks, self.me, self.key, self.timeout = ranks, me, (ranks, copy), timeout

    def rank(self) -> int:
        return self.ranks.index(self.me)

    def size(self) -> int:
        return len(self.ranks)


class Work:
    """An operation that has begun: `wait` returns when it is done."""

    def __init__(self, what: str, wait: Wait, finish: Callable[[], None], **event: Any) -> None:
        self.thread, self.what, self.until, self.finish = me(), what, wait, finish
        self.number, self.is_done = self.thread.operations, False
        self.thread.operations += 1
        self.thread.record("start", what, number=self.number, **event)

    def wait(self, timeout: object = None) -> bool:
        if not self.is_done:
            self.thread.record("wait", self.what, number=self.number)
            self.thread.pause(self.until)
            self.finish()
            self.is_done = True
        return True


def me() -> RankThread:
    thread = threading.current_thread()
    assert isinstance(thread, RankThread), "only ranks communicate"
    return thread


class Message:
    """What two ranks have posted: the n-th send and the n-th receive between them in a group."""

    def __init__(self) -> None:
        self.posted: dict[str, Tensor] = {}
        self.sent: Tensor | None = None

    def content(self) -> Tensor:
        """What it holds from the moment that the first of its two ends waits for it."""
        if self.sent is None:
            sent, buffer = self.posted["send"], self.posted["receive"]
            if sent.shape != buffer.shape or sent.dtype != buffer.dtype:
                what = f"a message of {_shape(sent)} is received into a buffer of {_shape(buffer)}"
                raise RuntimeError(f"{what}: both must have the same shape and dtype")
            self.sent = sent.detach().clone()
            self.posted = dict.fromkeys(self.posted)  # the network keeps no tensor alive
        return self.sent


def post(what: str, tensor: Tensor, group: Group, peer: int) -> Work:
    """Begin to "send" to a rank of the group, or to "receive" from it."""
    thread, other = me(), group.ranks[peer]
    _check_contiguous(tensor, what)
    source, to = (thread.rank, other) if what == "send" else (other, thread.rank)
    index = thread.world.next_index(what, group.key, source, to)
    message = thread.world.messages.setdefault((source, to, group.key, index), Message())
    message.posted[what] = tensor
    if what == "receive":
        _spoil(tensor)

    def finish() -> None:
        content = message.content()
        if what == "receive":
            tensor.data.copy_(content)

    text = "waits to send to {}" if what == "send" else "waits to receive from {}"
    wait = Wait(text, lambda: len(message.posted) == 2, lambda: [other])
    size = tensor.nbytes if what == "send" else 0
    return Work(what, wait, finish, bytes=size, peer=other)


class Meeting:
    """One collective: what each rank has brought, as it was when the rank started it."""

    def __init__(self, signature: str, rank: int) -> None:
        self.signature, self.first = signature, rank
        self.brought: dict[int, list[Tensor]] = {}  # by rank; parts are for each rank


def meet(
    what: str,
    group: Group,
    brought: list[Tensor],
    share: float,
    finish: Callable[[list[list[Tensor]]], None],
    output: Tensor | None = None,
    async_op: bool = False,
    signature: str = "",
) -> Work | None:
    """A collective: `finish` writes the output, of what all ranks in the group's order brought.

    This rank sends `share` of what it brings.
    """
    thread = me()
    index = thread.world.next_index(thread.rank, group.key)
    signature = signature or (f"{what} of {_shape(*brought)}" if brought else what)
    new = Meeting(signature, thread.rank)
    meeting = thread.world.meetings.setdefault((group.key, index), new)
    if meeting.signature != signature:
        which = f"collective {index + 1} of this group is {signature} on rank {thread.rank}"
        other = f"and {meeting.signature} on rank {meeting.first}"
        remedy = "all ranks must start the same collectives in the same order"
        raise RuntimeError(f"{which}, {other}: {remedy}")
    for tensor in brought:
        _check_contiguous(tensor, what)
    meeting.brought[thread.rank] = [tensor.detach().clone() for tensor in brought]
    places = {tensor.untyped_storage().data_ptr() for tensor in brought}
    if output is not None and output.untyped_storage().data_ptr() not in places:
        _spoil(output)

    def missing() -> list[int]:
        return [rank for rank in group.ranks if rank not in meeting.brought]

    def done() -> None:
        finish([meeting.brought[rank] for rank in group.ranks])

    wait = Wait(f"waits in {what} for {{}}", lambda: not missing(), missing)
    size = share * sum(tensor.nbytes for tensor in brought)
    work = Work(what, wait, done, bytes=size, alone=group.size() == 1)
    if not async_op:
        work.wait()
    return work if async_op else None


def _spoil(tensor: Tensor) -> None:
    """Make a buffer unusable until `wait`."""
    is_float = tensor.is_floating_point()
    tensor.data.fill_(float("nan") if is_float else torch.iinfo(tensor.dtype).min)


def _check_contiguous(tensor: Tensor, what: str) -> None:
    if not tensor.is_contiguous():
        shape = tuple(tensor.shape)
        raise RuntimeError(f"{what} of a non-contiguous tensor {shape}: gloo would send others")


def _shape(*tensors: Tensor) -> str:
    return " and ".join(f"{tuple(t.shape)} {str(t.dtype).rpartition('.')[2]}" for t in tensors)
