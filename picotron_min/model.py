"""Model: a plain Llama for one device, with Hugging Face's parameter names.

    tokens -> embed_tokens -> layers: x += self_attn(norm(x)); x += mlp(norm(x)) -> norm -> lm_head

Nothing here is parallel. A parallelism swaps submodules or methods, and changes no line below. That
takes four rules: head counts are read off the tensors (`view(B, S, -1, D)`); linears with one input
are called together, in `project`; attention is a submodule without parameters, which gets K and V
before they are repeated for the query heads that share them; a model is a chain.

B sequences, S positions, E hidden size, Q query heads, K key-value heads, D head dimension,
V vocabulary. Source: Touvron et al. 2023, "Llama 2"; RoPE: Su et al. 2021, section 3.4.2;
RMSNorm: Zhang and Sennrich 2019; grouped-query attention: Ainslie et al. 2023.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from picotron_min.loss import head_loss, linear_dtype, stripe_loss, wide
from picotron_min.model_config import ModelConfig


class Llama(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.model = nn.Module()  # a level of Hugging Face's names: "model.layers.0..."
        self.model.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        layers = {str(i): DecoderLayer(config) for i in range(config.num_hidden_layers)}
        self.model.layers = nn.ModuleDict(layers)  # names survive when a stage drops some
        self.model.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = Head(config.hidden_size, config.vocab_size, bias=False)
        self.tie_weights()

    def tie_weights(self) -> None:
        """Make both embeddings one parameter (again), unless a pipeline stage lacks one of them."""
        ends = self.model.embed_tokens, self.lm_head
        if self.config.tie_word_embeddings and all(hasattr(end, "weight") for end in ends):
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(
        self, tokens: Tensor, positions: Tensor, targets: Tensor | None = None, *extra
    ) -> Tensor:
        """tokens [B, S] -> logits [B, S, V], or, with targets, the summed loss; positions [(B,) S].

        `extra` is for every attention, where an extension's takes more than q, k and v.
        """
        rotary = *rotary_table(positions, self.config), *extra
        x = self.model.embed_tokens(tokens)
        for layer in self.model.layers.values():
            x = layer(x, rotary)
        x = self.model.norm(x)
        return self.lm_head(x) if targets is None else self.lm_head.loss(x, targets)


class DecoderLayer(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = SelfAttention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config.hidden_size, config.intermediate_size)

    def forward(self, x: Tensor, rotary: tuple) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rotary)
        return x + self.mlp(self.post_attention_layernorm(x))


class SelfAttention(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        E, D = config.hidden_size, config.head_dim
        self.q_proj = nn.Linear(E, config.num_attention_heads * D, bias=False)
        self.k_proj = nn.Linear(E, config.num_key_value_heads * D, bias=False)
        self.v_proj = nn.Linear(E, config.num_key_value_heads * D, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * D, E, bias=False)
        self.core_attention = FlashAttention()
        self.head_dim = D

    def forward(self, x: Tensor, rotary: tuple) -> Tensor:
        q, k, v = self.project(x)
        cos, sin, *extra = rotary
        B, S, _ = q.shape  # x may be a part of the sequence
        q = self.rotate(q.view(B, S, -1, self.head_dim), cos, sin)  # [B, S, Q, D]
        k = self.rotate(k.view(B, S, -1, self.head_dim), cos, sin)  # [B, S, K, D]
        v = v.view(B, S, -1, self.head_dim)  # [B, S, K, D]
        out = self.core_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), *extra)
        return self.o_proj(out.transpose(1, 2).reshape(B, S, -1))

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.q_proj(x), self.k_proj(x), self.v_proj(x)

    @staticmethod  # an extension may put a faster one here
    def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Turn the pairs (x[i], x[i + D/2]) of x [B, S, heads, D] by their position's angles."""
        # Hugging Face's pairs; the paper's (x[2i], x[2i+1]) only permute the rows of q and k.
        # (first cos - second sin, second cos + first sin), both halves at once: less memory traffic
        swapped = x.roll(x.shape[-1] // 2, dims=-1)
        return (x * cos[..., None, :] + swapped * sin[..., None, :]).to(x.dtype)


class FlashAttention(nn.Module):
    """Causal softmax(q k^T / sqrt(D)) v of q [B, Q, S, D], k and v [B, K, S, D], fused by torch."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # stores no [S, S] matrix
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


class MLP(nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.project(x)
        return self.down_proj(F.silu(gate) * up)

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.gate_proj(x), self.up_proj(x)


class RMSNorm(nn.RMSNorm):
    """x / sqrt(mean(x^2) + eps) * weight, in the dtype that linears compute in."""

    def forward(self, x: Tensor) -> Tensor:
        # Wide: a GPU has no kernel for a weight of another dtype. Rounded here: under autocast each
        # linear would round it for itself, and keep its own copy for backward.
        return super().forward(wide(x)).to(linear_dtype(x))


class Head(nn.Linear):
    """The projection to the vocabulary, and the loss, which is all that training needs."""

    stripe_loss = staticmethod(stripe_loss)  # or the loss of a part of the vocabulary, or compiled

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        """x [B, S, E], targets [B, S] -> [], the sum of cross entropies; the step divides it."""
        return head_loss(x, self.weight, targets, self.stripe_loss)


def rotary_table(positions: Tensor, config: ModelConfig) -> tuple[Tensor, Tensor]:
    """positions [..., S] -> cos and sin, [..., S, D] in float32: how far each pair is turned."""
    D = config.head_dim
    exponents = torch.arange(0, D, 2, device=positions.device, dtype=torch.float32) / D
    frequencies = 1.0 / config.rope_theta**exponents
    if scaling := config.rope_scaling:
        # turns within the original context: slow frequencies make few, and are stretched
        turns = scaling.original_max_position_embeddings / (2 * math.pi / frequencies)
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        keep = ((turns - low) / (high - low)).clamp(0, 1)
        frequencies = keep * frequencies + (1 - keep) * frequencies / scaling.factor
    angles = positions.float()[..., None] * frequencies  # no buffer to cut, cast or initialise
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)  # both halves; signs for `rotate`
