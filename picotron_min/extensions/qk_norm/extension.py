"""Query and key norms: an RMSNorm over each head's numbers, before they are rotated.

    q [B, S, Q D] -> [B, S, Q, D] -> norm over D -> [B, S, Q D]

Source: Henry et al. 2020, "Query-Key Normalization for Transformers"; Qwen3, Yang et al. 2025.
"""

from collections.abc import Callable
from functools import partial

from torch import Tensor

from picotron_min.extension import Extension
from picotron_min.model import Llama, RMSNorm, SelfAttention
from picotron_min.placement import Table


class QkNorm(Extension):
    def swap(self, model: Llama) -> None:
        for attention in (layer.self_attn for layer in model.model.layers.values()):
            kind = {"device": "meta", "dtype": attention.q_proj.weight.dtype}
            sizes = attention.head_dim, model.config.rms_norm_eps
            attention.q_norm, attention.k_norm = RMSNorm(*sizes, **kind), RMSNorm(*sizes, **kind)

    def connect(self, model: Llama, table: Table) -> None:
        for attention in (layer.self_attn for layer in model.model.layers.values()):
            attention.project = partial(_normed, attention, attention.project)


def _normed(attention: SelfAttention, project: Callable, x: Tensor) -> tuple[Tensor, ...]:
    q, k, v = project(x)  # this rank's heads
    D = attention.head_dim
    q = attention.q_norm(q.unflatten(-1, (-1, D))).flatten(-2)
    return q, attention.k_norm(k.unflatten(-1, (-1, D))).flatten(-2), v
