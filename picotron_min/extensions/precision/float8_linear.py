"""Float8 linears: a sublayer's input is rounded once, and its linears share the bytes.

    forward     x -> bytes, E4M3 --(gather)--> q, k, v; gate, up          x W^T
    backward    dy of each -> bytes, E5M2 ---> dx, the ranks' sum         dy W
    later       the same bytes ---> dW, added to the gradient in float32  dy^T x

The last linear of a sublayer, o or down, does the reverse: its dy is gathered. Parts that are
gathered need one scale, from the maximum of all ranks' amax: a message of 4 bytes.

overlap/boundary.py has the same two Functions without rounding, and more comments.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from picotron_min.extensions.overlap.boundary import Boundary, put_around, save, sublayers
from picotron_min.extensions.overlap.linear import Linear
from picotron_min.extensions.precision.float8 import E4M3, E5M2, Float8, choose_product, quantise
from picotron_min.extensions.settings import Workload
from picotron_min.model import Llama


class Float8Linear(Linear):
    """A linear that multiplies in 8 bits; results have `dtype`."""

    rows: Float8 | None = None  # W [out, in]
    columns: Float8 | None = None  # W^T [in, out]

    def __init__(self, weight: nn.Parameter, dtype: torch.dtype, multiply: Callable) -> None:
        super().__init__(weight)
        self.dtype, self.multiply = dtype, multiply

    def make_copy(self, dtype: torch.dtype) -> None:
        """None: it multiplies with bytes."""

    def refresh(self) -> None:
        """Round the weight: to be called when it has changed."""
        if self.weight is None:  # sharded, and freed
            self.rows = self.columns = None
            return
        # First to dtype, in which sharded weights are gathered: so that the bytes are the same.
        self.rows = quantise(self.weight.detach().to(self.dtype), E4M3)
        self.columns = self.rows.transposed()

    def product(self, x: Float8) -> Tensor:
        return self.multiply(x, self.rows, self.dtype)

    def input_gradient(self, dy: Float8) -> Tensor:
        return self.multiply(dy, self.columns, self.dtype)

    def add_weight_gradient(self, x: Float8, dy: Float8) -> None:
        # No kernel adds a product of 8-bit numbers to a matrix in place, as Linear does.
        dtype = torch.promote_types(self.dtype, torch.float32)
        self.add_gradient(self.multiply(dy.transposed(), x.transposed(), dtype))


class _Enter(torch.autograd.Function):
    """As in overlap/boundary.py: the linears that share a sublayer's input."""

    @staticmethod
    def forward(ctx, boundary, round8, linears, x):
        x = round8(x, E4M3, boundary.maximum)  # before it travels
        whole, ys = boundary.gather_multiply(x.bytes, [x.of_bytes(f.product) for f in linears])
        ctx.boundary, ctx.round8, ctx.linears = boundary, round8, linears
        ctx.save_for_backward(whole, x.inverse)  # once for all linears; the scale is never gathered
        return tuple(ys)

    @staticmethod
    def backward(ctx, *dys):
        boundary, linears, x = ctx.boundary, ctx.linears, Float8(*ctx.saved_tensors, E4M3)
        dys = [ctx.round8(dy, E5M2) for dy in dys]  # no other rank multiplies them: own scales
        products = []
        for linear, dy in zip(linears, dys, strict=True):
            boundary.queue.put(linear, x, dy)
            products.append(dy.of_bytes(linear.input_gradient))
        bytes, meanwhile = [dy.bytes for dy in dys], boundary.queue.run_during_message
        return None, None, None, boundary.multiply_scatter(bytes, products, meanwhile)


class _Leave(torch.autograd.Function):
    """As in overlap/boundary.py: the last linear of a sublayer. `save` has kept x8 for backward."""

    @staticmethod
    def forward(ctx, boundary, round8, linear, x8, x):
        ctx.boundary, ctx.round8, ctx.linear, ctx.saved = boundary, round8, linear, x.grad_fn
        return boundary.multiply_scatter([x8.bytes], [x8.of_bytes(linear.product)])

    @staticmethod
    def backward(ctx, dy):
        boundary, linear = ctx.boundary, ctx.linear
        dy = ctx.round8(dy, E5M2, boundary.maximum)
        whole, (dx,) = boundary.gather_multiply(dy.bytes, [dy.of_bytes(linear.input_gradient)])
        x = Float8(*ctx.saved.saved_tensors, E4M3)
        boundary.queue.put(linear, x, dy._replace(bytes=whole))
        return None, None, None, None, dx


def apply_float8(model: Llama, workload: Workload, device_type: str) -> None:
    """Let the linears of those layers that are in FP8 multiply in 8 bits, in place.

    The embedding, lm_head, routers and routed experts stay as they are: see float8_rows.py for the
    last.
    """
    boundary, round8, dtype = model.boundary, quantise, getattr(torch, workload.dtype)
    kind = dtype, choose_product(device_type, dtype)
    if workload.compile:
        # Five passes over a tensor become two: amax must be known before the rest. The compiler
        # cannot look into queues and messages, and compiles what lies between them: once for each
        # shape and format, ten times or more, and by default at most 8. The limit is set around
        # each call: it is a thread's own, and a GPU's backward runs in another thread.
        more_shapes = torch._dynamo.config.patch(recompile_limit=64)
        round8 = more_shapes(torch.compile(quantise, dynamic=False))
    for name, layer in model.model.layers.items():  # by its number in the whole model
        if workload.in_fp8(int(name), model.config.num_hidden_layers):
            for sublayer, first, last in sublayers(layer):
                for projection in (*first, last):
                    weight = getattr(sublayer, projection).weight
                    setattr(sublayer, projection, Float8Linear(weight, *kind))
                enter = partial(_Enter.apply, boundary, round8)
                put_around(sublayer, first, last, enter, partial(_leave, boundary, round8))


def _leave(boundary: Boundary, round8: Callable, linear: Float8Linear, x: Tensor) -> Tensor:
    x8 = round8(x.detach(), E4M3)  # here, so that a repeated forward can stop after `save`
    return _Leave.apply(boundary, round8, linear, x8, save(x, x8.bytes, x8.inverse))
