"""Float8 experts: the products with their weights are in 8 bits, those of dW stay in `dtype`.

    forward     x -> bytes, once for gate and up       y  = x W^T     8 bits
    backward    dy -> bytes                            dx = dy W      8 bits
    later       x and dy as they are                   dW = dy^T x    `dtype`

The sums of dW go over rows. There a scale for each row could not be taken out, and rows would have
to be padded to multiples of 16. How numbers are rounded and multiplied is in `rows`, which
build.py takes from precision/float8_rows.py.
"""

from functools import partial

import torch
from torch import Tensor

from picotron_min.extensions.experts.grouped import Groups, Stack, run_together
from picotron_min.extensions.experts.moe import MoE, mixtures
from picotron_min.extensions.overlap.linear import Linear, WeightGradients
from picotron_min.extensions.settings import Workload
from picotron_min.model import Llama


def in_8_bits(model: Llama, workload: Workload) -> list[MoE]:
    """Those mixtures of a model whose experts are."""
    layers = model.config.num_hidden_layers
    return [moe for moe in mixtures(model) if workload.experts_in_fp8(moe.gate.layer, layers)]


def replace_linears(moe: MoE) -> None:
    """On the meta device, while the weights are in the modules."""
    for expert in moe.experts.values():
        for name, linear in list(expert.named_children()):
            setattr(expert, name, Float8Member(linear.weight))


def run_in_8_bits(moe: MoE, queue: WeightGradients, *products) -> None:
    """Let the experts of a mixture, whose weights are allocated, compute together, in place."""
    projections = zip(*(expert.children() for expert in moe.experts.values()), strict=True)
    moe.run = partial(
        run_together, *(Float8Stack(list(ls), queue, *products) for ls in projections)
    )


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
        self,
        linears: list[Float8Member],
        queue: WeightGradients,
        dtype: torch.dtype,
        rows,
        has_kernel: bool,
    ) -> None:
        super().__init__(linears, queue, has_kernel)
        self.dtype, self.rows = dtype, rows
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
            weights = self.operand.detach().to(self.dtype)
            self.rounded = self.rows.quantise(weights), self.rows.quantise(weights.mT)
        if self.has_kernel:
            return self.rows.in_groups(x, self.rounded[side], groups.ends)
        return self.rows.one_by_one(x, self.rounded[side], groups.sizes)
