"""Tensor parallelism: every matrix is cut, and the ranks compute parts of the same tokens.

The first matrices of a sublayer are cut by output (column-parallel: a rank has some heads, or some
of the MLP's inner units), the last one by input (row-parallel). Between them no communication is
needed. The output is a sum over ranks, [x0 x1] [W0; W1] = x0 W0 + x1 W1. So is the gradient of x in
backward, to which each rank contributes that of its own heads:

                      enter                                        leave
    x, on all ranks  ------>  [ q k v | heads | o ]  of rank 0  --+
                     ------>  [ q k v | heads | o ]  of rank 1  --+-->  sum, on all ranks

Enter and leave are a conjugate pair: what one does forward, the other does backward. With sequence
parallelism norms and residuals between sublayers are cut along the sequence, too:

                  enter forward, leave backward     leave forward, enter backward
    plain         nothing                           all-reduce
    sequence      all-gather                        reduce-scatter

Cost of both: four sums a layer, and one each for the embedding (in float32) and lm_head. A sum
sends 2 (n-1)/n b, also as gather and reduce-scatter; b is the bytes of [B, S, E].
Sequence parallelism divides activations by n, except gathered inputs, which backward needs.
Recomputation sends the forward's messages again, except the last `leave` of the recomputed part.
Source: Shoeybi et al. 2019, "Megatron-LM", section 3; Korthikanti et al. 2022, "Reducing Activation
Recomputation", section 4.2. In production: `torch.distributed.tensor.parallel.parallelize_module`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial, reduce

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from picotron_min import collectives
from picotron_min.collectives import Axis, Conjugate
from picotron_min.extensions.linear import Linear, WeightGradients
from picotron_min.loss import Vocabulary, stripe_loss
from picotron_min.model import MLP, DecoderLayer, Head, Llama

Products = Sequence[Callable[[Tensor], Tensor]]  # with the weights of several linears


@dataclass(frozen=True)
class Boundary:
    """Between sublayers every rank has all of x [B, S, E]."""

    axis: Axis
    queue: WeightGradients  # of the linears; the backward of enter settles it

    def whole(self, x: Tensor) -> Tensor:  # enter, and the backward of leave
        return x

    def start_sum(self, y: Tensor) -> tuple[Tensor, dist.Work]:  # leave, and enter's backward
        y = y.contiguous()
        return y, collectives.start_all_reduce(y, self.axis)

    def maximum(self, amax: Tensor) -> Tensor:  # the largest |x|, over all parts of x: for float8
        return amax

    def sum(self, y: Tensor) -> Tensor:
        y, work = self.start_sum(y)
        work.wait()
        return y

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
        dx = boundary.multiply_scatter(dys, products, meanwhile=boundary.queue.settle)
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
    """x, unchanged; saves what _Leave needs of it in backward, before _Leave runs.

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


# torch.compile cannot look into messages and their ledger: it compiles what lies between them.
_gather = torch.compiler.disable(lambda x, at: Conjugate.apply(at.whole, at.sum, x))
_sum = torch.compiler.disable(lambda y, at: Conjugate.apply(at.sum, at.whole, y))
_all_reduce = torch.compiler.disable(collectives.all_reduce)


def apply_tensor_parallel(model: Llama, boundary: Boundary) -> None:
    """Put the collectives around every sublayer of a model, in place.

    Its matrices must be this rank's parts already, see `narrow` in parallelize.py, and its linears
    must use the boundary's queue, with `hold`. The vocabulary need not divide by n: the last ranks
    have fewer rows, at least one.
    """
    axis = boundary.axis
    if axis.size == 1:
        return
    for layer in model.model.layers.values():
        for sublayer, first, last in sublayers(layer):  # two sums a layer
            linears = [getattr(sublayer, name) for name in first]
            _put_around(sublayer, linears, getattr(sublayer, last), boundary)
    V, embedding, head = model.config.vocab_size, model.model.embed_tokens, model.lm_head
    first = axis.rank * -(-V // axis.size)  # rounded up, as in `part` of placement.py
    if isinstance(embedding, nn.Embedding):  # else another stage has it
        model.model.embed_tokens = VocabularyParallelEmbedding(embedding.weight, first, boundary)
    if isinstance(head, Head):  # and this is the last stage
        model.lm_head = VocabularyParallelHead(head.weight, V, first, boundary)


def sublayers(layer: DecoderLayer) -> Iterator[tuple[nn.Module, tuple[str, ...], str]]:
    """Attention and MLP, with the names of their first linears and of the last."""
    yield layer.self_attn, ("q_proj", "k_proj", "v_proj"), "o_proj"
    # Of a mixture, only shared experts are cut over tp; others are on a grid of their own.
    if mlp := layer.mlp if isinstance(layer.mlp, MLP) else layer.mlp.shared_experts:
        yield mlp, ("gate_proj", "up_proj"), "down_proj"


def _put_around(sublayer: nn.Module, first: list[Linear], last: Linear, boundary: Boundary) -> None:
    enter = partial(_Enter.apply, boundary, first)

    def leave(x: Tensor) -> Tensor:
        return _Leave.apply(boundary, last, save(x, x))

    # Names of parameters must not change: so no modules around them.
    sublayer.project, last.forward = torch.compiler.disable(enter), torch.compiler.disable(leave)


class VocabularyParallelEmbedding(nn.Module):
    """Each rank looks up the tokens of its own rows, zeros for all others, and ranks are summed."""

    def __init__(self, weight: nn.Parameter, first: int, boundary: Boundary) -> None:
        super().__init__()
        self.weight, self.first, self.boundary = weight, first, boundary  # [V/tp, E]

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens [B, S] -> [B, S, E], or [B, S/tp, E] with sequence parallelism"""
        ids = tokens - self.first
        is_here = (ids >= 0) & (ids < len(self.weight))  # [B, S]; each token is on one rank
        x = F.embedding(ids.where(is_here, 0), self.weight) * is_here[..., None]
        return _sum(x, self.boundary)  # its backward is no sum: each rank updates its own rows


class VocabularyParallelHead(Head):
    """The logits of this rank's part of the vocabulary, which only the loss ever combines."""

    def __init__(self, weight: nn.Parameter, vocab_size: int, first: int, boundary: Boundary):
        super().__init__(weight.shape[1], len(weight), bias=False, device="meta")
        self.weight, self.boundary = weight, boundary  # weight [V/tp, E]
        self.first, self.vocab_size = first, vocab_size
        # Three numbers a token are reduced, never the logits: see stripe_loss.
        total = partial(_all_reduce, axis=boundary.axis)
        vocabulary = Vocabulary(first, partial(total, op=dist.ReduceOp.MAX), total)
        self.stripe_loss = partial(stripe_loss, vocabulary=vocabulary)

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        """x [B, S, E] or [B, S/tp, E], targets [B, S] -> [], the same sum on every rank"""
        return super().loss(_gather(x, self.boundary), targets)

    def forward(self, x: Tensor) -> Tensor:
        """All logits [B, S, V] on every rank, without gradients: not for training."""
        part = F.linear(self.boundary.whole(x), self.weight).detach()  # [B, S, V/tp]
        logits = F.pad(part, (self.first, self.vocab_size - self.first - part.shape[-1]))
        return collectives.all_reduce(logits, self.boundary.axis)
