"""How the ranks of one axis of the mesh communicate, and a ledger of how many bytes they send.

    all-reduce        every rank gets the sum of all ranks' tensors (drawn in docs/pictures.md)
    all-gather        every rank gets all ranks' tensors, side by side
    reduce-scatter    every rank gets its own part of the sum
    all-to-all        every rank sends a different part of its tensor to each other rank
    shift             every rank sends to the next one, the last one to the first

Bytes are algorithmic: what one rank sends when the collective is done as a ring (Patarasuk and Yuan
2009). So formulas are exact, whatever the backend does. For n ranks and a tensor of b bytes

    all-reduce        2 (n-1)/n b
    all-gather          (n-1)/n b    of the gathered tensor
    reduce-scatter      (n-1)/n b    of the scattered one
    all-to-all          (n-1)/n b    of a rank's own tensor
    send, shift                 b

An axis of size 1 sends no bytes and changes nothing, so that callers need no special case for it.
"""

from collections import Counter
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor


class Ledger:
    """Calls and algorithmic bytes sent by this rank, by collective; no timing."""

    def __init__(self) -> None:
        self.calls, self.bytes = Counter(), Counter()

    def record(self, collective: str, sent: float) -> None:
        self.calls[collective] += 1
        self.bytes[collective] += sent  # may be a fraction, as (n-1)/n is

    def take_bytes(self) -> int:
        """The total, rounded to whole bytes; counting starts again at zero."""
        total = round(self.bytes.total())
        self.calls, self.bytes = Counter(), Counter()
        return total


class Axis:
    """One axis of the mesh as one rank sees it: the row of ranks that it is in."""

    def __init__(self, name: str, group: dist.ProcessGroup, device: torch.device) -> None:
        self.name, self.group, self.device, self.ledger = name, group, device, Ledger()
        self.rank, self.size = group.rank(), group.size()  # rank: the place within the row
        self.next, self.previous = (self.rank + 1) % self.size, (self.rank - 1) % self.size


class Finished(dist.Work):
    """Stands in for a communication over an axis of size 1."""

    def wait(self) -> None:
        pass


def start_all_reduce(tensor: Tensor, axis: Axis, op=dist.ReduceOp.SUM) -> dist.Work:
    """Begin to sum a tensor over the axis, in place; it may not be touched before `.wait()`."""
    # gloo accepts a strided slice and silently reduces the wrong elements.
    assert tensor.is_contiguous(), f"all_reduce of a non-contiguous tensor {tuple(tensor.shape)}"
    if axis.size == 1:  # the usual case on one GPU, which then needs no communicator
        return Finished()
    axis.ledger.record("all_reduce", 2 * (axis.size - 1) / axis.size * tensor.nbytes)
    return dist.all_reduce(tensor, op=op, group=axis.group, async_op=True)


def all_reduce(tensor: Tensor, axis: Axis, op=dist.ReduceOp.SUM) -> Tensor:
    start_all_reduce(tensor, axis, op).wait()  # with NCCL the stream waits, not the host
    return tensor


def all_gather(tensor: Tensor, axis: Axis, dim: int) -> Tensor:
    """[..., d, ...] on each rank -> [..., n d, ...], the ranks' tensors in order along `dim`."""
    assert tensor.is_contiguous(), f"all_gather of a non-contiguous tensor {tuple(tensor.shape)}"
    parts = tensor.new_empty(axis.size, *tensor.shape)  # [n, ..., d, ...]
    axis.ledger.record("all_gather", (axis.size - 1) / axis.size * parts.nbytes)
    _all_gather(parts.flatten(0, 1), tensor, group=axis.group)
    return parts.movedim(0, dim).flatten(dim, dim + 1)


def start_reduce_scatter(tensor: Tensor, axis: Axis, dim: int) -> tuple[Tensor, dist.Work]:
    """Begin to sum [..., n d, ...] over the axis; each rank gets its own [..., d, ...] of the sum.

    The result may be read after `.wait()`.
    """
    parts = _parts(tensor, axis, dim)
    mine = torch.empty_like(parts[0])  # [..., d, ...]
    axis.ledger.record("reduce_scatter", (axis.size - 1) / axis.size * parts.nbytes)
    return mine, _reduce_scatter(mine, parts.flatten(0, 1), group=axis.group, async_op=True)


def all_to_all(tensor: Tensor, axis: Axis, split_dim: int, gather_dim: int) -> Tensor:
    """Cut along one dim, a part for each rank, and join what the ranks sent along the other.

    [.., n s, .., g, ..] on each rank -> [.., s, .., n g, ..]. With the dims swapped it is undone.
    """
    parts = _parts(tensor, axis, split_dim)
    received = torch.empty_like(parts)
    axis.ledger.record("all_to_all", (axis.size - 1) / axis.size * parts.nbytes)
    dist.all_to_all_single(received, parts, group=axis.group)  # parts[i] to rank i
    return received.movedim(0, gather_dim).flatten(gather_dim, gather_dim + 1)


def _parts(tensor: Tensor, axis: Axis, dim: int) -> Tensor:
    """[..., n d, ...] -> [n, ..., d, ...]: the part for each rank, contiguous"""
    assert tensor.shape[dim] % axis.size == 0, f"{tensor.shape} along {dim} over {axis.size} ranks"
    return tensor.unflatten(dim, (axis.size, -1)).movedim(dim, 0).contiguous()


# torch 2.13 renamed them, and warns of the old names.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def start_send(tensor: Tensor, axis: Axis, to: int) -> dist.Work:
    """Begin to send a tensor to a rank of the axis. It may not be changed before `.wait()`."""
    axis.ledger.record("send", tensor.nbytes)  # messages between two ranks arrive in their order
    return dist.isend(tensor.contiguous(), group=axis.group, group_dst=to)


def start_receive(buffer: Tensor, axis: Axis, source: int) -> dist.Work:
    """Begin to receive a tensor from a rank of the axis; it is there after `.wait()`."""
    assert buffer.is_contiguous(), f"receive into a non-contiguous tensor {tuple(buffer.shape)}"
    return dist.irecv(buffer, group=axis.group, group_src=source)  # the sender counts it


class Shift:
    """All ranks of an axis send a tensor to the next one at once; the last one's next is the first.

    The tensors must have one shape and dtype, and may not be changed before `.wait()`.
    """

    def __init__(self, tensor: Tensor, axis: Axis) -> None:
        assert tensor.is_contiguous(), f"shift of a non-contiguous tensor {tuple(tensor.shape)}"
        self.sent, self.arriving = tensor, torch.empty_like(tensor)
        axis.ledger.record("shift", tensor.nbytes)
        send = dist.P2POp(dist.isend, tensor, group=axis.group, group_peer=axis.next)
        receive = dist.P2POp(dist.irecv, self.arriving, group=axis.group, group_peer=axis.previous)
        # Together: NCCL would do one after the other, and all ranks would wait for a receiver.
        self.works = dist.batch_isend_irecv([send, receive])

    def wait(self) -> Tensor:
        """The previous rank's tensor."""
        for work in self.works:
            work.wait()
        return self.arriving


def ring(tensor: Tensor, axis: Axis) -> Iterator[tuple[int, Tensor]]:
    """Every rank's tensor in turn, with its rank: first this rank's own, then the previous rank's.

    While one is in use the next is travelling, so that two exist at a time.
    """
    for hop in range(axis.size - 1):
        shift = Shift(tensor, axis)
        yield (axis.rank - hop) % axis.size, tensor
        tensor = shift.wait()  # usually there by now: it travelled while the last one was in use
    yield axis.next, tensor  # after n-1 hops the tensor is the next rank's
