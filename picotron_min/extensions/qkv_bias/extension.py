"""Biases of queries, keys and values: a vector is added to each projection, before it is rotated.

    x [B, S, E] -> q_proj -> [B, S, Q D] + q_bias [Q D]      backward: the sum of dq over B and S

A bias is a module of its own, and no part of its linear, since linears that compute while messages
travel, in 8 bits, or in two halves of a backward know none.
Source: Qwen2, Yang et al. 2024, section 2.2.1.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from picotron_min.extension import Extension
from picotron_min.extensions.qkv_bias.shape import NAMES
from picotron_min.model import Llama, SelfAttention
from picotron_min.placement import Table


class Bias(nn.Module):
    """x [..., N] + weight [N], in the dtype of x."""

    def __init__(self, size: int, **kind) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, **kind))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight.to(x.dtype)


class QkvBias(Extension):
    def swap(self, model: Llama) -> None:
        shapes = model.config.attention_shapes()
        for layer in model.model.layers.values():
            kind = {"device": "meta", "dtype": layer.self_attn.q_proj.weight.dtype}
            for name in NAMES:
                layer.set_submodule(name, Bias(*shapes[name], **kind))

    def connect(self, model: Llama, table: Table) -> None:
        for attention in (layer.self_attn for layer in model.model.layers.values()):
            attention.project = partial(_biased, attention, attention.project)


def _biased(attention: SelfAttention, project: Callable, x: Tensor) -> tuple[Tensor, ...]:
    q, k, v = project(x)  # this rank's heads
    return attention.q_bias(q), attention.k_bias(k), attention.v_bias(v)
