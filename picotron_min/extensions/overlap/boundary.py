"""Boundaries: tensor parallelism that computes weight gradients while its messages travel.

    backward of a sublayer     without overlap     dx, dW | message of dx waited for
                               with overlap        dx | message begins, dW meanwhile, message ends

The layer before waits for dx, and nothing waits for weight gradients. So the first linears of a
sublayer are one Function with the message around it, which runs the queue (linear.py) while the sum
of dx travels. tensor_parallel.py is the simple form, which computes the same.

Sequence parallelism divides activations by n, except gathered inputs, which backward needs.
Recomputation sends the forward's messages again, except the last `leave` of the recomputed part.
Source: Narayanan et al. 2021, "Efficient Large-Scale Language Model Training", section 5. In
production: Megatron-LM's `LinearWithGradAccumulationAndAsyncCommunication`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial, reduce

import torch
import torch.distributed as dist
from torch import Tensor, nn

from picotron_min import collectives
from picotron_min.collectives import Axis
from picotron_min.extensions.overlap.linear import Linear, WeightGradients, apply_queue
from picotron_min.mesh import Axes
from picotron_min.model import MLP, DecoderLayer, Llama
from picotron_min.tensor_parallel import Ends, cut_vocabulary

Products = Sequence[Callable[[Tensor], Tensor]]  # with the weights of several linears


@dataclass(frozen=True)
class Boundary:
    """Between sublayers every rank has all of x [B, S, E]."""

    axis: Axis
    queue: WeightGradients  # of the linears; the backward of enter runs it

    def whole(self, x: Tensor) -> Tensor:  # enter, and the backward of leave
        return x

    def start_sum(self, y: Tensor) -> tuple[Tensor, dist.Work]:  # leave, and enter's backward
        y = y.contiguous()
        return y, collectives.start_all_reduce(y, self.axis)

    def maximum(self, amax: Tensor) -> Tensor:  # the largest |x|, over all parts of x: for float8
        return amax

    def gather_multiply(self, x: Tensor, products: Products) -> tuple[Tensor, list[Tensor]]:
        """All of x, [B, S, E], and its products."""
        x = self.whole(x)
        return x, [product(x) for product in products]

    def multiply_scatter(
        self, xs: Sequence[Tensor], products: Products, meanwhile: Callable = lambda: None
    ) -> Tensor:
        """x0 W0 + x1 W1 + ..., summed over the ranks; `meanwhile()` runs while it travels."""
        y, work = self.start_sum(add_products(xs, products))
        meanwhile()
        work.wait()  # NCCL: the stream waits, not the host
        return y


class SequenceBoundary(Boundary):
    """Between sublayers every rank has its part of the sequence, x [B, S/tp, E]."""

    def whole(self, x: Tensor) -> Tensor:
        return collectives.all_gather(x, self.axis, dim=1)

    def start_sum(self, y: Tensor) -> tuple[Tensor, dist.Work]:
        return collectives.start_reduce_scatter(y, self.axis, dim=1)

    def maximum(self, amax: Tensor) -> Tensor:
        return _all_reduce(amax, self.axis, op=dist.ReduceOp.MAX)


def add_products(xs: Sequence[Tensor], products: Products) -> Tensor:
    # In the memory of the first product, which is this function's own.
    return reduce(Tensor.add_, (product(x) for x, product in zip(xs, products, strict=True)))


class _Enter(torch.autograd.Function):
    """The beginning of a sublayer, and in backward its end: the linears that share its input."""

    @staticmethod
    def forward(ctx, boundary, linears, x):  # no weight among them: autograd computes no dW
        ctx.boundary, ctx.linears = boundary, linears
        x, ys = boundary.gather_multiply(x, [linear.product for linear in linears])
        ctx.save_for_backward(x)
        return tuple(ys)

    @staticmethod
    def backward(ctx, *dys):
        boundary, linears, (x,) = ctx.boundary, ctx.linears, ctx.saved_tensors
        for linear, dy in zip(linears, dys, strict=True):
            boundary.queue.put(linear, x, dy)
        # The layer before waits for dx, and nothing waits for weight gradients: so they are
        # computed while dx travels. All linears of the sublayer, o too, are in the queue by now.
        # In a pipeline whose plan has W, they wait for that, and nothing hides the message.
        products = [linear.input_gradient for linear in linears]
        dx = boundary.multiply_scatter(dys, products, meanwhile=boundary.queue.run_during_message)
        return None, None, dx  # one gradient for each argument of forward


class _Leave(torch.autograd.Function):
    """The end of a sublayer: its last linear. The ranks' outputs become their sum."""

    @staticmethod
    def forward(ctx, boundary, linear, x):
        ctx.boundary, ctx.linear = boundary, linear
        ctx.saved = x.grad_fn  # x comes from _Save, which has saved it
        return boundary.multiply_scatter([x], [linear.product])

    @staticmethod
    def backward(ctx, dy):
        boundary, linear = ctx.boundary, ctx.linear
        dy, (dx,) = boundary.gather_multiply(dy, [linear.input_gradient])
        boundary.queue.put(linear, *ctx.saved.saved_tensors, dy)
        return None, None, dx


class _Save(torch.autograd.Function):
    """x, unchanged; saves what _Leave needs in backward, before _Leave runs.

    When torch's checkpoint repeats a forward, it stops where the last tensor is saved: so it
    repeats neither the last product nor its message.
    """

    @staticmethod
    def forward(ctx, x, *tensors):
        ctx.save_for_backward(*tensors)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dx):
        return dx, *[None] * (len(ctx.needs_input_grad) - 1)


save = _Save.apply


_all_reduce = torch.compiler.disable(collectives.all_reduce)


def apply_overlap(
    model: Llama,
    axes: Axes,
    kind: type[Boundary],
    splits: bool,
    compiles: bool,
    linear: type[Linear] = Linear,
) -> None:
    """In place of apply_tensor_parallel: a queue of weight gradients, and boundaries that run it.

    `splits`: the plan cuts backward into B and W, and the queue waits for W. The model keeps its
    boundary, for extensions that multiply in another way.
    """
    axis, queue = axes.tp, WeightGradients()
    queue.split, queue.hold = splits, axis.size > 1  # until a message travels
    model.boundary = boundary = kind(axis, queue)
    if not compiles or queue.waits:  # with nothing to wait for, a compiled layer is
        apply_queue(model, queue, linear)  # one graph, with autograd's own products
    if axis.size == 1:
        return
    for layer in model.model.layers.values():
        for sublayer in sublayers(layer):  # two sums a layer
            put_around(*sublayer, partial(_Enter.apply, boundary), partial(_leave, boundary))
    cut_vocabulary(model, Ends(axis, sequence_parallel=kind is not Boundary))


def sublayers(layer: DecoderLayer) -> Iterator[tuple[nn.Module, tuple[str, ...], str]]:
    """Attention and MLP, with the names of their first linears and of the last."""
    yield layer.self_attn, ("q_proj", "k_proj", "v_proj"), "o_proj"
    # Of a mixture, only shared experts are cut over tp; others are on a grid of their own.
    if mlp := layer.mlp if isinstance(layer.mlp, MLP) else layer.mlp.shared_experts:
        yield mlp, ("gate_proj", "up_proj"), "down_proj"


def put_around(
    sublayer: nn.Module, first: Sequence[str], last: str, enter: Callable, leave: Callable
) -> None:
    """Let a sublayer begin with enter(linears, x), and end with leave(linear, x), in place."""
    linears, last = [getattr(sublayer, name) for name in first], getattr(sublayer, last)
    # Names of parameters must not change: so no modules around them.
    sublayer.project = torch.compiler.disable(partial(enter, linears))
    last.forward = torch.compiler.disable(partial(leave, last))


def _leave(boundary: Boundary, linear: Linear, x: Tensor) -> Tensor:
    return _Leave.apply(boundary, linear, save(x, x))
