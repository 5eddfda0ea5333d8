"""Grouped experts: one product for all of a rank, where a loop would start a kernel for each.

    rows, sorted by expert   | of expert 0 |  1  | (none of 2) |    3    |   [r, E]
    times                    |     W0      | W1  |             |   W3    |   one tensor [X, F, E]

The loop is MoE.run in moe.py, which computes the same. Experts stay parameters of their own: their
weights are views of the one tensor, and backward adds to each one's gradient, as linear.py.

With FP8 the products with weights are in 8 bits, those of dW stay in `dtype`:

    forward     x -> bytes, once for gate and up       y  = x W^T     8 bits
    backward    dy -> bytes                            dx = dy W      8 bits
    later       x and dy as they are                   dW = dy^T x    `dtype`

The sums of dW go over rows. There a scale for each row could not be taken out, and rows would have
to be padded to multiples of 16. precision/float8_rows.py rounds numbers and multiplies them.
"""

import math
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from picotron_min.extensions.experts.moe import MoE, mixtures, on_device
from picotron_min.extensions.overlap.linear import Linear, WeightGradients, take_apart
from picotron_min.extensions.settings import Workload
from picotron_min.loss import wide
from picotron_min.model import Llama

# Elements of an expert's matrix from which products of a faster kind are worth a loop; below,
# starting them takes longer.
LEAST_ALONE = 2**16


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
        if "run" in vars(moe):  # in 8 bits already
            continue
        # Those of kernels/products.py.
        has_own_products = type(next(moe.experts.children()).up_proj) is not Linear
        if has_own_products and math.prod(sizes) >= LEAST_ALONE:
            continue  # they take less time than one for all: the loop remains
        compute_together(moe, partial(Stack, queue=queue))


def compute_together(moe: MoE, stack_of: Callable[[list[Linear]], "Stack"]) -> None:
    """Let a mixture's experts compute together: one stack for each of their three linears."""
    projections = zip(*(expert.children() for expert in moe.experts.values()), strict=True)
    moe.run = partial(run_together, *map(stack_of, map(list, projections)))


def run_together(
    gate: "Stack", up: "Stack", down: "Stack", rows: Tensor, sizes: list[int], weights: Tensor
) -> Tensor:
    """In place of MoE.run, rows [r, E] -> [r, E]: three products for all experts of a rank."""
    groups = Groups(sizes, on_device(list(accumulate(sizes)), rows.device).int())
    given = gate.prepare(rows)  # for both
    inner = F.silu(_Product.apply(gate, groups, rows, given))
    inner = inner * _Product.apply(up, groups, rows, given)
    inner = (wide(inner) * weights[:, None]).to(rows.dtype)
    return _Product.apply(down, groups, inner, down.prepare(inner))


class Groups(NamedTuple):
    """Which rows each expert has: how many, for the host, and where they end, for the device."""

    sizes: list[int]
    ends: Tensor


class Stack:
    """The same linear of several experts: weights [X, out, in], of which theirs become views."""

    def __init__(
        self, linears: list[Linear], queue: WeightGradients, has_kernel: bool = True
    ) -> None:
        self.linears, self.queue, self.joined = linears, queue, None
        self.has_kernel = has_kernel  # else weight gradients are computed one by one
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

    def prepare(self, x: Tensor) -> Tensor:
        """What `product` multiplies: in 8 bits, the rounded x."""
        return x.detach()

    def product(self, x: Tensor, groups: Groups) -> Tensor:
        return F.grouped_mm(x, self.operand.mT, offs=groups.ends)

    def input_gradient(self, dy: Tensor, groups: Groups) -> Tensor:
        return F.grouped_mm(dy, self.operand, offs=groups.ends)

    def add_weight_gradient(self, x_groups: tuple[Tensor, Groups], dy: Tensor) -> None:
        """Add dy^T x of its rows to every expert's gradient: x [r, in], dy [r, out]."""
        x, (sizes, ends) = x_groups
        if not self.has_kernel:
            for linear, *pair in zip(self.linears, x.split(sizes), dy.split(sizes), strict=True):
                linear.add_weight_gradient(*pair)
            return
        gradients = F.grouped_mm(dy.T, x, offs=ends)  # [X, out, in]; zeros of one without rows
        for linear, gradient in zip(self.linears, gradients, strict=True):
            linear.add_gradient(gradient)


class _Product(torch.autograd.Function):
    """As in linear.py, of all experts."""

    @staticmethod
    def forward(ctx, stack, groups, x, given):
        ctx.stack, ctx.groups = stack, groups
        ctx.save_for_backward(x)
        return stack.product(given, groups)

    @staticmethod
    def backward(ctx, dy):
        stack, dy = ctx.stack, dy.contiguous()  # the kernel reads no expanded tensor
        dx = stack.input_gradient(dy, ctx.groups)
        stack.queue.put(stack, (*ctx.saved_tensors, ctx.groups), dy)
        return None, None, dx, None


def in_8_bits(model: Llama, workload: Workload) -> list[MoE]:
    """The mixtures of a model whose experts multiply in 8 bits."""
    layers = model.config.num_hidden_layers
    return [moe for moe in mixtures(model) if workload.experts_in_fp8(moe.gate.layer, layers)]


def replace_linears(moe: MoE) -> None:
    """On the meta device, while the weights are in the modules."""
    for expert in moe.experts.values():
        for name, linear in list(expert.named_children()):
            setattr(expert, name, Float8Member(linear.weight))


class Float8Member(Linear):
    """A linear of one expert; its stack multiplies."""

    stack: "Float8Stack | None" = None

    def make_copy(self, dtype: torch.dtype) -> None:
        """None: its stack multiplies with bytes."""

    def refresh(self) -> None:
        if self.stack is not None:
            self.stack.rounded = None


class Float8Stack(Stack):
    """As Stack, with weights in 8 bits; `rows` are precision/float8_rows.py's RowProducts."""

    rounded = None  # W [X, out, in] and W^T, until the weights change

    def __init__(
        self, linears: list[Float8Member], queue: WeightGradients, has_kernel: bool, rows
    ) -> None:
        super().__init__(linears, queue, has_kernel)
        self.rows = rows
        for linear in linears:
            linear.stack = self

    def prepare(self, x: Tensor):
        return self.rows.quantise(x.detach())

    def product(self, x, groups: Groups) -> Tensor:
        return self._multiply(x, 0, groups)

    def input_gradient(self, dy: Tensor, groups: Groups) -> Tensor:
        return self._multiply(self.prepare(dy), 1, groups)

    def _multiply(self, x, side: int, groups: Groups) -> Tensor:
        if self.rounded is None:  # in forward, or in a backward that has gathered them again
            # First to dtype, in which sharded weights are gathered: so that the bytes are the same.
            weights = self.operand.detach().to(self.rows.dtype)
            self.rounded = self.rows.quantise(weights), self.rows.quantise(weights.mT)
        if self.has_kernel:
            return self.rows.in_groups(x, self.rounded[side], groups.ends)
        return self.rows.one_by_one(x, self.rounded[side], groups.sizes)
