"""Recorder: what a rank's step allocates, sends and waits for, seen as torch dispatches it.

It sees real tensors as well as fake ones: so what it counts can be compared with a real step.
"""

import math
import os
import re
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from traceback import walk_stack
from typing import NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from picotron_min.pipeline_schedule import Action, Plan

aten, HERE = torch.ops.aten, os.path.dirname(__file__)
ROOT = os.path.dirname(os.path.dirname(HERE)) + os.sep
BLOCK = 512  # bytes, to whose multiples CUDA's allocator rounds


class Message(NamedTuple):
    """One call of a rank."""

    kind: str  # as torch names it: allreduce, send, recv, ...
    ranks: tuple[int, ...]  # that are in its group
    peer: int | None  # of the world, to which it is sent or from which it comes
    tensors: tuple[str, ...]  # dtype and shape of each
    rows: tuple[list[int], ...]  # of an uneven all-to-all: those from and to each rank
    action: Action | None  # of the plan, within which it was called

    @property
    def is_planned(self) -> bool:
        """Whether it is itself an action of the plan, from one rank to another."""
        return self.action is not None and self.action.peer is not None

    def __str__(self) -> str:
        return f"{self.kind} of {self.tensors} in '{self.action}', of ranks {[*self.ranks]}"


class Recorder(TorchDispatchMode):
    """Within, everything is recorded: of tensors on `device`, which are fake if there is a mode.

    `part` names the part of a step that is at work; backward belongs to the part of its forward.
    """

    def __init__(
        self, device: str, mode: FakeTensorMode | None = None, part: Callable[[], str] = str
    ) -> None:
        super().__init__()
        self.device, self.mode, self.part = torch.device(device), mode, part
        self.live, self.by_line, self.sizes, self.parts = 0, Counter(), {}, {}
        self.num_experts = self.even_share = 0  # of a layer; of its tokens, for each expert
        self.action = None
        self.begin()
        # Llama is built on the meta device, which is meant so; later, "meta" is C++'s mistake.
        self.is_building = True

    def begin(self) -> None:
        """Count from here on: the model is built."""
        self.messages: list[Message] = []
        self.waits: Counter[str] = Counter()  # lines at which the host waits for its GPU
        self.launches: Counter[str] = Counter()  # operations that write, by part; no message
        self.moved: Counter[str] = Counter()  # bytes that they read and write
        # Bytes at the fullest, and by the line of code that has made them.
        self.peak, self.at_peak, self.is_building = self.live, self.by_line.copy(), False

    def following(self, plan: Plan) -> Iterator[Action]:
        """The plan, once; who runs it shows at which action it is."""
        for action in plan:
            self.action = action
            yield action
        self.action = None

    def seeing_resizes(self) -> AbstractContextManager:
        """Within, storages that shrink and grow are seen: no operation of torch does it."""
        resize = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, nbytes: int) -> torch.UntypedStorage:
            self._resize(storage._cdata, nbytes)
            return resize(storage, nbytes)

        return mock.patch.object(torch.UntypedStorage, "resize_", resize_)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kind, options = function.overloadpacket, kwargs or {}
        if not self.is_building and getattr(options.get("device"), "type", "") == "meta":
            options = options | {"device": self.device}  # asked for in C++, for which all are meta
        if kind.__name__.startswith("_scaled_dot"):  # its fake one takes what a GPU's refuses
            assert len(dtypes := {x.dtype for x in args[:3]}) == 1, f"attention of {dtypes}"
        if self.mode:  # its cache would keep the storage that is set_'s argument alive
            self.mode.cache_enabled = kind is not aten.set_
        if self.mode and kind is aten._local_scalar_dense:
            out = self.even_share if args[0].dtype == torch.int64 else 1.0
        elif self.device.type == "cuda" and function is aten.addmm.dtype_out:
            out = options["out"]  # torch 2.11 mixes up the arguments of its fake one
        else:
            out = function(*args, **options)
        if self.num_experts and kind is aten.scatter_add_:  # of all choices, counted by expert
            self.even_share = args[2].numel() // self.num_experts
        if options.get("pin_memory"):
            out.is_page_locked = True
        if function.namespace == "c10d":
            self._note_message(kind, args)
        if self._waits(kind, args, options, out):
            self.waits[our_line()] += 1
        if nbytes := bytes_moved(function, args, options, out):
            part = self._part()
            self.launches[part] += 1
            self.moved[part] += nbytes
        for tensor in tensors_in(out):
            self._see(tensor)
        return out

    def _part(self) -> str:
        if node := torch._C._current_autograd_node():
            return "backward of " + self.parts.get(node._sequence_nr(), "leaves")  # their sums
        # Autograd has just numbered the node of this operation, which will run in backward.
        self.parts.setdefault(torch.autograd._get_sequence_nr() - 1, part := self.part())
        return part

    def _note_message(self, kind, args: tuple) -> None:
        boxed = next(x for x in args if isinstance(x, torch.ScriptObject))
        ranks = tuple(dist.get_process_group_ranks(dist.ProcessGroup.unbox(boxed)))
        name = kind.__name__.strip("_")
        peer = ranks[args[2]] if name in ("send", "recv") else None
        what = tuple(f"{x.dtype}{[*x.shape]}" for x in tensors_in(args[:2]))
        rows = tuple(args[3:5]) if name == "alltoall_base" and args[3] else ()
        self.messages.append(Message(name, ranks, peer, what, rows, self.action))

    def _waits(self, kind, args: tuple, options: dict, out: Tensor) -> bool:
        """Whether the host waits for its GPU: it reads a number, or copies and does not go on."""
        if kind not in (aten._to_copy, aten.copy_):
            return kind is aten._local_scalar_dense and args[0].is_cuda
        source = args[0] if kind is aten._to_copy else args[1]
        if source.is_cuda == out.is_cuda or not source.numel():
            return False
        is_staged = out.is_cuda and not hasattr(source, "is_page_locked")
        return is_staged or not (options.get("non_blocking") or args[2:] == (True,))

    def _see(self, tensor: Tensor) -> None:
        # A view shares its storage, which lives as long as any tensor that has it.
        storage = tensor.untyped_storage()
        if storage._cdata not in self.sizes and tensor.device.type == self.device.type:
            weakref.finalize(storage, self._resize, storage._cdata, 0)
            self._resize(storage._cdata, storage.nbytes())

    def _resize(self, key: int, nbytes: int) -> None:
        before, line = self.sizes.pop(key, None) or (0, our_line())
        size = -(-nbytes // BLOCK) * BLOCK
        if size < before and self.live == self.peak:
            self.at_peak = self.by_line.copy()  # it falls from here
        self.live += size - before
        self.by_line[line] += size - before
        self.peak = max(self.peak, self.live)
        if size:  # else its address may soon be another storage's
            self.sizes[key] = size, line


# Not read is the first argument of these: it is overwritten, or only its shape matters.
UNREAD = re.compile(r"new_|.*_like$|(_foreach_)?(copy|zero|fill)_$")
# And of these a part of it is read or written, as large as the rest.
PARTIAL = re.compile(r"embedding$|gather|scatter|index|nll_loss_forward")


def bytes_moved(function, args: tuple, options: dict, out) -> int:
    """What an operation reads and writes; 0 if it launches nothing: it makes a view, or memory."""
    name, arguments = function.overloadpacket.__name__, function._schema.arguments
    given = dict(zip([x.name for x in arguments], args, strict=False)) | options
    is_written = {x.name for x in arguments if x.alias_info and x.alias_info.is_write}
    is_written &= given.keys() - {"grads"}  # AdamW's, which would be scaled
    old = {x.untyped_storage()._cdata for x in tensors_in(given)}
    made = [x for x in tensors_in(out) if x.untyped_storage()._cdata not in old]
    # A GPU's x.to(device) is x; C++ takes fake tensors for meta ones, and makes a copy.
    is_same = name == "_to_copy" and (out.dtype, out.device) == (args[0].dtype, args[0].device)
    if is_same or "empty" in name or not (made or is_written):
        return 0
    is_partial = PARTIAL.match(name)
    skipped = {"out", arguments[0].name} if is_partial or UNREAD.match(name) else {"out"}
    read = [x for name, x in given.items() if name not in skipped]
    written = [] if is_partial else [given[name] for name in is_written]
    # An expanded tensor is read once.
    shapes = [(x, zip(x.shape, x.stride(), strict=True)) for x in tensors_in([made, read, written])]
    nbytes = sum(x.itemsize * math.prod(n for n, by in shape if by) for x, shape in shapes)
    return nbytes * 2 if is_partial else nbytes


def tensors_in(tree) -> list[Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor)]


def our_line() -> str:
    """The innermost line of the project that is at work."""
    for frame, number in walk_stack(sys._getframe()):
        path = frame.f_code.co_filename
        if path.startswith(ROOT) and not path.startswith(HERE):
            return f"{path.removeprefix(ROOT)}:{number}"
    return "the optimizer's state"
