"""Tensor parallelism: every matrix is cut, and the ranks compute parts of the same tokens.

    x, on all ranks  -- enter -->  [ q k v | heads | o ]  of rank 0  -- leave -->  sum, on all ranks
                     -- enter -->  [ q k v | heads | o ]  of rank 1  -- leave -->

The first matrices of a sublayer are cut by output (column-parallel: a rank has some heads, or some
of the MLP's inner units), the last one by input (row-parallel). Between them no communication is
needed. The output is a sum over ranks, [x0 x1] [W0; W1] = x0 W0 + x1 W1. So is the gradient of x in
backward: enter and leave are a conjugate pair, what one does forward, the other does backward. With
sequence parallelism norms and residuals between sublayers are cut along the sequence, too:

                  enter forward, leave backward     leave forward, enter backward
    plain         nothing                           all-reduce
    sequence      all-gather                        reduce-scatter

Cost of both: four sums a layer, and one each for the embedding (in float32) and lm_head. A sum
sends 2 (n-1)/n b, also as gather and reduce-scatter; b is the bytes of [B, S, E]. Here each message
is waited for. A run computes weight gradients meanwhile, in extensions/overlap/, and uses this form
with `"overlap": false`: the losses and the bytes are the same.
Source: Shoeybi et al. 2019, "Megatron-LM", section 3; Korthikanti et al. 2022, "Reducing Activation
Recomputation", section 4.2. In production: `torch.distributed.tensor.parallel.parallelize_module`.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from picotron_min.collectives import Axis, Conjugate, all_gather, all_reduce, reduce_scatter
from picotron_min.loss import Vocabulary, stripe_loss
from picotron_min.mesh import Axes
from picotron_min.model import Head, Llama
from picotron_min.placement import Table, part, saved_name


def narrow(model: Llama, table: Table, axes: Axes) -> None:
    """Replace the parameters of a model on the meta device by this rank's parts of them."""
    tied = model.config.tie_word_embeddings
    for name, parameter in list(model.named_parameters()):
        slices = part(parameter.shape, table[saved_name(name, tied)].cuts, axes.ranks, axes.sizes)
        mine = parameter.new_empty([s.stop - s.start for s in slices])
        model.get_submodule(name.removesuffix(".weight")).weight = nn.Parameter(mine)
    model.tie_weights()


class Ends:
    """What tensor-parallel ranks do at the two ends of a sublayer."""

    def __init__(self, axis: Axis, sequence_parallel: bool) -> None:
        self.axis, self.whole, self.sum = axis, lambda x: x, partial(all_reduce, axis=axis)
        if sequence_parallel:
            self.whole = partial(all_gather, axis=axis, dim=1)  # [B, S/tp, E] -> [B, S, E]
            self.sum = partial(reduce_scatter, axis=axis, dim=1)  # and back, summed

    @torch.compiler.disable  # torch.compile cannot look into messages and their ledger
    def enter(self, x: Tensor) -> Tensor:
        return Conjugate.apply(self.whole, lambda dx: self.sum(dx.contiguous()), x)

    @torch.compiler.disable
    def leave(self, y: Tensor) -> Tensor:
        return Conjugate.apply(lambda y: self.sum(y.contiguous()), self.whole, y)


def apply_tensor_parallel(model: Llama, axis: Axis, sequence_parallel: bool) -> None:
    """Put enter and leave around every sublayer of a model whose matrices are cut, in place.

    The vocabulary need not divide by n: the last ranks have fewer rows, at least one.
    """
    if axis.size == 1:
        return
    ends = Ends(axis, sequence_parallel)
    for layer in model.model.layers.values():
        for sublayer in (layer.self_attn, layer.mlp):  # two sums a layer
            sublayer.forward = _between(ends, sublayer.forward)
    cut_vocabulary(model, ends)


def _between(ends: Ends, forward: Callable) -> Callable:
    # Not a module around the sublayer: names of parameters must not change.
    return lambda x, *rest: ends.leave(forward(ends.enter(x), *rest))


def cut_vocabulary(model: Llama, ends: Ends) -> None:
    V, embedding, head = model.config.vocab_size, model.model.embed_tokens, model.lm_head
    first = ends.axis.rank * -(-V // ends.axis.size)  # rounded up, as in `part` of placement.py
    if isinstance(embedding, nn.Embedding):  # else another stage has it
        model.model.embed_tokens = VocabularyParallelEmbedding(embedding.weight, first, ends)
    if isinstance(head, Head):  # and this is the last stage
        model.lm_head = VocabularyParallelHead(head.weight, V, first, ends)


class VocabularyParallelEmbedding(nn.Module):
    """Each rank looks up the tokens of its own rows, zeros for all others, and ranks are summed."""

    def __init__(self, weight: nn.Parameter, first: int, ends: Ends) -> None:
        super().__init__()
        self.weight, self.first, self.ends = weight, first, ends  # [V/tp, E]

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens [B, S] -> [B, S, E], or [B, S/tp, E] with sequence parallelism"""
        ids = tokens - self.first
        is_here = (ids >= 0) & (ids < len(self.weight))  # [B, S]; each token is on one rank
        x = F.embedding(ids.where(is_here, 0), self.weight) * is_here[..., None]
        return self.ends.leave(x)  # its backward is no sum: each rank updates its own rows


class VocabularyParallelHead(Head):
    """The logits of this rank's part of the vocabulary, which only the loss ever combines."""

    def __init__(self, weight: nn.Parameter, vocab_size: int, first: int, ends: Ends) -> None:
        super().__init__(weight.shape[1], len(weight), bias=False, device="meta")
        self.weight, self.ends = weight, ends  # weight [V/tp, E]
        self.first, self.vocab_size = first, vocab_size
        # Three numbers a token are reduced, never the logits: see stripe_loss.
        total = torch.compiler.disable(partial(all_reduce, axis=ends.axis))
        vocabulary = Vocabulary(first, partial(total, op=dist.ReduceOp.MAX), total)
        self.stripe_loss = partial(stripe_loss, vocabulary=vocabulary)

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        """x [B, S, E] or [B, S/tp, E], targets [B, S] -> [], the same sum on every rank"""
        return super().loss(self.ends.enter(x), targets)

    def forward(self, x: Tensor) -> Tensor:
        """All logits [B, S, V] on every rank, without gradients: not for training."""
        part = F.linear(self.ends.whole(x), self.weight).detach()  # [B, S, V/tp]
        logits = F.pad(part, (self.first, self.vocab_size - self.first - part.shape[-1]))
        return all_reduce(logits, self.ends.axis)
