"""What training costs, as formulas over the model's shape: FLOPs per token and bytes per rank.

Standard library only, so that a run can be planned anywhere. Per token a matmul parameter costs
2 FLOPs forward and 4 backward (Kaplan et al. 2020, section 2.1); causal attention over S positions
costs 4 Q D S/2 a layer forward (two matmuls; half of the pairs are in the future) and twice that
backward.

E hidden size, Q query heads, K key-value heads, D head dimension, M MLP size, V vocabulary.
"""

import math
from dataclasses import dataclass

from picotron_min.layout import Layout, Workload
from picotron_min.model_config import ModelConfig
from picotron_min.pipeline_schedule import ENGINES, peak_live

BYTES = {"float64": 8, "float32": 4, "bfloat16": 2}
OPTIMIZER_MOMENTS = {"adamw": 2, "sgd": 0}
CHUNK_ROWS = {"cpu": 1024, "cuda": 4096}  # as in loss.py, which cannot be imported without torch


def parameter_count(model: ModelConfig) -> int:
    """All parameters; tied embeddings count once."""
    return sum(math.prod(shape) for shape in model.parameter_shapes().values())


def matmul_parameters(model: ModelConfig) -> int:
    """Parameters that every token is multiplied with.

    The embedding is a lookup, not a matmul; `lm_head` is one, also when it shares its weight.
    """
    return model.num_hidden_layers * _layer_matrices(model) + model.vocab_size * model.hidden_size


def model_flops_per_token(model: ModelConfig, seq_length: int) -> int:
    """FLOPs of forward and backward, as if nothing were computed twice: the M of MFU."""
    attention = model.num_hidden_layers * _attention_flops(model, seq_length)
    return 6 * matmul_parameters(model) + 3 * attention


def hardware_flops_per_token(model: ModelConfig, seq_length: int, recompute: str = "none") -> int:
    """The same plus what `recompute` makes backward run again: the H of HFU.

    torch's checkpoint stops once the last tensor that backward needs is there, and a linear needs
    its input, not its output. So the last linear of the part is not run again: "selective" repeats
    q, k, v and attention, "full" the layer but for down_proj. What fused attention repeats inside
    its own backward is not counted, as is usual.
    """
    E = model.hidden_size
    repeated = {
        "none": 0,
        "selective": E * _query_size(model) + 2 * E * _key_value_size(model),
        "full": _layer_matrices(model) - E * model.intermediate_size,
    }[recompute]
    again = 2 * repeated + (_attention_flops(model, seq_length) if repeated else 0)
    return model_flops_per_token(model, seq_length) + model.num_hidden_layers * again


def _layer_matrices(model: ModelConfig) -> int:
    """Parameters of q, k, v, o, and of gate, up, down."""
    E = model.hidden_size
    attention = 2 * E * _query_size(model) + 2 * E * _key_value_size(model)
    return attention + 3 * E * model.intermediate_size


def _attention_flops(model: ModelConfig, seq_length: int) -> int:
    """Forward FLOPs per token and layer of q k^T and of the weighted sum of v, causal half."""
    return 4 * _query_size(model) * seq_length // 2


def _query_size(model: ModelConfig) -> int:
    return model.num_attention_heads * model.head_dim


def _key_value_size(model: ModelConfig) -> int:
    return model.num_key_value_heads * model.head_dim


@dataclass(frozen=True)
class RankMemory:
    """Bytes that one rank needs at the fullest moment of a step."""

    weights: int
    gradients: int
    optimizer_state: int
    activations: int
    loss: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer_state + self.activations + self.loss


def memory_per_rank(
    model: ModelConfig, layout: Layout, workload: Workload, device: str = "cuda"
) -> RankMemory:
    """The memory of the pipeline rank that needs most.

    - weights, gradients: a float32 (float64 if that is the dtype) for each parameter of the rank;
      tp divides matrices, not norms; dp and cp divide nothing. Computing in bfloat16, there is
      also a copy of every matmul parameter, counted with the weights.
    - optimizer state: two more such numbers a parameter for AdamW, none for SGD.
    - activations: `saved_per_token` x layers of a stage (and 2 E for the norm before lm_head)
      x tokens of a micro-batch on this rank x what the schedule keeps alive at once; and, with
      recomputation, the one part of a layer that backward has just brought back.
    - loss: on the last stage, V/tp logits for CHUNK_ROWS tokens, which become their gradient, and
      its cast to bfloat16 if that is the dtype; and per live micro-batch the gradients of lm_head
      and of its input, made along with the loss.

    The logits are gone when a layer is brought back, so only the larger of both counts. (With it
    would go lm_head's copy; that stays counted.)

    Not counted: temporaries of the optimizer and of collectives, statistics of norms and attention
    (a few numbers a token), the [S, S] matrices of attention that is not fused, the allocator's
    slack, and torch and its libraries themselves.
    """
    pp, tp, dtype, recompute = layout.pp, layout.tp, workload.dtype, workload.recompute
    wide = max(BYTES["float32"], BYTES[dtype])  # parameters, residual stream, loss
    E, V = model.hidden_size, model.vocab_size
    tokens = workload.micro_batch_size * workload.seq_length // layout.cp
    saved, everything, selective = (
        saved_per_token(model, dtype, how, tp, layout.sequence_parallel)
        for how in (recompute, "none", "selective")
    )
    brought_back = {"none": 0, "selective": everything - selective, "full": everything}[recompute]
    last_norm = 2 * wide * E
    per_logit = wide + (BYTES[dtype] if dtype == "bfloat16" else 0)
    chunk = per_logit * min(CHUNK_ROWS[device], tokens)

    stages = layers_of_stages(model, layout, workload.seq_length)
    schedule = ENGINES[layout.pp_engine]

    def memory_of(rank: int) -> RankMemory:
        first, last = rank == 0, rank == pp - 1
        layers = sum(stages[rank::pp])
        matmul = (layers * _layer_matrices(model) + last * V * E) / tp
        shares_head = last and model.tie_word_embeddings  # with pp > 1 both ends have a copy
        lookup = V * E / tp if first and not shares_head else 0
        parameters = math.ceil(matmul + lookup + layers * 2 * E + last * E)
        plan = schedule(rank, pp, workload.num_micro_batches, layout.pp_chunks)
        live = peak_live(plan) / layout.pp_chunks  # each of one chunk, a part of the rank's layers
        logits, layer = last * V / tp * chunk, tokens * brought_back
        logits, layer = (logits, 0) if logits > layer else (0, layer)
        return RankMemory(
            weights=wide * parameters + (math.ceil(2 * matmul) if dtype == "bfloat16" else 0),
            gradients=wide * parameters,
            optimizer_state=OPTIMIZER_MOMENTS[workload.optimizer] * wide * parameters,
            activations=math.ceil(tokens * live * (layers * saved + last * last_norm) + layer),
            loss=math.ceil(last * live * E * (wide * V / tp + BYTES[dtype] * tokens) + logits),
        )

    return max((memory_of(rank) for rank in range(pp)), key=lambda memory: memory.total)


def saved_per_token(
    model: ModelConfig,
    dtype: str = "float32",
    recompute: str = "none",
    tp: int = 1,
    sequence_parallel: bool = False,
) -> float:
    """Bytes that the forward of one layer keeps for backward, per token.

    recompute   wide (float32, or float64)          in the compute dtype
    none        4 E: 2 x a norm's input, and it     2 E norms' outputs + 2 Q D q, attention's output
                normalised (fused on a GPU: 2 E)    + 2 K D k, v + 4 M gate, up, silu, product
    selective   4 E                                 2 E + 4 M
    full        1 E: the layer's input              nothing

    tp divides heads and MLP, and with sequence parallelism also what is wide; norms' outputs are
    kept whole, because a projection keeps its input as the all-gather gave it.
    """
    E, M = model.hidden_size, model.intermediate_size
    wide, narrow = max(BYTES["float32"], BYTES[dtype]), BYTES[dtype]
    split = tp if sequence_parallel else 1
    if recompute == "full":
        return wide * E / split
    heads = 0
    if recompute == "none":
        heads = 2 * _query_size(model) + 2 * _key_value_size(model)
    return wide * 4 * E / split + narrow * (2 * E + (heads + 4 * M) / tp)


def layers_of_stages(model: ModelConfig, layout: Layout, seq_length: int) -> list[int]:
    """How many layers each pipeline stage has: as given, or else balanced."""
    return list(layout.pp_layers or split_layers(model, seq_length, layout.num_stages))


def split_layers(model: ModelConfig, seq_length: int, num_stages: int) -> list[int]:
    """How many layers each pipeline stage gets, so that the slowest is as fast as can be.

    lm_head counts for as many layers as its FLOPs are worth, and may leave the last stage with
    fewer than the others. The embedding is a lookup and counts nothing.
    """
    if num_stages == 1:
        return [model.num_hidden_layers]
    L, others = model.num_hidden_layers, num_stages - 1
    layer = 2 * _layer_matrices(model) + _attention_flops(model, seq_length)
    head = 2 * model.vocab_size * model.hidden_size / layer

    def slowest(last: int) -> float:
        return max(last + head, math.ceil((L - last) / others))

    last = min(range(max(1, L // num_stages), 0, -1), key=slowest)
    return [(L - last) // others + (s < (L - last) % others) for s in range(others)] + [last]
