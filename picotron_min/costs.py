"""What training costs, as formulas over the model's shape: FLOPs per token and bytes per rank.

    per token: a matmul parameter    2 FLOPs forward   4 backward   (Kaplan et al. 2020, sec. 2.1)
               a layer's attention   2 S Q D           4 S Q D      (half of the pairs: causal)

E hidden size, Q query heads, K key-value heads, D head dimension, M MLP size, V vocabulary, L
layers, S sequence length. Standard library only, so that a run can be planned anywhere.
"""

import math
from itertools import accumulate
from typing import NamedTuple

from picotron_min.layout import STRIPE_ROWS, Layout, Workload
from picotron_min.model_config import ModelConfig
from picotron_min.pipeline_schedule import SCHEDULES, stages_of
from picotron_min.placement import (
    lay_out,
    matrices_of_layer,
    part,
    placements,
    saved_name,
    windows,
)

BYTES = {"float64": 8, "float32": 4, "bfloat16": 2}


def parameter_count(model_config: ModelConfig) -> int:
    """All parameters; tied embeddings count once."""
    return sum(math.prod(shape) for shape in model_config.parameter_shapes().values())


def layer_flops(model_config: ModelConfig, seq_length: int) -> dict[str, int]:
    """Forward FLOPs per token of a layer's parts: 2 for each parameter, and attention's own."""
    E, QD, KD, M = _sizes(model_config)
    return {
        "q, k, v": 2 * E * (QD + 2 * KD),
        "attention": 4 * seq_length * QD // 2,  # q k^T and the weighted sum of v, causal half
        "o": 2 * QD * E,
        "gate, up": 4 * E * M,
        "down": 2 * M * E,
    }


def _sizes(model_config: ModelConfig) -> tuple[int, int, int, int]:
    """E, Q D, K D and M."""
    c, D = model_config, model_config.head_dim
    return c.hidden_size, c.num_attention_heads * D, c.num_key_value_heads * D, c.intermediate_size


def model_flops_per_token(model_config: ModelConfig, seq_length: int) -> int:
    """FLOPs of forward and backward, as if nothing were computed twice: the M of MFU."""
    layers = model_config.num_hidden_layers * sum(layer_flops(model_config, seq_length).values())
    return 3 * (layers + 2 * model_config.vocab_size * model_config.hidden_size)  # with lm_head


def matmul_parameters(model_config: ModelConfig) -> int:
    """Parameters that every token is multiplied with: not the embedding, which is a lookup."""
    return model_flops_per_token(model_config, seq_length=0) // 6


def common_flops_per_token(model_config: ModelConfig, seq_length: int) -> int:
    """6 N + 12 L Q D S of most projects: the embedding and all pairs count (PaLM, appendix B)."""
    pairs = 2 * model_config.num_hidden_layers * layer_flops(model_config, seq_length)["attention"]
    return 6 * parameter_count(model_config) + 3 * pairs


def hardware_flops_per_token(model_config: ModelConfig, seq_length: int, recompute: str) -> int:
    """model_flops_per_token plus what `recompute` makes backward run again: the H of HFU."""
    parts = layer_flops(model_config, seq_length)
    # torch's checkpoint stops as soon as the last tensor that backward needs exists. A linear needs
    # its input, not its output, so the last linear of the part is not run again. What fused
    # attention repeats inside its own backward is not counted, as is usual.
    again = {
        "none": 0,
        "selective": parts["q, k, v"] + parts["attention"],
        "full": sum(parts.values()) - parts["down"],
    }[recompute]
    return model_flops_per_token(model_config, seq_length) + model_config.num_hidden_layers * again


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

    Not counted: temporaries of the optimizer and of collectives, statistics of norms and attention,
    the [S, S] matrices of attention that is not fused, the allocator's slack, and torch itself.
    """
    args = model_config, layout, workload, device
    return max((_memory_of(rank, *args) for rank in range(layout.pp)), key=sum)


def _memory_of(
    rank: int, model_config: ModelConfig, layout: Layout, workload: Workload, device: str
) -> RankMemory:
    dtype, recompute, tp, chunks = workload.dtype, workload.recompute, layout.tp, layout.pp_chunks
    wide = max(BYTES["float32"], BYTES[dtype])  # bytes of a parameter, and of the residual stream
    narrow = BYTES["bfloat16"] if dtype == "bfloat16" else 0  # of the copies to compute with
    E, V = model_config.hidden_size, model_config.vocab_size
    stages = stages_of(layout.pp_engine, rank, layout.pp, chunks)
    num_layers = layers_of_stages(model_config, layout, workload.seq_length)
    layers = sum(num_layers[stage] for stage in stages)
    first, last = 0 in stages, layout.num_stages - 1 in stages

    # tp divides matrices, not norms; dp and cp divide nothing without sharding.
    matrices = sum(layer_flops(model_config, seq_length=0).values()) / 2  # parameters of a layer
    hidden = layers * matrices / tp
    head = last * V * E / tp
    shares_head = last and model_config.tie_word_embeddings  # otherwise both ends have a copy
    lookup = V * E / tp if first and not shares_head else 0
    norms = layers * 2 * E + last * E
    rows = buffer_rows(model_config, layout, num_layers, stages)
    held = _held(hidden, head + lookup, norms, rows, layout, workload)

    tokens = workload.micro_batch_size * workload.seq_length // layout.cp
    live_activations = SCHEDULES[layout.pp_engine].live_activations  # each of one chunk
    live = live_activations(rank, layout.pp, workload.num_micro_batches, chunks) / chunks
    saved = saved_per_token(model_config, dtype, recompute, layout)

    # Backward runs a part of one layer again at a time...
    everything = saved_per_token(model_config, dtype, "none", layout)
    layer = tokens * (everything - (0 if recompute == "full" else saved))
    # ... when the logits of the last stripe of tokens, which become their gradient, and their cast
    # are gone: so only the larger of both counts. (lm_head's copy would go, too; it is counted.)
    logits = last * V / tp * (wide + narrow) * min(STRIPE_ROWS[device], tokens)
    logits, layer = (logits, 0) if logits > layer else (0, layer)
    # The gradients of lm_head and of its input are made along with the loss, and kept.
    made = live * (wide * head + last * E * BYTES[dtype] * tokens)
    return RankMemory(
        weights=held[0] + math.ceil(narrow * head),
        gradients=held[1],
        optimizer_state=held[2],
        activations=math.ceil(tokens * live * (layers * saved + last * 2 * wide * E) + layer),
        loss=math.ceil(made + logits),
    )


def _held(
    hidden: float,
    others: float,
    norms: int,
    rows: tuple[list[int], list[int]] | None,
    layout: Layout,
    workload: Workload,
) -> tuple[int, int, int]:
    """Bytes of weights, gradients and optimizer state, of so many elements after tp."""
    wide, n = max(BYTES["float32"], BYTES[workload.dtype]), layout.dp * layout.cp
    moments = 2 * (BYTES["bfloat16"] if workload.moments == "bfloat16" else wide)
    states = {"adamw": (moments, moments), "muon": (wide, moments), "sgd": (0, 0)}
    of_hidden, of_others = states[workload.optimizer]  # bytes an element
    whole, narrow = math.ceil(hidden + others + norms), BYTES[workload.dtype]
    if not rows:
        copies = math.ceil(hidden * narrow) if narrow < wide else 0
        state = math.ceil(of_hidden * hidden + of_others * (whole - hidden))
        return wide * whole + copies, wide * whole, state
    layers, ends = rows
    owned, largest = sum(layers) + sum(ends) + norms, n * max(layers + ends)
    weights = math.ceil(narrow * hidden + wide * (others + owned))
    gradients = wide * (n * (owned - norms) + norms)
    if layout.sharding in ("gradients", "parameters"):
        gradients = wide * (owned + 2 * largest)  # one buffer travels while another fills
    if layout.sharding == "parameters":  # a layer, and the next one or an end
        layer, end = n * max(layers) * narrow, n * max(ends, default=0) * wide
        weights = wide * owned + layer + max(layer, end)
    state = of_hidden * sum(layers) + of_others * (owned - sum(layers))
    return weights, gradients, state


def buffer_rows(
    model_config: ModelConfig, layout: Layout, num_layers: list[int], stages: list[int]
) -> tuple[list[int], list[int]] | None:
    """R of the sharded units of a rank's stages (see sharding.py): of layers, and of other ones."""
    if layout.sharding == "none" or layout.dp * layout.cp == 1:
        return None
    shapes, tied = model_config.parameter_shapes(), model_config.tie_word_embeddings
    table = placements(shapes, layout, tied, num_layers)
    ends = list(accumulate(num_layers))

    def row(names: list[str]) -> int:
        cut = {n: part(shapes[n], table[n].cuts, {"tp": 0}, {"tp": layout.tp}) for n in names}
        local = {n: [s.stop - s.start for s in slices] for n, slices in cut.items()}
        return lay_out(local, {n: table[n].shard for n in names}, layout.dp * layout.cp)[1]

    of_layers = [
        row([name for i in window for name in matrices_of_layer(i, shapes)])
        for s in stages
        for window in windows(range(ends[s] - num_layers[s], ends[s]), shapes, layout)
    ]
    others = {"model.embed_tokens.weight"} if 0 in stages else set()
    others |= {saved_name("lm_head.weight", tied)} if layout.num_stages - 1 in stages else set()
    return of_layers, [row([name]) for name in others]


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

    lm_head counts for as many layers as its FLOPs are worth; the embedding, a lookup, for none.
    """
    L, others = model_config.num_hidden_layers, layout.num_stages - 1
    if layout.pp_layers or not others:
        return list(layout.pp_layers or [L])
    layer = sum(layer_flops(model_config, seq_length).values())
    head = 2 * model_config.vocab_size * model_config.hidden_size / layer
    choices = range(max(1, L // layout.num_stages), 0, -1)  # of the last stage
    last = min(choices, key=lambda n: max(n + head, math.ceil((L - n) / others)))
    return [(L - last) // others + (s < (L - last) % others) for s in range(others)] + [last]
