"""Layers without rotary embedding: their attention sees order only through the causal mask.

    SmolLM3    rotary, rotary, rotary, none, rotary, rotary, rotary, none, ...

Source: Kazemnejad et al. 2023, "The Impact of Positional Encoding on Length Generalization"; Yang
et al. 2025, "Rope to Nope and Back Again", section 3, on some layers without.
"""

from functools import partial

from torch import Tensor

from picotron_min.extension import Extension
from picotron_min.model import Llama, SelfAttention


class NoRope(Extension):
    def swap(self, model: Llama) -> None:
        for i, layer in model.model.layers.items():  # of this stage, by their numbers in the model
            if int(i) in model.config.rope_free:
                layer.self_attn.forward = partial(_unrotated, layer.self_attn)


def _unrotated(attention: SelfAttention, x: Tensor, rotary: tuple) -> Tensor:
    """SelfAttention.forward, but for the rotation."""
    _, _, *extra = rotary
    heads = -1, attention.head_dim
    q, k, v = (y.unflatten(-1, heads).transpose(1, 2) for y in attention.project(x))
    out = attention.core_attention(q, k, v, *extra)  # [B, Q, S, D]
    return attention.o_proj(out.transpose(1, 2).flatten(2))
