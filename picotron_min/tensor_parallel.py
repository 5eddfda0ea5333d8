"""Tensor parallelism: every matrix is cut, and the ranks compute parts of the same tokens.

The first matrices of a sublayer are cut by output (column-parallel: each rank has some heads, or
some of the MLP's inner units), the last by input (row-parallel), so that everything between them is
a rank's own business. What comes out is a sum over ranks:

                      enter                                        leave
    x, on all ranks  ------>  [ q k v | heads | o ]  of rank 0  --+
                     ------>  [ q k v | heads | o ]  of rank 1  --+-->  sum, on all ranks

Forward, `leave` is an all-reduce and `enter` does nothing; backward it is the other way round. With
sequence parallelism what lies between sublayers (norms, residuals) is cut along the sequence, too:
`enter` is an all-gather, `leave` a reduce-scatter, and backward they swap. Both together are what
one all-reduce costs, so the bytes are the same, and memory between sublayers is divided by n. The
gathered input of a sublayer is kept for backward; gathering it again would save [B, S, E] a
sublayer and send half as much again in backward.

    b = bytes of [B, S, E]*    per layer, forward        per layer, backward
    plain                      2 all-reduces of b        2 all-reduces of b
    sequence parallel          2 all-gathers and 2 reduce-scatters of b, each way
    * in bfloat16, if that is what is computed in; the embedding's always in float32

An all-reduce costs 2 (n-1)/n b, the others half of that. Besides the layers the embedding leaves
and lm_head enters, each as a sublayer does, and per chunk of the loss go [N] + [2, N] numbers, see
loss.py. Recomputation repeats the forward's, but for the last `leave` of the part that it runs
again: it stops as soon as it has all that backward needs.

The gradient that `enter` sends in backward is started before the weight gradients of its sublayer
are computed and waited for after them: nobody needs weight gradients soon, so they fill the time.
That is why the linears here do not compute them, but leave the two factors to `enter`.

Source: Shoeybi et al. 2019, "Megatron-LM", section 3; Korthikanti et al. 2022, "Reducing Activation
Recomputation", section 4.2. In production: `torch.distributed.tensor.parallel.parallelize_module`.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from picotron_min.collectives import (
    Axis,
    Finished,
    all_gather,
    all_reduce,
    start_all_reduce,
    start_reduce_scatter,
)
from picotron_min.loss import Vocabulary, head_loss
from picotron_min.model import Head, Llama

COLUMN_PARALLEL = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
ROW_PARALLEL = ("o_proj", "down_proj")
VOCABULARY_PARALLEL = ("embed_tokens", "lm_head")


def shard_dim(name: str) -> int | None:
    """The one sharding table: the dim that tensor parallelism cuts a parameter along, or None.

    A weight is [out, in], an embedding [V, E]. Norms are whole on every rank.
    """
    module = name.removesuffix(".weight").split(".")[-1]
    if module in COLUMN_PARALLEL + VOCABULARY_PARALLEL:
        return 0
    return 1 if module in ROW_PARALLEL else None


def apply_tensor_parallel(model: Llama, axis: Axis, sequence_parallel: bool) -> None:
    """Swap a model's matrices for this rank's parts of them, uninitialised, in place.

    The tp size must divide both head counts and the intermediate size (config.py says which do). It
    need not divide the vocabulary: the last ranks have fewer rows, but some. Nothing is padded, so
    losses and saved weights are those of the whole model.
    """
    if axis.size == 1:
        return
    boundary = SequenceBoundary(axis) if sequence_parallel else ReplicaBoundary(axis)
    for layer in model.model.layers.values():
        for sublayer in (layer.self_attn, layer.mlp):
            for name, linear in list(sublayer.named_children()):
                if isinstance(linear, nn.Linear):
                    setattr(sublayer, name, _narrowed(name, linear, axis))
            _put_around(sublayer, boundary)
    if isinstance(model.model.embed_tokens, nn.Embedding):
        model.model.embed_tokens = VocabularyParallelEmbedding(model.model.embed_tokens, boundary)
    if isinstance(model.lm_head, Head):
        model.lm_head = VocabularyParallelHead(model.lm_head, boundary)
    model.tie_weights()


class ReplicaBoundary:
    """Between sublayers every rank has all of x [B, S, E]."""

    def __init__(self, axis: Axis) -> None:
        self.axis = axis

    def enter(self, x: Tensor) -> Tensor:
        return x

    def start_enter_backward(self, gradient: Tensor) -> tuple[Tensor, dist.Work | Finished]:
        gradient = gradient.contiguous()
        return gradient, start_all_reduce(gradient, self.axis)

    def leave(self, x: Tensor) -> Tensor:
        return all_reduce(x, self.axis)

    def leave_backward(self, gradient: Tensor) -> Tensor:
        return gradient


class SequenceBoundary:
    """Between sublayers every rank has its part of the sequence, x [B, S/tp, E]."""

    def __init__(self, axis: Axis) -> None:
        self.axis = axis

    def enter(self, x: Tensor) -> Tensor:
        return all_gather(x.contiguous(), self.axis, dim=1)

    def start_enter_backward(self, gradient: Tensor) -> tuple[Tensor, dist.Work | Finished]:
        return start_reduce_scatter(gradient, self.axis, dim=1)

    def leave(self, x: Tensor) -> Tensor:
        part, work = start_reduce_scatter(x, self.axis, dim=1)
        work.wait()
        return part

    def leave_backward(self, gradient: Tensor) -> Tensor:
        return all_gather(gradient.contiguous(), self.axis, dim=1)


Boundary = ReplicaBoundary | SequenceBoundary
Factors = list[tuple[Tensor, Tensor]]  # of a weight gradient: input and output gradient of a linear


def _put_around(sublayer: nn.Module, boundary: Boundary) -> None:
    """Make a sublayer's forward begin and end with the boundary's collectives."""
    linears = [child for child in sublayer.children() if isinstance(child, DeferredLinear)]
    inner: Callable[..., Tensor] = sublayer.forward

    def forward(x: Tensor, *rest) -> Tensor:
        owed: list[Factors] = [[] for _ in linears]  # anew for every call: many can be in flight
        x = _enter(boundary, owed, x, *[linear.weight for linear in linears])
        for linear, factors in zip(linears, owed, strict=True):
            linear.owed = factors
        return _leave(boundary, inner(x, *rest))

    sublayer.forward = forward


class _Enter(torch.autograd.Function):
    """The beginning of a sublayer. In backward its end: the place where its weights get gradients.

    Backward communicates x's gradient, and computes the weight gradients meanwhile.
    """

    @staticmethod
    def forward(ctx, boundary, owed, x, *weights):
        ctx.boundary, ctx.owed = boundary, owed
        return boundary.enter(x)

    @staticmethod
    def backward(ctx, gradient):
        gradient, work = ctx.boundary.start_enter_backward(gradient)
        weight_gradients = [weight_gradient(*factors.pop()) for factors in ctx.owed]
        work.wait()
        return None, None, gradient, *weight_gradients


class _Leave(torch.autograd.Function):
    """The end of a sublayer: the ranks' outputs become their sum. Backward communicates with
    sequence parallelism only."""

    @staticmethod
    def forward(ctx, boundary, x):
        ctx.boundary = boundary
        out = boundary.leave(x)
        if out is x:
            ctx.mark_dirty(x)  # summed in place
        return out

    @staticmethod
    def backward(ctx, gradient):
        return None, ctx.boundary.leave_backward(gradient)


# torch.compile would look into the messages and their ledger, and give up. So it is sent round
# them, and round the linears, whose backward fills a list; it compiles what lies between.
_enter = torch.compiler.disable(_Enter.apply)
_leave = torch.compiler.disable(_Leave.apply)


class DeferredLinear(nn.Linear):
    """A linear without bias whose backward computes the gradient of its input only.

    In bfloat16 both factors are that already, and so is what is kept of them: x comes from a norm
    or a linear, the weight is a copy (see `apply_copies`).
    """

    owed: Factors  # put here just before each forward, by _put_around

    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:
        # The weight's gradient comes by way of _Enter, which is why it is detached here.
        return _DeferredProduct.apply(x, self.weight.detach(), self.owed)


class _DeferredProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, owed):
        ctx.save_for_backward(x, weight)
        ctx.owed = owed
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        ctx.owed.append((x, gradient))
        return gradient @ weight, None, None


def weight_gradient(x: Tensor, gradient: Tensor) -> Tensor:
    """x [B, S, in] and the gradient of x w^T [B, S, out] -> the gradient of w [out, in]."""
    return gradient.flatten(0, 1).T @ x.flatten(0, 1)


def _narrowed(name: str, linear: nn.Linear, axis: Axis) -> DeferredLinear:
    shape = [linear.out_features, linear.in_features]
    part = axis.part(shape[shard_dim(name)])
    shape[shard_dim(name)] = part.stop - part.start
    weight = linear.weight
    return DeferredLinear(shape[1], shape[0], False, device=weight.device, dtype=weight.dtype)


class VocabularyParallelEmbedding(nn.Embedding):
    """The embeddings of this rank's tokens; the others are looked up elsewhere, and summed."""

    def __init__(self, whole: nn.Embedding, boundary: Boundary) -> None:
        rows = boundary.axis.part(whole.num_embeddings)
        options = {"device": whole.weight.device, "dtype": whole.weight.dtype}
        super().__init__(rows.stop - rows.start, whole.embedding_dim, **options)
        self.first, self.boundary = rows.start, boundary

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens [B, S] -> [B, S, E], or [B, S/tp, E] with sequence parallelism"""
        ids = tokens - self.first
        is_here = (ids >= 0) & (ids < self.num_embeddings)
        x = F.embedding(ids.where(is_here, 0), self.weight) * is_here[..., None]
        return _leave(self.boundary, x)


class VocabularyParallelHead(Head):
    """The logits of this rank's part of the vocabulary, which only the loss ever combines."""

    def __init__(self, whole: Head, boundary: Boundary) -> None:
        axis = boundary.axis
        rows = axis.part(whole.out_features)
        options = {"device": whole.weight.device, "dtype": whole.weight.dtype}
        super().__init__(whole.in_features, rows.stop - rows.start, bias=False, **options)
        self.boundary, self.vocabulary_size = boundary, whole.out_features
        self.vocabulary = Vocabulary(
            rows.start,
            maximum=torch.compiler.disable(lambda x: all_reduce(x, axis, dist.ReduceOp.MAX)),
            total=torch.compiler.disable(lambda x: all_reduce(x, axis)),
        )

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        """x [B, S, E] or [B, S/tp, E], targets [B, S] -> [], the same sum on every rank"""
        x = _enter(self.boundary, [], x)
        x, targets = x.flatten(0, 1), targets.flatten()
        return head_loss(x, self.weight, targets, self.vocabulary, of_chunk=self.chunk_loss)

    def forward(self, x: Tensor) -> Tensor:
        """All logits [B, S, V] on every rank, without gradients: not for training."""
        part = F.linear(self.boundary.enter(x), self.weight)
        logits = part.new_zeros(*part.shape[:-1], self.vocabulary_size)
        logits[..., self.vocabulary.first :][..., : part.shape[-1]] = part.detach()
        return all_reduce(logits, self.boundary.axis)
