"""Grouped experts: one product for all of a rank, where a loop would start a kernel for each.

    rows, sorted by expert   | of expert 0 |  1  | (none of 2) |    3    |   [r, E]
    times                    |     W0      | W1  |             |   W3    |   one tensor [X, F, E]

The loop is MoE.run in moe.py, which computes the same. On a CPU the weight gradients of wide
experts are a loop here as well: it adds them where they lie. Experts stay parameters of their own:
their weights are views of the one tensor, and backward adds to each one's gradient, as linear.py.
"""

import math
from functools import partial
from itertools import accumulate, pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from picotron_min.extensions.experts.moe import mixtures, on_device
from picotron_min.extensions.overlap.linear import Linear, WeightGradients, take_apart
from picotron_min.loss import wide
from picotron_min.model import Llama

# Elements of an expert's matrix from which a CPU adds weight gradients one by one, in place: a
# grouped product writes them to new memory first. Below, starting the products takes longer.
LEAST_IN_PLACE = 2**14

LEAST_ALONE = 2**16  # likewise, from which products of a faster kind are worth a loop


def has_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch has a kernel for groups that is right, and needs no numbers of the host.

    Of GPUs only Hopper has one, in bfloat16. For others torch reads the sizes at every product; on
    Blackwell, the gradient of an expert without rows is not zero (pytorch issue 172439).
    """
    if device.type == "cpu":
        return dtype != torch.float64
    return dtype == torch.bfloat16 and torch.cuda.get_device_capability(device)[0] == 9


def apply_grouped_experts(
    model: Llama, dtype: torch.dtype, etp: int, queue: WeightGradients
) -> None:
    """Let the experts of a model compute together, in place, unless their sizes do not allow it.

    To be called when weights, and copies of them to compute with, are allocated but not filled in.
    """
    sizes = model.config.hidden_size, model.config.moe_intermediate_size // etp
    if any(size * dtype.itemsize % 16 for size in sizes):
        return  # no kernel takes these: the loop remains
    take_apart(model)
    for moe in mixtures(model):
        projections = [*zip(*(expert.children() for expert in moe.experts.values()), strict=True)]
        has_own_products = type(projections[0][0]) is not Linear  # see kernels/products.py
        if has_own_products and math.prod(sizes) >= LEAST_ALONE:
            continue  # they take less time than one for all: the loop remains
        moe.run = partial(run_together, *(Stack(list(linears), queue) for linears in projections))


def run_together(
    gate: "Stack", up: "Stack", down: "Stack", rows: Tensor, sizes: list[int], weights: Tensor
) -> Tensor:
    """In place of MoE.run, rows [r, E] -> [r, E]: three products for all experts of a rank."""
    ends = on_device(list(accumulate(sizes)), rows.device).int()  # of the rows of each expert
    groups = sizes, ends
    inner = F.silu(_Product.apply(gate, groups, rows)) * _Product.apply(up, groups, rows)
    inner = wide(inner) * weights[:, None]
    return _Product.apply(down, groups, inner.to(rows.dtype))


class Stack:
    """The same linear of several experts: weights [X, out, in], of which theirs become views."""

    def __init__(self, linears: list[Linear], queue: WeightGradients) -> None:
        self.linears, self.queue, self.joined = linears, queue, None
        for kind in ("weight", "copy"):
            parts = [getattr(linear, kind) for linear in linears]
            if parts[0] is not None:  # else there are no copies, or the weights are sharded
                self.joined = parts[0].new_empty(len(parts), *parts[0].shape)
                for part, view in zip(parts, self.joined, strict=True):
                    part.data = view

    @property
    def operand(self) -> Tensor:
        if self.joined is None:  # sharded weights are gathered anew for each use
            return torch.stack([linear.operand for linear in self.linears])
        return self.joined

    def add_weight_gradient(self, x_groups: tuple[Tensor, list[int], Tensor], dy: Tensor) -> None:
        """Add dy^T x of its rows to every expert's gradient: x [r, in], dy [r, out]."""
        x, sizes, ends = x_groups  # an expert without rows gets zeros
        gradient = self.linears[0].gradient
        can_add = gradient is not None and gradient.dtype == x.dtype  # only on CPUs, in float32
        if can_add and gradient.numel() >= LEAST_IN_PLACE:  # docs/log.md has times
            for linear, *rows in zip(self.linears, x.split(sizes), dy.split(sizes), strict=True):
                linear.add_weight_gradient(*rows)
            return
        gradients = F.grouped_mm(dy.T, x, offs=ends)  # [X, out, in]
        joined = joined_view([linear.gradient for linear in self.linears])
        if joined is None:  # sharded, or in several buckets
            for linear, gradient in zip(self.linears, gradients, strict=True):
                linear.add_gradient(gradient)
        else:
            joined += gradients
            for linear in self.linears:
                linear.gradient_arrived()


def joined_view(tensors: list[Tensor | None]) -> Tensor | None:
    """Tensors of one shape as one, [X, ...], if they lie at equal distances in one buffer."""
    buffers = {None if t is None else t.untyped_storage().data_ptr() for t in tensors}
    if len(tensors) < 2 or len(buffers) > 1 or None in buffers:
        return None
    first, places = tensors[0], [tensor.storage_offset() for tensor in tensors]
    distances = {after - before for before, after in pairwise(places)}
    if len(distances) > 1 or min(distances) < 0:
        return None
    return first.as_strided((len(tensors), *first.shape), (*distances, *first.stride()))


class _Product(torch.autograd.Function):
    """As in linear.py, of all experts."""

    @staticmethod
    def forward(ctx, stack, groups, x):
        ctx.stack, ctx.groups = stack, groups
        ctx.save_for_backward(x)
        return F.grouped_mm(x, stack.operand.mT, offs=groups[1])

    @staticmethod
    def backward(ctx, dy):
        stack, dy = ctx.stack, dy.contiguous()  # the kernel reads no expanded tensor
        dx = F.grouped_mm(dy, stack.operand, offs=ctx.groups[1])
        stack.queue.put(stack, (*ctx.saved_tensors, *ctx.groups), dy)
        return None, None, dx
