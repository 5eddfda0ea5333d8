"""Norms behind sublayers, and of all queries and all keys, as OLMo 2 has them.

    Llama     x + attention(norm(x))      x + mlp(norm(x))
    OLMo 2    x + norm(attention(x))      x + norm(mlp(x))

    q [B, S, Q D] -> q / sqrt(mean(q^2) + eps) * weight: the mean is over all heads

A tensor-parallel rank has some heads: it adds up their squares, and the ranks sum these, of q and
k in one message: an all-reduce of [2, B, S, 1], and in backward one of its gradient.
Source: OLMo et al. 2024, "2 OLMo 2 Furious", section 3.1.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from picotron_min.collectives import Axis
from picotron_min.extension import Extension
from picotron_min.loss import linear_dtype, wide
from picotron_min.model import Llama, RMSNorm, SelfAttention
from picotron_min.placement import Table
from picotron_min.tensor_parallel import Ends


class PostNorm(Extension):
    def __init__(self, tp: Axis) -> None:
        self.ends = Ends(tp, sequence_parallel=False) if tp.size > 1 else None

    def swap(self, model: Llama) -> None:
        for layer in model.model.layers.values():
            attention, norm = layer.self_attn, layer.post_attention_layernorm
            kind = {"eps": norm.eps, "device": "meta", "dtype": norm.weight.dtype}
            attention.q_norm = RMSNorm(attention.q_proj.out_features, **kind)
            attention.k_norm = RMSNorm(attention.k_proj.out_features, **kind)
            layer.post_feedforward_layernorm = RMSNorm(norm.normalized_shape, **kind)
            layer.input_layernorm = nn.Identity()

    def connect(self, model: Llama, table: Table) -> None:
        for layer in model.model.layers.values():
            attention = layer.self_attn
            attention.project = partial(_normed, attention, attention.project, self.total)

    def wrap(self, model: Llama) -> None:
        """After a sublayer's recomputation, which would repeat its last message for the norm."""
        for layer in model.model.layers.values():
            norm = layer.post_attention_layernorm
            _put_behind(layer.self_attn, norm)
            _put_behind(layer.mlp, layer.post_feedforward_layernorm)
            # A layer calls these in front of its sublayers, which multiply in this dtype.
            layer.input_layernorm.forward = norm.forward = lambda x: x.to(linear_dtype(x))

    def total(self, squares: Tensor) -> Tensor:
        """The sum over all ranks. Each of them uses it: so its gradient is summed, too."""
        return self.ends.enter(self.ends.leave(squares)) if self.ends else squares


def _normed(attention: SelfAttention, project: Callable, total: Callable, x: Tensor) -> tuple:
    q, k, v = project(x)  # this rank's heads
    q, k = wide(q), wide(k)
    squares = torch.stack([y.square().sum(-1, keepdim=True) for y in (q, k)])
    of_q, of_k = total(squares)  # [B, S, 1]
    q = _divided(q, of_q, attention.q_norm)
    return q.to(v.dtype), _divided(k, of_k, attention.k_norm).to(v.dtype), v


def _divided(x: Tensor, squares: Tensor, norm: RMSNorm) -> Tensor:
    mean = squares / norm.normalized_shape[0]  # the numbers of all heads
    return x * (mean + norm.eps).rsqrt() * norm.weight


def _put_behind(sublayer: nn.Module, norm: RMSNorm) -> None:
    forward, normed = sublayer.forward, norm.forward
    sublayer.forward = lambda *args: normed(wide(forward(*args)))
