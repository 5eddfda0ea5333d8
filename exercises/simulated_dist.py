"""`torch.distributed` on simulated ranks: the functions that the course calls, for network.py.

They check what gloo does not, and count algorithmic bytes as collectives.py does, but on their own:
what bypasses the course's ledger is seen here.
"""

import contextlib
from collections.abc import Iterator
from functools import partial
from operator import itemgetter
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from exercises.network import Group, me, meet, post

OPERATIONS = {
    dist.ReduceOp.SUM: lambda x: x.sum(0),
    dist.ReduceOp.AVG: lambda x: x.mean(0),
    dist.ReduceOp.MAX: lambda x: x.amax(0),
    dist.ReduceOp.MIN: lambda x: x.amin(0),
    dist.ReduceOp.PRODUCT: lambda x: x.prod(0),
}


@contextlib.contextmanager
def simulated() -> Iterator[None]:
    """Within, torch.distributed is that of the simulated ranks.

    The course must be imported within, too: it takes some functions when it is imported.
    """
    # Some names are those of newer, others of older releases.
    there = {name: function for name, function in FUNCTIONS.items() if hasattr(dist, name)}
    before = torch.get_deterministic_debug_mode()
    # New memory is NaN: a mistake that reads it gives the same result each time. Not by
    # torch.use_deterministic_algorithms, which imports a compiler: a second for each check.
    torch.set_deterministic_debug_mode("error")
    try:
        with mock.patch.multiple(dist, **there):
            yield
    finally:
        torch.set_deterministic_debug_mode(before)


def world_group() -> Group:
    return Group(tuple(range(me().world.size)), me().rank, copy=0)


def _new_group(ranks=None, timeout=None, *_, use_local_synchronization=False, **__) -> Group:
    ranks = tuple(range(me().world.size) if ranks is None else ranks)
    if not use_local_synchronization:  # all ranks wait for each other, also those outside
        signature = f"new_group of ranks {list(ranks)}"
        meet("new_group", world_group(), [], 0.0, lambda brought: None, signature=signature)
    copy = 1 + me().world.next_index("groups", me().rank, ranks)  # 0 is the group of the world
    return Group(ranks, me().rank, copy, timeout)


def _new_subgroups(
    rows: list[list[int]], timeout: Any = None, *_: Any, **__: Any
) -> tuple[Group | None, list[Group]]:
    groups = [_new_group(row, timeout) for row in rows]
    mine = [group for group in groups if me().rank in group.ranks]
    return (mine[0] if mine else None), groups


def _collective(what, output, tensor, group, share, combine, async_op):
    """Of all ranks' tensors, in their order, `combine` makes what is written to `output`."""

    def finish(brought: list[list[Tensor]]) -> None:
        output.data.copy_(combine([tensor for (tensor,) in brought]).view_as(output))

    return meet(what, group, [tensor], share, finish, output, async_op)


def _all_reduce(tensor, op=dist.ReduceOp.SUM, group=None, async_op=False):
    group, reduce = group or world_group(), OPERATIONS[op]
    share = 2 * (group.size() - 1) / group.size()

    def total(parts: list[Tensor]) -> Tensor:
        return reduce(torch.stack(parts))

    return _collective("all_reduce", tensor, tensor, group, share, total, async_op)


def _all_gather(output, tensor, group=None, async_op=False):
    group = group or world_group()
    n = group.size()
    _check_size("all_gather", output, n * tensor.numel())
    share = n - 1  # (n-1)/n of the gathered tensor
    return _collective("all_gather", output, tensor, group, share, torch.stack, async_op)


def _reduce_scatter(output, tensor, op=dist.ReduceOp.SUM, group=None, async_op=False):
    group, reduce = group or world_group(), OPERATIONS[op]
    n, rank = group.size(), group.rank()
    _check_size("reduce_scatter", tensor, n * output.numel())

    def part(parts: list[Tensor]) -> Tensor:
        return reduce(torch.stack(parts)).flatten().chunk(n)[rank]

    return _collective("reduce_scatter", output, tensor, group, (n - 1) / n, part, async_op)


def _all_to_all(
    output, tensor, output_split_sizes=None, input_split_sizes=None, group=None, async_op=False
):
    group = group or world_group()
    n, rank = group.size(), group.rank()
    parts = list(tensor.split(input_split_sizes or [len(tensor) // n] * n))
    receives = output_split_sizes or [len(output) // n] * n

    def finish(brought: list[list[Tensor]]) -> None:
        come = [len(parts[rank]) for parts in brought]
        if come != receives:
            raise RuntimeError(f"rank {rank} expects {receives} rows, but {come} rows come to it")
        output.data.copy_(torch.cat([parts[rank] for parts in brought]))

    leaving = sum(part.nbytes for i, part in enumerate(parts) if i != rank)
    share = leaving / (tensor.nbytes or 1)
    signature = f"all_to_all of {str(tensor.dtype).rpartition('.')[2]}"
    return meet("all_to_all", group, parts, share, finish, output, async_op, signature)


def _broadcast(tensor, src=None, group=None, async_op=False, group_src=None):
    group = group or world_group()
    first = itemgetter(group_src if src is None else group.ranks.index(src))
    return _collective("broadcast", tensor, tensor, group, 1.0, first, async_op)


def _barrier(group=None, async_op=False, **_):
    group = group or world_group()
    return meet("barrier", group, [], 0.0, lambda brought: None, async_op=async_op)


def _check_size(what: str, whole: Tensor, expected: int) -> None:
    if whole.numel() != expected:
        sizes = f"the whole tensor has {whole.numel()} numbers, and the parts {expected} in all"
        raise RuntimeError(f"{what}: {sizes}")


def _isend(tensor, dst=None, group=None, tag=0, group_dst=None):
    return _message("send", tensor, dst, group, group_dst)


def _irecv(tensor, src=None, group=None, tag=0, group_src=None):
    return _message("receive", tensor, src, group, group_src)


def _message(what: str, tensor: Tensor, rank: int | None, group: Group | None, place: int | None):
    """The other end is a rank of the world, or a place in the group."""
    group = group or world_group()
    if rank is not None and rank not in group.ranks:  # torch answers in the same way
        raise ValueError(f"Global rank {rank} is not part of group {list(group.ranks)}")
    return post(what, tensor, group, place if rank is None else group.ranks.index(rank))


def _end(op, tensor, peer=None, group=None, tag=0, group_peer=None):
    """One end of a message, for batch_isend_irecv."""
    return partial(op, tensor, peer, group, tag, group_peer)


FUNCTIONS = {
    "all_reduce": _all_reduce,
    "all_gather_single": _all_gather,
    "all_gather_into_tensor": _all_gather,
    "reduce_scatter_single": _reduce_scatter,
    "reduce_scatter_tensor": _reduce_scatter,
    "all_to_all_single": _all_to_all,
    "broadcast": _broadcast,
    "barrier": _barrier,
    "isend": _isend,
    "irecv": _irecv,
    "send": lambda *args, **options: _isend(*args, **options).wait(),
    "recv": lambda *args, **options: _irecv(*args, **options).wait(),
    "P2POp": _end,
    "batch_isend_irecv": lambda ends: [end() for end in ends],
    "get_backend": lambda group=None: "simulated",
    "get_rank": lambda group=None: group.rank() if group else me().rank,
    "get_world_size": lambda group=None: group.size() if group else me().world.size,
    "get_process_group_ranks": lambda group: list(group.ranks),
    "new_group": _new_group,
    "new_subgroups_by_enumeration": _new_subgroups,
    "is_initialized": lambda: True,
}
