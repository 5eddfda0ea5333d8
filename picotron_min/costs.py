"""Costs: parameters, and FLOPs per token, as formulas over the model's shape.

    per token: a matmul parameter    2 FLOPs forward   4 backward   (Kaplan et al. 2020, sec. 2.1)
               a layer's attention   2 S Q D           4 S Q D      (half of the pairs: causal)

E hidden size, Q query heads, K key-value heads, D head dimension, M MLP size, V vocabulary,
L layers, S sequence length. Standard library only, so that a run can be planned anywhere.
"""

import math

from picotron_min.layout import Layout
from picotron_min.model_config import ModelConfig


def parameter_count(model_config: ModelConfig) -> int:
    """All parameters; tied embeddings count once."""
    return sum(math.prod(shape) for shape in model_config.parameter_shapes().values())


def active_parameter_count(model_config: ModelConfig) -> int:
    """The parameters that a token uses."""
    shapes = model_config.parameter_shapes().values()
    norms = sum(math.prod(shape) for shape in shapes if len(shape) == 1)
    embedding = 0 if model_config.tie_word_embeddings else model_config.vocab_size
    return matmul_parameters(model_config) + norms + embedding * model_config.hidden_size


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
    layers = range(model_config.num_hidden_layers)
    return [layer_flops(model_config, seq_length, layer) for layer in layers]


def model_flops_per_token(model_config: ModelConfig, seq_length: int) -> int:
    """FLOPs of forward and backward, as if nothing were computed twice: the M of MFU."""
    layers = sum(sum(parts.values()) for parts in flops_of_layers(model_config, seq_length))
    return 3 * (layers + 2 * model_config.vocab_size * model_config.hidden_size)  # with lm_head


def matmul_parameters(model_config: ModelConfig) -> int:
    """Parameters that every token is multiplied with: not the embedding, which is a lookup."""
    return model_flops_per_token(model_config, seq_length=0) // 6


def layers_of_stages(model_config: ModelConfig, layout: Layout, seq_length: int) -> list[int]:
    """How many layers each pipeline stage has: as given, or so that the slowest is fastest.

    lm_head counts by its FLOPs; the embedding, a lookup, for nothing.
    """
    L, stages = model_config.num_hidden_layers, layout.num_stages
    if layout.pp_layers or stages == 1:
        return list(layout.pp_layers or [L])
    # Backward costs twice as much everywhere, so that forward is enough to compare stages.
    layers = [sum(parts.values()) for parts in flops_of_layers(model_config, seq_length)]
    head = 2 * model_config.vocab_size * model_config.hidden_size
    if len(set(layers)) > 1:
        return _split_unequal(layers, head, stages)
    # Equal layers: those that the last stage leaves are spread evenly.
    others, head = stages - 1, head / layers[0]
    choices = range(max(1, L // stages), 0, -1)  # of the last stage
    last = min(choices, key=lambda n: max(n + head, math.ceil((L - n) / others)))
    return [(L - last) // others + (s < (L - last) % others) for s in range(others)] + [last]


def _split_unequal(layers: list[int], head: int, stages: int) -> list[int]:
    """The split of layers with these FLOPs, some without experts, whose slowest stage is fastest.

    From the last stage on, each takes what fits below a limit, the lowest with which all layers
    find a place. The first stage, which keeps the most micro-batches alive, has what is left.
    """

    def fill(limit: int) -> list[int]:  # empty: it is too low
        numbers, left = [], len(layers)
        for stage in reversed(range(stages)):
            load, first = head * (stage == stages - 1) + layers[left - 1], left - 1
            while first > stage and load + layers[first - 1] <= limit:  # one is for each before it
                first -= 1
                load += layers[first]
            if load > limit:
                return []
            numbers.insert(0, left - first)
            left = first
        return numbers if not left else []

    # What fits below a limit also fits below a higher one: halve the range between two of them.
    low, high = 0, sum(layers) + head  # one that is too low, and one that is enough
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fill(middle) else (middle, high)
    return fill(high)
