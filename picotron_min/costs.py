"""Costs: parameters, and FLOPs per token, as formulas over the model's shape.

    per token: a matmul parameter    2 FLOPs forward   4 backward   (Kaplan et al. 2020, sec. 2.1)
               a layer's attention   2 S Q D           4 S Q D      (half of the pairs: causal)

E hidden size, Q query heads, K key-value heads, D head dimension, M MLP size, V vocabulary,
L layers, S sequence length. Standard library only, so that a run can be planned anywhere.
"""

import math
from functools import cache

from picotron_min.layout import Layout
from picotron_min.model_config import ModelConfig


def parameter_count(model_config: ModelConfig) -> int:
    """All parameters; tied embeddings count once."""
    return sum(math.prod(shape) for shape in model_config.parameter_shapes().values())


def layer_flops(model_config: ModelConfig, seq_length: int, layer: int) -> dict[str, int]:
    """Forward FLOPs per token of a layer's parts: 2 for each parameter, and attention's own."""
    c, D, E = model_config, model_config.head_dim, model_config.hidden_size
    QD, KD = c.num_attention_heads * D, c.num_key_value_heads * D
    parts = {
        "q, k, v": 2 * E * (QD + 2 * KD),
        "attention": 4 * seq_length * QD // 2,  # q k^T and the weighted sum of v, causal half
        "o": 2 * QD * E,
    }
    products = c.mlp_parameters(layer).items()
    return parts | {name: 2 * parameters for name, parameters in products}


def flops_of_layers(model_config: ModelConfig, seq_length: int) -> list[dict[str, int]]:
    """layer_flops of every layer."""
    _refuse_uncounted(model_config)
    layers = range(model_config.num_layers)
    return [layer_flops(model_config, seq_length, layer) for layer in layers]


@cache
def _refuse_uncounted(c: ModelConfig) -> None:
    """ValueError if layers have matrices without a formula here: their FLOPs would be missing."""
    for layer in range(c.num_layers):
        shapes = (c.attention_shapes() | c.mlp_shapes(layer)).values()
        present = sum(math.prod(shape) for shape in shapes if len(shape) > 1)
        counted = sum(layer_flops(c, 0, layer).values()) // 2 + c.idle_parameters(layer)
        if present != counted:
            why = f"{present} parameters in matrices, and the FLOPs of {counted} are counted"
            raise ValueError(f"layer {layer} has {why}: add a formula for the others to costs.py")


def model_flops_per_token(model_config: ModelConfig, seq_length: int) -> int:
    """FLOPs of forward and backward, as if nothing were computed twice: the M of MFU."""
    layers = sum(sum(parts.values()) for parts in flops_of_layers(model_config, seq_length))
    return 3 * (layers + head_flops(model_config))


def head_flops(c: ModelConfig) -> int:
    """Forward FLOPs per token of all uses of lm_head."""
    return 2 * c.vocab_size * c.hidden_size * (1 + c.num_layers - c.num_hidden_layers)


def layers_of_stages(model_config: ModelConfig, layout: Layout, seq_length: int) -> list[int]:
    """How many layers each pipeline stage has: as given, or so that the slowest is least slow."""
    L = model_config.num_hidden_layers
    if layout.pp_layers or layout.num_stages == 1:
        num_layers = list(layout.pp_layers or [L])
    else:
        # Backward costs twice as much everywhere, so forward is enough to compare stages. The last
        # one also has what follows: the norm, lm_head; the embedding of the first is a lookup.
        flops = [sum(parts.values()) for parts in flops_of_layers(model_config, seq_length)]
        num_layers = layout.split(flops[:L], head=sum(flops[L:]) + head_flops(model_config))
    num_layers[-1] += model_config.num_layers - L
    return num_layers
