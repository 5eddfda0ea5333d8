"""Recorder: what a rank's step allocates, sends and waits for, seen as torch dispatches it.

It sees real tensors as well as fake ones: so what it counts can be compared with a real step.
"""

import os
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from picotron_min.extensions.experts import dispatch, moe, router
from picotron_min.pipeline_schedule import Action, Plan

aten, HERE = torch.ops.aten, os.path.dirname(__file__)
ROOT = os.path.dirname(os.path.dirname(HERE)) + os.sep
BLOCK = 512  # bytes, to whose multiples CUDA's allocator rounds
READS = {aten._local_scalar_dense, aten.nonzero, aten.masked_select, aten.equal, aten.bincount}


class Message(NamedTuple):
    """One call of a rank."""

    kind: str  # as torch names it: allreduce, send, recv, ...
    ranks: tuple[int, ...]  # that are in its group
    peer: int | None  # of the world, to which it is sent or from which it comes
    tensors: tuple[tuple, ...]  # shape and dtype of each
    rows: tuple[list[int], ...]  # of an all-to-all: from and to each rank, if not all alike
    action: Action | None  # of the plan, within which it was called

    def __str__(self) -> str:
        what = ", ".join(f"{[*shape]} {str(dtype)[6:]}" for shape, dtype in self.tensors)
        end = f"rank {self.peer}" if self.peer is not None else f"ranks {[*self.ranks]}"
        within = f" in '{self.action}'" if self.action else ""
        return f"{self.kind}{within} of {what} with {end}"


class Recorder(TorchDispatchMode):
    """Within, everything is recorded; `device` is the one whose memory is counted."""

    def __init__(self, device: str = "cuda", mode: FakeTensorMode | None = None) -> None:
        super().__init__()
        self.device, self.mode, self.action = torch.device(device), mode, None
        self.messages: list[Message] = []
        self.waits, self.operations = Counter(), 0
        self.is_building = True  # Llama is built on the meta device, which is meant so
        self.live = self.peak = 0
        self.sizes, self.by_line, self.at_peak = {}, Counter(), Counter()
        self.even_share = 1  # of tokens, for each of what they choose from
        patches = [(torch.UntypedStorage, "resize_", self._resized(torch.UntypedStorage.resize_))]
        patches += [(module, "count", self._counted(router.count)) for module in (dispatch, moe)]
        self.patches = [mock.patch.object(*patch) for patch in patches]

    def __enter__(self) -> "Recorder":
        for patch in self.patches:
            patch.start()
        return super().__enter__()

    def __exit__(self, *error) -> None:
        super().__exit__(*error)
        for patch in self.patches:
            patch.stop()

    def begin(self) -> None:
        """Count from here on."""
        self.messages, self.waits, self.operations = [], Counter(), 0
        self.peak, self.at_peak, self.is_building = self.live, self.by_line.copy(), False

    def following(self, plan: Plan) -> Iterator[Action]:
        """The plan, once; who runs it shows at which action it is."""
        for action in plan:
            self.action = action
            yield action
        self.action = None

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kind, options = function.overloadpacket, kwargs or {}
        if not self.is_building and getattr(options.get("device"), "type", "") == "meta":
            options = options | {"device": self.device}  # asked for in C++, for which all are meta
        self._note_wait(kind, args)
        if kind is aten._local_scalar_dense and self.mode:
            return {torch.int64: self.even_share, torch.bool: True}.get(args[0].dtype, 1.0)
        if function.namespace == "c10d":
            self._note_message(function, args)
        elif function is aten.addmm.dtype_out and self.device.type == "cuda":
            return options["out"]  # torch 2.11 has mixed up its fake one's arguments
        out = self._run(function, args, options)
        self.operations += 1
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._see(tensor)
        if options.get("pin_memory"):
            out.is_page_locked = True
        if kind in (aten._to_copy, aten.copy_):
            self._note_copy(kind, args, options, out)
        return out

    def _run(self, function, args, options):
        if self.mode:  # its cache would keep the storage that is set_'s argument alive
            self.mode.cache_enabled = function.overloadpacket is not aten.set_
        if function.overloadpacket is aten._grouped_mm and args[0].dtype == torch.float32:
            # CUDA takes it, and torch's fake one does not.
            return function(*(x.bfloat16() for x in args[:2]), *args[2:], **options).float()
        return function(*args, **options)

    # What the host waits for.

    def _note_wait(self, kind, args: tuple) -> None:
        waits = kind in READS and any(getattr(x, "is_cuda", False) for x in tree_leaves(args))
        # Where CUDA has no kernel for a grouped product, torch reads the sizes of its groups.
        if kind is aten._grouped_mm and args[0].is_cuda:
            waits = torch.cuda.get_device_capability() < (9, 0) or args[0].dtype != torch.bfloat16
        if waits:
            self.waits[our_line()] += 1

    def _note_copy(self, kind, args: tuple, options: dict, out: Tensor) -> None:
        source, target = (args[0], out) if kind is aten._to_copy else (args[1], args[0])
        is_async = options.get("non_blocking") or args[2:] == (True,)
        is_async &= not source.is_cpu or hasattr(source, "is_page_locked")  # else it is staged
        if source.numel() and source.is_cuda != target.is_cuda and not is_async:
            self.waits[our_line()] += 1

    def _counted(self, count: Callable) -> Callable:
        def counted(experts: Tensor, num_experts: int) -> Tensor:
            self.even_share = experts.numel() // num_experts
            return count(experts, num_experts)

        return counted

    # What is sent.

    def _note_message(self, function, args: tuple) -> None:
        boxed = next(x for x in args if isinstance(x, torch.ScriptObject))
        ranks = tuple(dist.get_process_group_ranks(dist.ProcessGroup.unbox(boxed)))
        kind = function.overloadpacket.__name__.strip("_")
        peer = ranks[args[2]] if kind in ("send", "recv") else None
        rows = tuple(args[3:5]) if kind == "alltoall_base" else ()
        tensors = (x for x in tree_leaves(args[:2]) if isinstance(x, Tensor))
        tensors = tuple((tuple(x.shape), x.dtype) for x in tensors)
        self.messages.append(Message(kind, ranks, peer, tensors, rows, self.action))

    # What is allocated.

    def _see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self.sizes and tensor.device.type == self.device.type:
            self.sizes[storage._cdata] = 0, our_line()
            weakref.finalize(storage, self._resize, storage._cdata, 0, is_freed=True)
            self._resize(storage._cdata, storage.nbytes())

    def _resize(self, key: int, nbytes: int, is_freed: bool = False) -> None:
        before, line = self.sizes[key]
        size = -(-nbytes // BLOCK) * BLOCK
        if size < before and self.live == self.peak:
            self.at_peak = self.by_line.copy()  # it falls from here
        self.live += size - before
        self.by_line[line] += size - before
        self.peak = max(self.peak, self.live)
        self.sizes[key] = size, line
        if is_freed:
            del self.sizes[key]

    def _resized(self, resize: Callable) -> Callable:
        def resized(storage: torch.UntypedStorage, nbytes: int):
            if storage._cdata in self.sizes:
                self._resize(storage._cdata, nbytes)
            return resize(storage, nbytes)

        return resized


def our_line() -> str:
    """The innermost line of the project that is at work."""
    frame = sys._getframe(2)
    while frame:
        path = frame.f_code.co_filename
        if path.startswith(ROOT) and not path.startswith(HERE):
            return f"{path.removeprefix(ROOT)}:{frame.f_lineno}"
        frame = frame.f_back
    return "the optimizer's state"
