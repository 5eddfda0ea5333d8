"""In-place collectives: of a buffer [n, R] whose rows are the ranks' own.

gloo has no reduce-scatter, nor a gather in place: torch makes both by copies of rows.
"""

from types import SimpleNamespace

import torch.distributed as dist
from torch import Tensor

from picotron_min.collectives import Axis, all_gather_single, reduce_scatter_single


def start_all_gather_(rows: Tensor, axis: Axis) -> dist.Work:
    """Begin to fill rows [n, R], of which each rank has made its own, in place."""
    axis.ledger.record("all_gather", rows, axis.share)
    if dist.get_backend(axis.group) == "gloo":
        options = {"group": axis.group, "async_op": True}
        works = [dist.broadcast(row, group_src=i, **options) for i, row in enumerate(rows)]
        return SimpleNamespace(wait=lambda: [work.wait() for work in works])
    return all_gather_single(rows.flatten(), rows[axis.rank], group=axis.group, async_op=True)


def start_reduce_scatter_(rows: Tensor, axis: Axis) -> dist.Work:
    """Begin to sum rows [n, R], in place: a rank's own row is the sum, the others hold anything."""
    axis.ledger.record("reduce_scatter", rows, axis.share)
    if dist.get_backend(axis.group) == "gloo":
        return dist.all_reduce(rows, group=axis.group, async_op=True)
    return reduce_scatter_single(rows[axis.rank], rows.flatten(), group=axis.group, async_op=True)
