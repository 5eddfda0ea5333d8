"""Offload: what layers save for backward waits in the host's memory, which is larger than a GPU's.

What the first layers save is idle longest. It is copied out while the next layer runs forward,
and back in while it runs backward. With 4 layers, of which the first 3 are offloaded:

    compute   F0 | F1    | F2    | F3    | B3   | B2   | B1   | B0
    copies         0 out   1 out   2 out   2 in   1 in   0 in

So at most two offloaded layers are on the GPU at a time. README.md has when copies are hidden.
"""

from collections.abc import Iterable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from picotron_min.extensions.overlap.linear import linears
from picotron_min.extensions.settings import LEAST_OFFLOAD
from picotron_min.model import DecoderLayer, Llama


def apply_offload(model: Llama, num_layers: int, device_type: str) -> None:
    """Offload what the first layers of a stage save, in place; at least one other must follow.

    After recompute and compile, which decide what is saved, and before Sharding: when `run` begins,
    a layer's weights must be gathered, or they would be taken for activations.
    """
    if not num_layers:
        return
    # A stage's input stays with the pipeline, which needs its gradient, and then its memory.
    keeps_input = "0" not in model.model.layers
    offload = Offload(HostMemory(device_type), num_layers, keeps_input)
    # And the next layer, which is not offloaded: while it runs, the last copies leave and return.
    for i, layer in enumerate([*model.model.layers.values()][: num_layers + 1]):
        layer.forward = partial(offload.run, i, layer, layer.forward)


class Block:
    """The memory of one saved tensor, or of several that share it: on the device or the host."""

    def __init__(self, tensor: Tensor) -> None:
        self.on_device: Tensor | None = _at(tensor, torch.uint8)
        self.on_host: Tensor | None = None


class Saved(NamedTuple):
    """What autograd keeps in place of a tensor: where it is in a block."""

    block: Block
    dtype: torch.dtype
    place: tuple  # offset, size and stride, as Tensor.set_ takes them


def _at(tensor: Tensor, dtype: torch.dtype, *place) -> Tensor:
    """All memory of a tensor's storage, or a place in it, as another tensor without a copy."""
    return torch.empty(0, dtype=dtype, device=tensor.device).set_(tensor.untyped_storage(), *place)


class Offload:
    """Runs the layers of a stage, and moves what they save."""

    def __init__(self, memory: "HostMemory", num_layers: int, keeps_input: bool) -> None:
        self.memory, self.num_layers, self.keeps_input = memory, num_layers, keeps_input

    def run(self, i: int, layer: DecoderLayer, forward, x: Tensor, rotary: tuple) -> Tensor:
        """The i-th layer's forward of a micro-batch."""
        if i == 0:
            # One for each forward: in a pipeline, several micro-batches wait for their backward.
            self.tape: list[dict[int, Block]] = []  # the blocks of each layer, by address
        tape, blocks = self.tape, {}
        if i < self.num_layers:
            stays = addresses(layer, *rotary[:2], *[x] * (self.keeps_input and i == 0))
            with saved_tensors_hooks(partial(_pack, blocks, stays), _unpack):
                out = forward(x, rotary)
        else:
            out = forward(x, rotary)
        self.memory.finish()  # the layer before: its copies left while this one computed
        for block in tape[-1].values() if tape else ():
            block.on_device = None
        self.memory.start_out(blocks.values())
        tape.append(blocks)
        if out.requires_grad:
            out.register_hook(partial(self.backward_begins, tape, i))
        return out

    def backward_begins(self, tape: list[dict[int, Block]], i: int, _: Tensor) -> None:
        """The backward of a micro-batch is about to enter the i-th layer."""
        self.memory.finish()  # this layer's blocks arrived while the next one ran backward
        tape.pop()  # from now on its blocks live as long as autograd needs them
        if i > 0:
            self.memory.start_in(tape[-1].values())


def addresses(layer: DecoderLayer, *others: Tensor) -> set[int]:
    """The addresses of tensors that stay: a layer's weights, their copies, and the others given."""
    # By address, since a view or a detached weight is another tensor. To offload weights would be
    # useless, and a gradient of the tensor that comes back would not reach the weight.
    operands = (linear.operand for linear in linears(layer).values())
    tensors = [*layer.parameters(), *operands, *others]
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


def _pack(blocks: dict[int, Block], stays: set[int], tensor: Tensor) -> Tensor | Saved:
    storage = tensor.untyped_storage()
    address = storage.data_ptr()
    if storage.nbytes() < LEAST_OFFLOAD or address in stays:
        return tensor.detach()  # not itself: with the node that saves it, it would never be freed
    # The input of q, k and v is saved three times and moves once. Its block keeps it alive until
    # the layer's end, so that no other tensor gets its address.
    block = blocks.setdefault(address, Block(tensor))
    return Saved(block, tensor.dtype, (tensor.storage_offset(), tensor.size(), tensor.stride()))


def _unpack(saved: Tensor | Saved) -> Tensor:
    if isinstance(saved, Tensor):
        return saved
    return _at(saved.block.on_device, saved.dtype, *saved.place)


class HostMemory:
    """Copies between a device and its host, on a stream beside the one that computes.

    A CPU's streams copy at once, and within the same memory: that is for tests, and saves nothing.
    """

    def __init__(self, device_type: str) -> None:
        self.device_type, self.torch = device_type, torch.get_device_module(device_type)
        self.stream = self.torch.Stream()

    def start_out(self, blocks: Iterable[Block]) -> None:
        """Begin to copy blocks from the device; until `finish` they must stay there."""
        pins = self.device_type != "cpu"
        self.stream.wait_stream(self.torch.current_stream())  # until the blocks are computed
        with self.torch.stream(self.stream):
            for block in blocks:
                # Pinned: the GPU copies by itself, while the host continues. Such memory is slow
                # to get, so torch keeps it for the next blocks.
                block.on_host = torch.empty_like(block.on_device, device="cpu", pin_memory=pins)
                block.on_host.copy_(block.on_device, non_blocking=True)

    def start_in(self, blocks: Iterable[Block]) -> None:
        """Begin to copy blocks to the device; until `finish` they must not be read."""
        for block in blocks:  # allocated on the stream that computes, since it is freed there
            block.on_device = torch.empty_like(block.on_host, device=self.device_type)
        self.stream.wait_stream(self.torch.current_stream())  # until earlier uses are over
        with self.torch.stream(self.stream):
            for block in blocks:
                block.on_device.copy_(block.on_host, non_blocking=True)
                block.on_host = None

    def finish(self) -> None:
        """Let the device wait until all copies are complete."""
        # The GPU waits, not the host. What is freed or used after this needs no `record_stream`,
        # with which a host that is some layers ahead could not use freed memory again yet.
        self.torch.current_stream().wait_stream(self.stream)
