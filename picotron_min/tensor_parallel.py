"""Tensor parallelism: every matrix is cut, and the ranks compute parts of the same tokens.

The first matrices of a sublayer are cut by output (column-parallel: each rank has some heads, or
some of the MLP's inner units), the last one by input (row-parallel). So everything between them
needs no other rank. What comes out is a sum over ranks:

                      enter                                        leave
    x, on all ranks  ------>  [ q k v | heads | o ]  of rank 0  --+
                     ------>  [ q k v | heads | o ]  of rank 1  --+-->  sum, on all ranks

Enter and leave are a conjugate pair: what one does forward, the other does backward. With sequence
parallelism norms and residuals between sublayers are cut along the sequence, too:

                  enter forward   enter backward    leave forward     leave backward
    plain         nothing         all-reduce        all-reduce        nothing
    sequence      all-gather      reduce-scatter    reduce-scatter    all-gather

Cost: an all-reduce of b bytes sends 2 (n-1)/n b, the others half of that: both rows send the same,
4 all-reduces a layer, b = bytes of [B, S, E] (the embedding's in float32). Sequence parallelism
divides the memory between sublayers by n; the gathered input of a sublayer is kept for backward.
Recomputation repeats the forward's, but for the last `leave` of the part that it runs again.
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
from picotron_min.linear import WeightGradients
from picotron_min.loss import Vocabulary, head_loss
from picotron_min.model import Head, Llama


class ReplicaBoundary:
    """Between sublayers every rank has all of x [B, S, E]."""

    def __init__(self, axis: Axis) -> None:
        self.axis = axis

    def enter(self, x: Tensor) -> Tensor:
        return x

    def start_enter_backward(self, dx: Tensor) -> tuple[Tensor, dist.Work | Finished]:
        dx = dx.contiguous()
        return dx, start_all_reduce(dx, self.axis)

    def leave(self, y: Tensor) -> Tensor:
        return all_reduce(y, self.axis)

    def leave_backward(self, dy: Tensor) -> Tensor:
        return dy


class SequenceBoundary:
    """Between sublayers every rank has its part of the sequence, x [B, S/tp, E]."""

    def __init__(self, axis: Axis) -> None:
        self.axis = axis

    def enter(self, x: Tensor) -> Tensor:
        return all_gather(x.contiguous(), self.axis, dim=1)

    def start_enter_backward(self, dx: Tensor) -> tuple[Tensor, dist.Work | Finished]:
        return start_reduce_scatter(dx, self.axis, dim=1)

    def leave(self, y: Tensor) -> Tensor:
        part, work = start_reduce_scatter(y, self.axis, dim=1)
        work.wait()
        return part

    def leave_backward(self, dy: Tensor) -> Tensor:
        return all_gather(dy.contiguous(), self.axis, dim=1)


Boundary = ReplicaBoundary | SequenceBoundary


class _Enter(torch.autograd.Function):
    """The beginning of a sublayer, and in backward its end."""

    @staticmethod
    def forward(ctx, boundary, queue, x):
        ctx.boundary, ctx.queue = boundary, queue
        return boundary.enter(x)

    @staticmethod
    def backward(ctx, dx):
        # The layer before waits for dx, and nothing waits for weight gradients: so they are
        # computed while dx is on its way. All linears of the sublayer have put theirs here by now.
        dx, work = ctx.boundary.start_enter_backward(dx)
        ctx.queue.run()
        work.wait()
        return None, None, dx


class _Leave(torch.autograd.Function):
    """The end of a sublayer: the ranks' outputs become their sum."""

    @staticmethod
    def forward(ctx, boundary, y):
        ctx.boundary = boundary
        out = boundary.leave(y)
        if out is y:
            ctx.mark_dirty(y)  # summed in place
        return out

    @staticmethod
    def backward(ctx, dy):
        return None, ctx.boundary.leave_backward(dy)


# torch.compile cannot look into messages and their ledger: it compiles what lies between them.
_enter = torch.compiler.disable(_Enter.apply)
_leave = torch.compiler.disable(_Leave.apply)


def apply_tensor_parallel(
    model: Llama, axis: Axis, sequence_parallel: bool, queue: WeightGradients
) -> None:
    """Put the collectives around every sublayer of a model, in place.

    Its matrices must be this rank's parts already, see `narrow` in parallelize.py. `queue` is that
    of its linears. The vocabulary need not divide by n: the last ranks have fewer rows, but some.
    Nothing is padded, so losses and saved weights are those of the whole model.
    """
    if axis.size == 1:
        return
    boundary = SequenceBoundary(axis) if sequence_parallel else ReplicaBoundary(axis)
    queue.hold = True  # until _Enter's backward
    for layer in model.model.layers.values():
        for sublayer in (layer.self_attn, layer.mlp):
            _put_around(sublayer, boundary, queue)
    V = model.config.vocab_size
    if isinstance(model.model.embed_tokens, nn.Embedding):  # else another stage has it
        weight = model.model.embed_tokens.weight
        model.model.embed_tokens = VocabularyParallelEmbedding(weight, V, boundary)
    if isinstance(model.lm_head, Head):
        model.lm_head = VocabularyParallelHead(model.lm_head.weight, V, boundary, queue)


def _put_around(sublayer: nn.Module, boundary: Boundary, queue: WeightGradients) -> None:
    inner: Callable[..., Tensor] = sublayer.forward

    def forward(x: Tensor, *rest) -> Tensor:
        return _leave(boundary, inner(_enter(boundary, queue, x), *rest))

    sublayer.forward = forward


class VocabularyParallelEmbedding(nn.Module):
    """Each rank looks up the tokens in its rows; the others are zero there, and summed."""

    def __init__(self, weight: nn.Parameter, vocab_size: int, boundary: Boundary) -> None:
        super().__init__()
        self.weight, self.boundary = weight, boundary  # [V/tp, E]
        self.first = boundary.axis.part(vocab_size).start

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens [B, S] -> [B, S, E], or [B, S/tp, E] with sequence parallelism"""
        ids = tokens - self.first
        is_here = (ids >= 0) & (ids < len(self.weight))
        x = F.embedding(ids.where(is_here, 0), self.weight) * is_here[..., None]
        return _leave(self.boundary, x)


class VocabularyParallelHead(Head):
    """The logits of this rank's part of the vocabulary, which only the loss ever combines."""

    def __init__(
        self, weight: nn.Parameter, vocab_size: int, boundary: Boundary, queue: WeightGradients
    ) -> None:
        axis = boundary.axis
        super().__init__(weight.shape[1], len(weight), bias=False, device="meta")
        self.weight, self.boundary, self.queue = weight, boundary, queue  # [V/tp, E]
        self.vocab_size = vocab_size
        self.vocabulary = Vocabulary(
            axis.part(vocab_size).start,
            maximum=torch.compiler.disable(lambda x: all_reduce(x, axis, dist.ReduceOp.MAX)),
            total=torch.compiler.disable(lambda x: all_reduce(x, axis)),
        )

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        """x [B, S, E] or [B, S/tp, E], targets [B, S] -> [], the same sum on every rank"""
        x = _enter(self.boundary, self.queue, x).flatten(0, 1)
        of_stripe = self.stripe_loss
        return head_loss(x, self.weight, targets.flatten(), self.vocabulary, of_stripe=of_stripe)

    def forward(self, x: Tensor) -> Tensor:
        """All logits [B, S, V] on every rank, without gradients: not for training."""
        part = F.linear(self.boundary.enter(x), self.weight)
        logits = part.new_zeros(*part.shape[:-1], self.vocab_size)
        logits[..., self.vocabulary.first :][..., : part.shape[-1]] = part.detach()
        return all_reduce(logits, self.boundary.axis)
