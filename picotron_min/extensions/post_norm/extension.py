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

from picotron_min.collectives import Axis, Conjugate, all_reduce
from picotron_min.extension import Extension
from picotron_min.loss import linear_dtype, wide
from picotron_min.model import Llama, RMSNorm, SelfAttention
from picotron_min.placement import Table


class PartNorm(RMSNorm):
    """An RMSNorm of x [B, S, N], of which a rank has a part; squares [B, S, 1] are of all."""

    def forward(self, x: Tensor, squares: Tensor) -> Tensor:
        mean = squares / self.normalized_shape[0]  # N
        return (x * (mean + self.eps).rsqrt() * self.weight).to(linear_dtype(x))


class PostNorm(Extension):
    def __init__(self, tp: Axis) -> None:
        self.total = _sum_over(tp)

    def swap(self, model: Llama) -> None:
        c, eps = model.config, model.config.rms_norm_eps
        for layer in model.model.layers.values():
            attention, norm = layer.self_attn, layer.post_attention_layernorm
            kind = {"device": "meta", "dtype": norm.weight.dtype}
            attention.q_norm = PartNorm(c.num_attention_heads * c.head_dim, eps, **kind)
            attention.k_norm = PartNorm(c.num_key_value_heads * c.head_dim, eps, **kind)
            layer.post_feedforward_layernorm = RMSNorm(c.hidden_size, eps, **kind)
            layer.input_layernorm = nn.Identity()

    def connect(self, model: Llama, table: Table) -> None:
        for layer in model.model.layers.values():
            attention, norm = layer.self_attn, layer.post_attention_layernorm
            attention.project = partial(_normed, attention, attention.project, self.total)
            _put_behind(attention, norm)
            _put_behind(layer.mlp, layer.post_feedforward_layernorm)
            # A layer calls these in front of its sublayers, which multiply in this dtype.
            layer.input_layernorm.forward = norm.forward = lambda x: x.to(linear_dtype(x))


def _sum_over(axis: Axis) -> Callable[[Tensor], Tensor]:
    if axis.size == 1:
        return lambda x: x

    def total(x: Tensor) -> Tensor:
        return all_reduce(x.contiguous(), axis)

    # Every rank uses the sum: so its gradient is a sum over the ranks, too.
    return torch.compiler.disable(partial(Conjugate.apply, total, total))


def _normed(attention: SelfAttention, project: Callable, total: Callable, x: Tensor) -> tuple:
    q, k, v = project(x)  # this rank's heads
    q, k = wide(q), wide(k)  # once: backward keeps them
    squares = torch.stack([y.square().sum(-1, keepdim=True) for y in (q, k)])
    of_q, of_k = total(squares)  # [B, S, 1]
    return attention.q_norm(q, of_q), attention.k_norm(k, of_k), v


def _put_behind(sublayer: nn.Module, norm: RMSNorm) -> None:
    forward, normed = sublayer.forward, norm.forward
    sublayer.forward = lambda *args: normed(wide(forward(*args)))
