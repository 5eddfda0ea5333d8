"""What training costs, as formulas over the model's shape: FLOPs per token and bytes per rank.

    per token: a matmul parameter    2 FLOPs forward   4 backward   (Kaplan et al. 2020, sec. 2.1)
               a layer's attention   2 S Q D           4 S Q D      (half of the pairs: causal)

E hidden size, Q query heads, K key-value heads, D head dimension, M MLP size, V vocabulary, L
layers, S sequence length. Standard library only, so that a run can be planned anywhere.
"""

import math
from typing import NamedTuple

from picotron_min.layout import STRIPE_ROWS, Layout, Workload
from picotron_min.model_config import ModelConfig
from picotron_min.pipeline_schedule import SCHEDULES, stages_of

BYTES = {"float64": 8, "float32": 4, "bfloat16": 2}
OPTIMIZER_MOMENTS = {"adamw": 2, "sgd": 0}


def parameter_count(model_config: ModelConfig) -> int:
    """All parameters; tied embeddings count once."""
    return sum(math.prod(shape) for shape in model_config.parameter_shapes().values())


def matmul_parameters(model_config: ModelConfig) -> int:
    """Parameters that every token is multiplied with: not the embedding, which is a lookup."""
    head = model_config.vocab_size * model_config.hidden_size  # also where its weight is tied
    return model_config.num_hidden_layers * _layer_matrices(model_config) + head


def model_flops_per_token(model_config: ModelConfig, seq_length: int) -> int:
    """FLOPs of forward and backward, as if nothing were computed twice: the M of MFU."""
    attention = model_config.num_hidden_layers * _attention_flops(model_config, seq_length)
    return 6 * matmul_parameters(model_config) + 3 * attention


def common_flops_per_token(model_config: ModelConfig, seq_length: int) -> int:
    """6 N + 12 L Q D S, by which most projects report MFU: the embedding and all pairs count.

    Source: Chowdhery et al. 2022, "PaLM", appendix B, which writes 6 N + 12 L H Q T.
    """
    pairs = 2 * model_config.num_hidden_layers * _attention_flops(model_config, seq_length)
    return 6 * parameter_count(model_config) + 3 * pairs


def hardware_flops_per_token(
    model_config: ModelConfig, seq_length: int, recompute: str = "none"
) -> int:
    """model_flops_per_token plus what `recompute` makes backward run again: the H of HFU."""
    E, QD, KD, M = _sizes(model_config)
    # torch's checkpoint stops as soon as the last tensor that backward needs exists. A linear needs
    # its input, not its output, so the last linear of the part is not run again. What fused
    # attention repeats inside its own backward is not counted, as is usual.
    repeated = {
        "none": 0,
        "selective": E * QD + 2 * E * KD,  # q, k, v; and attention, below
        "full": _layer_matrices(model_config) - E * M,  # all but down_proj
    }[recompute]
    again = 2 * repeated + (_attention_flops(model_config, seq_length) if repeated else 0)
    return model_flops_per_token(model_config, seq_length) + model_config.num_hidden_layers * again


def _sizes(model_config: ModelConfig) -> tuple[int, int, int, int]:
    """E, Q D, K D and M."""
    c, D = model_config, model_config.head_dim
    return c.hidden_size, c.num_attention_heads * D, c.num_key_value_heads * D, c.intermediate_size


def _layer_matrices(model_config: ModelConfig) -> int:
    """Parameters of q, o, of k, v, and of gate, up, down."""
    E, QD, KD, M = _sizes(model_config)
    return 2 * E * QD + 2 * E * KD + 3 * E * M


def _attention_flops(model_config: ModelConfig, seq_length: int) -> int:
    """Forward FLOPs per token and layer of q k^T and of the weighted sum of v, causal half."""
    return 4 * _sizes(model_config)[1] * seq_length // 2


class RankMemory(NamedTuple):
    """Bytes that one rank needs at the fullest moment of a step."""

    weights: int
    gradients: int
    optimizer_state: int
    activations: int
    loss: int

    @property
    def total(self) -> int:
        return sum(self)


def memory_per_rank(
    model_config: ModelConfig, layout: Layout, workload: Workload, device: str = "cuda"
) -> RankMemory:
    """The memory of the pipeline rank that needs most.

    Not counted: temporaries of the optimizer and of collectives, statistics of norms and attention
    (a few numbers a token), the [S, S] matrices of attention that is not fused, the allocator's
    slack, and torch and its libraries themselves.
    """
    args = model_config, layout, workload, device
    return max((_memory_of(rank, *args) for rank in range(layout.pp)), key=lambda m: m.total)


def _memory_of(
    rank: int, model_config: ModelConfig, layout: Layout, workload: Workload, device: str
) -> RankMemory:
    dtype, recompute, tp, chunks = workload.dtype, workload.recompute, layout.tp, layout.pp_chunks
    wide = max(BYTES["float32"], BYTES[dtype])  # bytes of a parameter, and of the residual stream
    narrow = BYTES["bfloat16"] if dtype == "bfloat16" else 0  # of the copies to compute with
    E, V = model_config.hidden_size, model_config.vocab_size
    stages = stages_of(layout.pp_engine, rank, layout.pp, chunks)
    layers_of_stage = layers_of_stages(model_config, layout, workload.seq_length)
    layers = sum(layers_of_stage[stage] for stage in stages)
    first, last = 0 in stages, layout.num_stages - 1 in stages

    # tp divides matrices, not norms; dp and cp divide nothing.
    matmul = (layers * _layer_matrices(model_config) + last * V * E) / tp
    shares_head = last and model_config.tie_word_embeddings  # otherwise both ends have a copy
    lookup = V * E / tp if first and not shares_head else 0
    parameters = math.ceil(matmul + lookup + layers * 2 * E + last * E)

    tokens = workload.micro_batch_size * workload.seq_length // layout.cp
    live_activations = SCHEDULES[layout.pp_engine].live_activations  # each of one chunk
    live = live_activations(rank, layout.pp, workload.num_micro_batches, chunks) / chunks
    saved = saved_per_token(model_config, dtype, recompute, layout)
    last_norm = last * 2 * wide * E

    # Backward runs a part of one layer again at a time...
    everything = saved_per_token(model_config, dtype, "none", layout)
    layer = tokens * (everything - (0 if recompute == "full" else saved))
    # ... when the logits of the last stripe of tokens, which become their gradient, and their cast
    # are gone: so only the larger of both counts. (lm_head's copy would go, too; it is counted.)
    logits = last * V / tp * (wide + narrow) * min(STRIPE_ROWS[device], tokens)
    logits, layer = (logits, 0) if logits > layer else (0, layer)
    # The gradients of lm_head and of its input are made along with the loss, and kept.
    head = last * live * E * (wide * V / tp + BYTES[dtype] * tokens)
    return RankMemory(
        weights=wide * parameters + math.ceil(narrow * matmul),
        gradients=wide * parameters,
        optimizer_state=OPTIMIZER_MOMENTS[workload.optimizer] * wide * parameters,
        activations=math.ceil(tokens * live * (layers * saved + last_norm) + layer),
        loss=math.ceil(head + logits),
    )


def saved_per_token(model_config: ModelConfig, dtype: str, recompute: str, layout: Layout) -> float:
    """Bytes that the forward of one layer keeps for backward, per token.

    recompute   wide (float32, or float64)          in the compute dtype
    none        4 E: 2 x a norm's input, and it     2 E norms' outputs + 2 Q D q, attention's output
                normalised (fused on a GPU: 2 E)    + 2 K D k, v + 4 M gate, up, silu, product
    selective   4 E                                 2 E + 4 M
    full        1 E: the layer's input              nothing
    """
    E, QD, KD, M = _sizes(model_config)
    wide, narrow = max(BYTES["float32"], BYTES[dtype]), BYTES[dtype]
    split = layout.tp if layout.sequence_parallel else 1  # of what is wide
    if recompute == "full":
        return wide * E / split
    heads = 2 * QD + 2 * KD if recompute == "none" else 0
    # Norms' outputs are whole: a projection keeps its input as the all-gather has made it.
    return wide * 4 * E / split + narrow * (2 * E + (heads + 4 * M) / layout.tp)


def layers_of_stages(model_config: ModelConfig, layout: Layout, seq_length: int) -> list[int]:
    """How many layers each pipeline stage has: as given, or so that the slowest is fastest.

    lm_head counts for as many layers as its FLOPs are worth, and may leave the last stage with
    fewer than the others. The embedding is a lookup and counts nothing.
    """
    L, others = model_config.num_hidden_layers, layout.num_stages - 1
    if layout.pp_layers or not others:
        return list(layout.pp_layers or [L])
    layer = 2 * _layer_matrices(model_config) + _attention_flops(model_config, seq_length)
    head = 2 * model_config.vocab_size * model_config.hidden_size / layer

    def slowest(last: int) -> float:
        return max(last + head, math.ceil((L - last) / others))

    last = min(range(max(1, L // layout.num_stages), 0, -1), key=slowest)
    return [(L - last) // others + (s < (L - last) % others) for s in range(others)] + [last]
