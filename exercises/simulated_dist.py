"""`torch.distributed` on simulated ranks: the functions that the course and students call.

They check what gloo does not, and count algorithmic bytes as collectives.py does, but on their own:
what bypasses the course's ledger is seen here.
"""

import contextlib
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from exercises.compare import described
from exercises.network import Group, Work, me
from exercises.world import RankThread

OPERATIONS = {
    dist.ReduceOp.SUM: Tensor.sum,
    dist.ReduceOp.AVG: Tensor.mean,
    dist.ReduceOp.MAX: Tensor.amax,
    dist.ReduceOp.MIN: Tensor.amin,
    dist.ReduceOp.PRODUCT: Tensor.prod,
}


@contextlib.contextmanager
def simulated() -> Iterator[None]:
    """Within, torch.distributed works on the simulated ranks.

    The course must be imported within, too: it takes some functions when it is imported.
    """
    # Some names are of newer, others of older releases.
    there = {name: function for name, function in FUNCTIONS.items() if hasattr(dist, name)}
    before = torch.get_deterministic_debug_mode()
    # New memory is NaN: a mistake that reads it gives the same result each time. Not by
    # torch.use_deterministic_algorithms, which imports a compiler: a second for each check.
    torch.set_deterministic_debug_mode("error")
    try:
        world = mock.patch.object(type(dist.group), "WORLD", property(_default_group))
        with mock.patch.multiple(dist, **there), world:
            yield
    finally:
        torch.set_deterministic_debug_mode(before)


def world_group() -> Group:
    """Of all ranks; RuntimeError where they are only a part of the world: see `axis_group`."""
    if me().is_part:
        what = "without a group this is about the whole world, of which an axis is a part"
        raise RuntimeError(f"{what}: use axis.group, axis.rank and axis.size")
    return Group(tuple(range(me().world.size)), me().rank, copy=0)


def axis_group() -> Group:
    """Of all ranks, too, but in a larger world, in which they have other numbers."""
    size, me().is_part = me().world.size, True
    return Group(tuple(range(size)), me().rank, copy=0, first=size)


def _default_group(_: type) -> Group | None:  # where there is none, as while torch is imported
    return world_group() if isinstance(threading.current_thread(), RankThread) else None


def _new_group(ranks=None, timeout=None, *_, use_local_synchronization=False, **__) -> Group:
    ranks = tuple(range(me().world.size) if ranks is None else ranks)
    if not use_local_synchronization:  # all ranks wait for each other, also those outside
        signature = f"new_group of ranks {list(ranks)}"
        Work("new_group", world_group(), [], signature=signature).wait()
    copy = 1 + me().world.next_index("groups", me().rank, ranks)  # 0 is the group of the world
    return Group(ranks, me().rank, copy, timeout)


def _new_subgroups(rows, timeout=None, *_, **__) -> tuple[Group | None, list[Group]]:
    groups = [_new_group(row, timeout) for row in rows]
    mine = [group for group in groups if me().rank in group.ranks]
    return (mine[0] if mine else None), groups


def _collective(what, group, async_op, brought, *how: Any) -> Work | None:
    work = Work(what, group, brought, *how)
    if async_op:
        return work
    work.wait()
    return None


def _all_reduce(tensor, op=dist.ReduceOp.SUM, group=None, async_op=False):
    group, reduce = group or world_group(), OPERATIONS[op]
    share = 2 * (group.size() - 1) / group.size()
    how = share, [tensor], lambda parts: [reduce(_stack(parts), 0)]
    return _collective("all_reduce", group, async_op, [tensor], *how)


def _all_gather(output, tensor, group=None, async_op=False):
    """Into one tensor, or into a list with one for each rank."""
    group = group or world_group()
    is_one, n = isinstance(output, Tensor), group.size()
    _check_size("all_gather", output if is_one else torch.stack(output), n * tensor.numel())
    # It sends (n-1)/n of the gathered tensor.
    how = n - 1, [output] if is_one else output, lambda x: [_stack(x)] if is_one else _stack(x)
    return _collective("all_gather", group, async_op, [tensor], *how)


def _reduce_scatter(output, tensor, op=dist.ReduceOp.SUM, group=None, async_op=False):
    """Of one tensor, or of a list with one for each rank."""
    group, reduce = group or world_group(), OPERATIONS[op]
    n, rank = group.size(), group.rank()
    tensor = tensor if isinstance(tensor, Tensor) else torch.stack(tensor)
    _check_size("reduce_scatter", tensor, n * output.numel())
    how = (n - 1) / n, [output], lambda parts: [reduce(_stack(parts), 0).flatten().chunk(n)[rank]]
    return _collective("reduce_scatter", group, async_op, [tensor], *how)


def _all_to_all(
    output, tensor, output_split_sizes=None, input_split_sizes=None, group=None, async_op=False
):
    group = group or world_group()
    n, rank = group.size(), group.rank()
    parts = list(tensor.split(input_split_sizes or [len(tensor) // n] * n))
    receives = output_split_sizes or [len(output) // n] * n

    def mine(brought: list[list[Tensor]]) -> list[Tensor]:
        come = [len(parts[rank]) for parts in brought]
        if come != receives:
            raise RuntimeError(f"rank {rank} expects {receives} rows, but {come} rows come to it")
        return [torch.cat([parts[rank] for parts in brought])]

    # A rank's own rows stay where they are.
    leaving = sum(part.nbytes for i, part in enumerate(parts) if i != rank)
    signature = f"all_to_all of {str(tensor.dtype).rpartition('.')[2]}"
    how = leaving / (tensor.nbytes or 1), [output], mine, signature
    return _collective("all_to_all", group, async_op, parts, *how)


def _broadcast(tensor, src=None, group=None, async_op=False, group_src=None):
    group = group or world_group()
    first = group_src if src is None else group.numbers.index(src)
    how = 1.0, [tensor], lambda parts: parts[first]
    return _collective("broadcast", group, async_op, [tensor], *how)


def _barrier(group=None, async_op=False, **_):
    return _collective("barrier", group or world_group(), async_op, [])


def _stack(parts: list[list[Tensor]]) -> Tensor:
    """One tensor of each rank."""
    return torch.stack([tensor for (tensor,) in parts])


def _check_size(what: str, whole: Tensor, expected: int) -> None:
    if whole.numel() != expected:
        sizes = f"the whole tensor has {whole.numel()} numbers, and the parts {expected} in all"
        raise RuntimeError(f"{what}: {sizes}")


def _isend(tensor, dst=None, group=None, tag=0, group_dst=None):
    return Work("send", **_message(tensor, dst, group, group_dst), brought=[tensor])


def _irecv(tensor, src=None, group=None, tag=0, group_src=None):
    end = _message(tensor, src, group, group_src)
    return Work("receive", **end, brought=[], outputs=[tensor], combine=lambda x: x[0])


def _batch(ends: list[partial]) -> list[Work]:
    me().record("batch", f"{len(ends)} messages")
    return [end() for end in ends]


def _message(tensor: Tensor, rank: int | None, group: Group | None, place: int | None) -> dict:
    """One end of a message: the other end is a rank of the world, or a place in the group."""
    group = group or world_group()
    if rank is not None and rank not in group.numbers:  # torch answers in the same way
        raise ValueError(f"Global rank {rank} is not part of group {group.numbers}")
    peer = place if rank is None else group.numbers.index(rank)
    return {"group": group, "peer": peer, "signature": described(tensor)}


FUNCTIONS = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
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
    "P2POp": lambda op, tensor, peer=None, group=None, tag=0, group_peer=None: partial(
        op, tensor, peer, group, tag, group_peer
    ),
    "batch_isend_irecv": _batch,
    "get_backend": lambda group=None: "simulated",
    "get_rank": lambda group=None: (group or world_group()).rank(),
    "get_world_size": lambda group=None: (group or world_group()).size(),
    "get_process_group_ranks": lambda group: list(group.numbers),
    "get_global_rank": lambda group, place: group.numbers[place],
    "new_group": _new_group,
    "new_subgroups_by_enumeration": _new_subgroups,
    "is_initialized": lambda: True,
}
