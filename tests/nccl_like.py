"""How NCCL differs from gloo, emulated on the CPU: communicators are opened at first use.

The first collective of a group, and the first message between two ranks, block the host until all
who take part are there; of the first batch of messages in a group, these are all its ranks. An
order of operations that gloo accepts can deadlock then.
"""

import contextlib
import functools
import time
from collections.abc import Iterator
from unittest import mock

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from picotron_min import collectives
from picotron_min.extensions.sharding import collectives as in_place

# Under the names by which collectives.py calls them: it binds some when it is imported.
COLLECTIVES = [(dist, "all_reduce"), (dist, "broadcast"), (dist, "all_to_all_single")]
COLLECTIVES += [
    (module, name)
    for module in (collectives, in_place)
    for name in ("all_gather_single", "reduce_scatter_single")
]


class Deadlock(Exception):
    """Some ranks of a communicator did not come to open it."""


@contextlib.contextmanager
def communicators_opened_at_first_use(seconds: float = 5.0) -> Iterator[None]:
    """Within, a first use waits for the other ranks; Deadlock where they do not come in time."""
    store, opened, name = _get_default_store(), set(), "nccl-like"

    def open_with(ranks: tuple[int, ...], kind: str) -> None:
        key = f"{name} {kind} {ranks}"
        if key in opened or len(ranks) == 1:
            return
        opened.add(key)
        store.add(key, 1)
        deadline = time.monotonic() + seconds
        while store.add(key, 0) < len(ranks):
            if time.monotonic() > deadline:
                raise Deadlock(f"rank {dist.get_rank()} waits to open {kind} of {ranks}")
            time.sleep(0.005)

    def collective(function):
        def call(*args, group, **kwargs):
            open_with(tuple(dist.get_process_group_ranks(group)), "collectives")
            return function(*args, group=group, **kwargs)

        return call

    def message(function, peer: str):
        @functools.wraps(function)
        def call(tensor, *, group, **kwargs):
            ranks = dist.get_process_group_ranks(group)
            pair = sorted((dist.get_rank(), ranks[kwargs[peer]]))
            open_with(tuple(pair), "messages")
            return function(tensor, group=group, **kwargs)

        return call

    def batch(messages: list[dist.P2POp]) -> list[dist.Work]:
        # Batched messages use the communicator of the group, which all of its ranks open.
        open_with(tuple(dist.get_process_group_ranks(messages[0].group)), "collectives")
        return plain_batch(messages)

    def operation(function, *args, **kwargs):
        return plain_operation(function.__wrapped__, *args, **kwargs)

    plain_batch, plain_operation = dist.batch_isend_irecv, dist.P2POp
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(dist, "batch_isend_irecv", batch))
        stack.enter_context(mock.patch.object(dist, "P2POp", operation))
        for module, function in COLLECTIVES:
            replacement = collective(getattr(module, function))
            stack.enter_context(mock.patch.object(module, function, replacement))
        for function, peer in (("isend", "group_dst"), ("irecv", "group_src")):
            replacement = message(getattr(dist, function), peer)
            stack.enter_context(mock.patch.object(dist, function, replacement))
        yield
