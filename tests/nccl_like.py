"""How NCCL differs from gloo, emulated on the CPU: communicators, and the order in each of them.

The first collective of a group, and the first message between two ranks, block the host until all
who take part are there; of the first batch of messages in a group, these are all its ranks. What
uses a communicator is done one by one, on its stream, and a message waits for its receiver. An
order of operations that gloo accepts can deadlock then.

Two ranks have a communicator of their own for messages, unless groups are connected `eagerly`, as
by init_process_group with a device_id: then a group has one for all that it does.
"""

import contextlib
import functools
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from unittest import mock

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from picotron_min import collectives
from picotron_min.extensions.sharding import units as in_place

# Under the names by which collectives.py calls them: it binds some when it is imported.
COLLECTIVES = [(dist, "all_reduce"), (dist, "broadcast"), (dist, "all_to_all_single")]
COLLECTIVES += [
    (module, name)
    for module in (collectives, in_place)
    for name in ("all_gather_single", "reduce_scatter_single")
]


class Deadlock(Exception):
    """Some ranks did not come in time: to open a communicator, or to the other end of a message."""


@contextlib.contextmanager
def nccl_like(seconds: float = 5.0, eagerly: bool = False) -> Iterator[None]:
    """Within, communication waits as NCCL's does; Deadlock where other ranks do not come."""
    store, opened, name = _get_default_store(), set(), "nccl-like"
    streams = defaultdict(functools.partial(ThreadPoolExecutor, 1))  # of each communicator
    num_messages = Counter()  # by group, sender and receiver

    def meet(ranks: tuple[int, ...], what: str) -> None:
        key = f"{name} {what} {ranks}"
        store.add(key, 1)
        deadline = time.monotonic() + seconds
        while store.add(key, 0) < len(ranks):
            if time.monotonic() > deadline:
                raise Deadlock(f"rank {dist.get_rank()} waits to {what} of {ranks}")
            time.sleep(0.005)

    def enqueue(communicator: tuple, function: Callable[[], list[dist.Work]]) -> dist.Work:
        kind, _, ranks = communicator
        if communicator not in opened and len(ranks) > 1:
            opened.add(communicator)
            meet(ranks, f"open {kind}")
        end: Future = streams[communicator].submit(lambda: [w.wait() for w in function()])
        return SimpleNamespace(wait=lambda: end.result(2 * seconds))

    def of_group(group: dist.ProcessGroup) -> tuple:
        return "collectives", id(group), tuple(dist.get_process_group_ranks(group))

    def collective(function):
        def call(*args, group, async_op: bool = False, **kwargs):
            options = {"group": group, "async_op": True} | kwargs
            work = enqueue(of_group(group), lambda: [function(*args, **options)])
            return work if async_op else work.wait()

        return call

    def message(function, peer: str):
        @functools.wraps(function)
        def call(tensor, *, group, **kwargs):
            me, other = dist.get_rank(), dist.get_process_group_ranks(group)[kwargs[peer]]
            way = (me, other) if peer == "group_dst" else (other, me)
            num_messages[way] += 1
            number = num_messages[way]

            def start() -> list[dist.Work]:
                meet(way, f"end message {number}")
                return [function(tensor, group=group, **kwargs)]

            pair = "messages", id(group), tuple(sorted(way))
            return enqueue(of_group(group) if eagerly else pair, start)

        return call

    def batch(messages: list[dist.P2POp]) -> list[dist.Work]:
        # Batched messages use the communicator of the group, which all of its ranks open.
        return [enqueue(of_group(messages[0].group), lambda: plain_batch(messages))]

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
        try:
            yield
        finally:
            for stream in streams.values():
                stream.shutdown(wait=False, cancel_futures=True)
