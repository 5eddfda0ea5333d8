"""Collectives: how the ranks of an axis communicate, and a ledger of the bytes that they send.

    collective         what each of n ranks gets                 bytes that it sends
    all-reduce         the sum of all ranks' tensors             2 (n-1)/n b
    all-gather         all ranks' tensors, side by side            (n-1)/n b
    reduce-scatter     its own part of the sum                     (n-1)/n b
    all-to-all         a different part of each rank's tensor      (n-1)/n b
    shift              the tensor of a rank before it, in a ring         b

b is the size of a rank's tensor; of an all-gather, of the gathered tensor. Bytes are algorithmic:
what one rank sends when the collective is done as a ring (Patarasuk and Yuan 2009; drawn in
docs/pictures.md). So formulas are exact, whatever the backend does. A collective over an axis of
size 1 sends nothing and changes nothing.
"""

from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import Tensor


class Ledger:
    """Calls and algorithmic bytes sent by this rank, by collective; no timing."""

    def __init__(self) -> None:
        self.calls, self.bytes = Counter(), Counter()

    def record(self, collective: str, tensor: Tensor, share: float = 1.0) -> None:
        """Count a call that sends this share of a tensor."""
        # gloo accepts a strided slice and silently takes the wrong elements.
        shape = tuple(tensor.shape)
        assert tensor.is_contiguous(), f"{collective} of a non-contiguous tensor {shape}"
        self.calls[collective] += 1
        self.bytes[collective] += share * tensor.nbytes  # may be a fraction, as (n-1)/n is

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
        self.share = (self.size - 1) / self.size  # (n-1)/n: all parts of a tensor but one


def start_all_reduce(tensor: Tensor, axis: Axis, op=dist.ReduceOp.SUM) -> dist.Work:
    """Begin to sum a tensor over the axis, in place; it may not be touched before `.wait()`."""
    axis.ledger.record("all_reduce", tensor, 2 * axis.share)
    if axis.size == 1:  # the usual case on one GPU, which then needs no communicator
        return SimpleNamespace(wait=lambda: None)
    return dist.all_reduce(tensor, op=op, group=axis.group, async_op=True)


def all_reduce(tensor: Tensor, axis: Axis, op=dist.ReduceOp.SUM) -> Tensor:
    start_all_reduce(tensor, axis, op).wait()  # with NCCL the stream waits, not the host
    return tensor


def all_gather(tensor: Tensor, axis: Axis, dim: int) -> Tensor:
    """[..., d, ...] on each rank -> [..., n d, ...], the ranks' tensors in order along `dim`."""
    parts = tensor.new_empty(axis.size, *tensor.shape)  # [n, ..., d, ...]
    axis.ledger.record("all_gather", parts, axis.share)
    all_gather_single(parts.flatten(0, 1), tensor.contiguous(), group=axis.group)
    return parts.movedim(0, dim).flatten(dim, dim + 1)


def start_reduce_scatter(tensor: Tensor, axis: Axis, dim: int) -> tuple[Tensor, dist.Work]:
    """Begin to sum [..., n d, ...]; after `.wait()` each rank has its part, [..., d, ...]."""
    parts = _parts(tensor, axis, dim)
    mine = torch.empty_like(parts[0])  # [..., d, ...]
    axis.ledger.record("reduce_scatter", parts, axis.share)
    return mine, reduce_scatter_single(mine, parts.flatten(0, 1), group=axis.group, async_op=True)


def reduce_scatter(tensor: Tensor, axis: Axis, dim: int) -> Tensor:
    mine, work = start_reduce_scatter(tensor, axis, dim)
    work.wait()
    return mine


def all_to_all(tensor: Tensor, axis: Axis, split_dim: int, gather_dim: int) -> Tensor:
    """[.., n s, .., g, ..] on each rank -> [.., s, .., n g, ..]; the dims swapped undo it."""
    parts = _parts(tensor, axis, split_dim)
    received = torch.empty_like(parts)
    axis.ledger.record("all_to_all", parts, axis.share)
    dist.all_to_all_single(received, parts, group=axis.group)  # parts[i] to rank i
    return received.movedim(0, gather_dim).flatten(gather_dim, gather_dim + 1)


def _parts(tensor: Tensor, axis: Axis, dim: int) -> Tensor:
    """[..., n d, ...] -> [n, ..., d, ...]: the part for each rank, contiguous"""
    assert tensor.shape[dim] % axis.size == 0, f"{tensor.shape} along {dim} over {axis.size} ranks"
    return tensor.unflatten(dim, (axis.size, -1)).movedim(dim, 0).contiguous()


# torch 2.13 renamed them, and warns of the old names.
all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def start_send(tensor: Tensor, axis: Axis, to: int) -> dist.Work:
    """Begin to send a tensor to a rank of the axis. It may not be changed before `.wait()`."""
    tensor = tensor.contiguous()
    axis.ledger.record("send", tensor)  # messages between two ranks arrive in their order
    return dist.isend(as_message(tensor, axis), group=axis.group, group_dst=to)


def start_receive(buffer: Tensor, axis: Axis, source: int) -> dist.Work:
    """Begin to receive a tensor from a rank of the axis; it is there after `.wait()`."""
    assert buffer.is_contiguous(), f"receive into a non-contiguous tensor {tuple(buffer.shape)}"
    message = as_message(buffer, axis)
    work = dist.irecv(message, group=axis.group, group_src=source)  # the sender counts it
    if message is buffer:
        return work
    return SimpleNamespace(wait=lambda: (work.wait(), buffer.copy_(message)))


def as_message(tensor: Tensor, axis: Axis) -> Tensor:
    """The tensor, or its copy on the host for gloo, which cannot send from a GPU's memory."""
    return tensor.cpu() if tensor.is_cuda and dist.get_backend(axis.group) == "gloo" else tensor


class Conjugate(torch.autograd.Function):
    """x -> there(x), and in backward dy -> back(dy), which must be the transpose of `there`.

    For a gather it is a sum over the ranks, of which each keeps its part; for an all-to-all, or
    any other permutation, it is the inverse.
    """

    @staticmethod
    def forward(ctx, there, back, x):
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx, dy):
        return None, None, ctx.back(dy)


class Shift:
    """Every rank sends a tensor, all of one shape and dtype, to the rank `distance` after it.

    The ranks are in a ring: after the last comes the first.
    """

    def __init__(self, tensor: Tensor, axis: Axis, distance: int = 1) -> None:
        axis.ledger.record("shift", tensor)
        to, source = ((axis.rank + d) % axis.size for d in (distance, -distance))
        self.sent = tensor  # may not be changed before `wait`
        tensor = as_message(tensor, axis)
        self.arriving = torch.empty_like(tensor)
        send = dist.P2POp(dist.isend, tensor, group=axis.group, group_peer=to)
        receive = dist.P2POp(dist.irecv, self.arriving, group=axis.group, group_peer=source)
        # Together: NCCL would do one after the other, and all ranks would wait for a receiver.
        self.works = dist.batch_isend_irecv([send, receive])

    def wait(self) -> Tensor:
        """The tensor of the rank `distance` before this one."""
        for work in self.works:
            work.wait()
        return self.arriving.to(self.sent.device)


def ring(tensor: Tensor, axis: Axis) -> Iterator[tuple[int, Tensor]]:
    """Every rank's tensor in turn, with its rank: this rank's own, then the previous rank's, ..."""
    for hop in range(axis.size - 1):
        shift = Shift(tensor, axis)  # the next one travels while this one is in use: two exist
        yield (axis.rank - hop) % axis.size, tensor
        tensor = shift.wait()
    yield axis.next, tensor  # after n-1 hops the tensor is the next rank's
