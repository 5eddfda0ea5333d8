"""What ranks say to each other along one axis of the mesh, and a ledger of how much that was.

    world of 8 as (pp 2, dp 2, cp 1, tp 2); rank 5 is at pp 1, dp 0, tp 1:

        pp 0:  dp 0 [0 1]   dp 1 [2 3]          rank 5's tp axis: [4 5]
        pp 1:  dp 0 [4 5]   dp 1 [6 7]          rank 5's dp axis: [5 7], its pp axis: [1 5]

Bytes are algorithmic: what one rank sends when the collective is done as a ring (Patarasuk and Yuan
2009). So formulas are exact, whatever the backend does. For n ranks and a tensor of b bytes

    all-reduce        2 (n-1)/n b
    all-gather          (n-1)/n b    of the gathered tensor
    reduce-scatter      (n-1)/n b    of the scattered one
    all-to-all          (n-1)/n b    of a rank's own tensor
    send, shift                 b

An axis of size 1 says nothing and changes nothing, so that callers need no special case for it.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh


@dataclass
class Ledger:
    """Calls and algorithmic bytes sent by this rank, by collective; a plain tally, no timing."""

    calls: Counter[str] = field(default_factory=Counter)
    bytes: Counter[str] = field(default_factory=Counter)

    def record(self, collective: str, sent: float) -> None:
        self.calls[collective] += 1
        self.bytes[collective] += sent

    def take_bytes(self) -> int:
        """All bytes since the last time, rounded to whole ones; the tally starts again."""
        total = round(self.bytes.total())
        self.calls.clear()
        self.bytes.clear()
        return total


@dataclass(frozen=True, eq=False)
class Axis:
    """One axis of the mesh as one rank sees it: the row of ranks that it is in."""

    name: str
    submesh: DeviceMesh  # 1-D
    ledger: Ledger = field(default_factory=Ledger)

    @property
    def size(self) -> int:
        return self.submesh.size()

    @property
    def rank(self) -> int:
        """This rank's place within the row, 0 .. size-1."""
        return self.submesh.get_local_rank()

    @property
    def next(self) -> int:
        return (self.rank + 1) % self.size

    @property
    def previous(self) -> int:
        return (self.rank - 1) % self.size

    @property
    def group(self) -> dist.ProcessGroup:
        return self.submesh.get_group()

    def part(self, length: int) -> slice:
        """This rank's part of `length` things in a row: 10 over 4 ranks are 3, 3, 3 and 1.

        The same parts as `torch.chunk` and DTensor's `Shard` make.
        """
        each = -(-length // self.size)
        return slice(min(self.rank * each, length), min((self.rank + 1) * each, length))


class Finished:
    """A communication that never had to happen."""

    def wait(self) -> None:
        pass


def start_all_reduce(tensor: Tensor, axis: Axis, op=dist.ReduceOp.SUM) -> dist.Work | Finished:
    """Begin to sum a tensor over the axis, in place; it may not be touched before `.wait()`.

    With NCCL, wait() makes the current stream wait, not the host.
    """
    # gloo accepts a strided slice and silently reduces the wrong elements.
    assert tensor.is_contiguous(), f"all_reduce of a non-contiguous tensor {tuple(tensor.shape)}"
    if axis.size == 1:
        return Finished()
    axis.ledger.record("all_reduce", 2 * (axis.size - 1) / axis.size * tensor.nbytes)
    return dist.all_reduce(tensor, op=op, group=axis.group, async_op=True)


def all_reduce(tensor: Tensor, axis: Axis, op=dist.ReduceOp.SUM) -> Tensor:
    """Sum a tensor over the axis, in place, and return it."""
    start_all_reduce(tensor, axis, op).wait()
    return tensor


def all_gather(tensor: Tensor, axis: Axis, dim: int) -> Tensor:
    """[..., d, ...] on each rank -> [..., n d, ...], the ranks' tensors in order along `dim`."""
    assert tensor.is_contiguous(), f"all_gather of a non-contiguous tensor {tuple(tensor.shape)}"
    if axis.size == 1:
        return tensor
    parts = tensor.new_empty(axis.size, *tensor.shape)
    axis.ledger.record("all_gather", (axis.size - 1) / axis.size * parts.nbytes)
    _all_gather(parts.flatten(0, 1), tensor, group=axis.group)
    return parts.movedim(0, dim).flatten(dim, dim + 1)


def start_reduce_scatter(
    tensor: Tensor, axis: Axis, dim: int
) -> tuple[Tensor, dist.Work | Finished]:
    """Begin to sum [..., n d, ...] over the axis; each rank gets its own [..., d, ...] of the sum.

    The result may be read after `.wait()`.
    """
    if axis.size == 1:
        return tensor, Finished()
    assert tensor.shape[dim] % axis.size == 0, f"{tensor.shape} along {dim} over {axis.size} ranks"
    parts = tensor.unflatten(dim, (axis.size, -1)).movedim(dim, 0).contiguous()
    mine = torch.empty_like(parts[0])
    axis.ledger.record("reduce_scatter", (axis.size - 1) / axis.size * parts.nbytes)
    work = _reduce_scatter(mine, parts.flatten(0, 1), group=axis.group, async_op=True)
    return mine, work


def all_to_all(tensor: Tensor, axis: Axis, split_dim: int, gather_dim: int) -> Tensor:
    """Cut along one dim, a part for each rank; what came from the ranks is joined along the other.

    [.., n s, .., g, ..] on each rank -> [.., s, .., n g, ..]. With the dims swapped it is undone.
    """
    if axis.size == 1:
        return tensor
    assert tensor.shape[split_dim] % axis.size == 0, f"{tensor.shape} over {axis.size} ranks"
    parts = torch.stack(tensor.chunk(axis.size, split_dim))
    received = torch.empty_like(parts)
    axis.ledger.record("all_to_all", (axis.size - 1) / axis.size * parts.nbytes)
    dist.all_to_all_single(received, parts, group=axis.group)
    return torch.cat(received.unbind(), gather_dim)


# torch 2.13 renamed them, and warns of the old names.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def start_send(tensor: Tensor, axis: Axis, to: int) -> dist.Work:
    """Begin to send a tensor to a rank of the axis. It may not be changed before `.wait()`.

    Messages between two ranks have no names: both must have them in the same order.
    """
    tensor = tensor.contiguous()
    axis.ledger.record("send", tensor.nbytes)
    return dist.isend(tensor, group=axis.group, group_dst=to)


def start_receive(buffer: Tensor, axis: Axis, source: int) -> dist.Work:
    """Begin to receive a tensor from a rank of the axis; it is there after `.wait()`."""
    assert buffer.is_contiguous(), f"receive into a non-contiguous tensor {tuple(buffer.shape)}"
    return dist.irecv(buffer, group=axis.group, group_src=source)


class Shift:
    """All ranks of an axis send a tensor to the next one at once; the last one's next is the first.

    The tensors must have one shape and dtype, and may not be changed before `.wait()`.
    """

    def __init__(self, tensor: Tensor, axis: Axis) -> None:
        assert tensor.is_contiguous(), f"shift of a non-contiguous tensor {tuple(tensor.shape)}"
        self.sent, self.arriving = tensor, torch.empty_like(tensor)
        axis.ledger.record("shift", tensor.nbytes)
        # Together: NCCL would do one after the other, and all ranks would wait to be received from.
        self.works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, tensor, group=axis.group, group_peer=axis.next),
                dist.P2POp(dist.irecv, self.arriving, group=axis.group, group_peer=axis.previous),
            ]
        )

    def wait(self) -> Tensor:
        """The previous rank's tensor."""
        for work in self.works:
            work.wait()
        return self.arriving


def ring(tensor: Tensor, axis: Axis) -> Iterator[tuple[int, Tensor]]:
    """Every rank's tensor in turn, with its rank: one's own, the previous rank's, and so on.

    While one is in use the next is on its way, so that two exist at a time.
    """
    for hop in range(axis.size - 1):
        shift = Shift(tensor, axis)
        yield (axis.rank - hop) % axis.size, tensor
        tensor = shift.wait()
    yield axis.next, tensor  # n-1 hops back, round the ring, is one on
