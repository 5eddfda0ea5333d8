"""How many bytes training needs on a rank, as formulas over the model's shape.

    weights, gradients, optimizer state    what the placement table leaves to a rank
    activations                            what forward keeps of each token: activations.py
    loss                                   logits, and the gradients that are made along with it

E hidden size, Q query heads, K key-value heads, D head dimension, M MLP size, V vocabulary; X
experts of size F, k of them for each token. Standard library only, so that a run can be planned
anywhere.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, chain, islice
from operator import sub
from typing import NamedTuple

from picotron_min.costs import layers_of_stages
from picotron_min.extensions.schedules.registry import SCHEDULES
from picotron_min.extensions.settings import LEAST_OFFLOAD, Layout, ModelConfig, Workload
from picotron_min.extensions.sharding.rows import lay_out, shard_of, windows
from picotron_min.layout import STRIPE_ROWS
from picotron_min.pipeline_schedule import peak_live, stages_of
from picotron_min.placement import Placement, part, placements, saved_name
from picotron_min.planner.activations import BYTES, factors_per_token, saved_per_token


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
    """The memory of the pipeline rank that needs most, if tokens use all experts alike.

    Not counted: temporaries of the optimizer and of collectives, statistics of norms and attention,
    the numbers of the experts that tokens use, the [S, S] matrices of attention that is not fused,
    the allocator's slack, and torch itself.
    """
    return max(memory_of_ranks(model_config, layout, workload, device), key=sum)


def memory_of_ranks(
    model_config: ModelConfig, layout: Layout, workload: Workload, device: str = "cuda"
) -> list[RankMemory]:
    """The memory of each pipeline rank."""
    shares = shares_of_ranks(model_config, layout, workload.seq_length)
    sizes = model_config, layout, workload, device
    return [_memory_of(rank, share, *sizes) for rank, share in enumerate(shares)]


class Share(NamedTuple):
    """What a pipeline rank has of the model, where it is the first rank along all other axes.

    Elements are those that it computes with: of "hidden" matrices, of the "ends", and the "rest".
    """

    stages: list[range]  # of layers
    has_head: bool
    whole: Counter[str]  # elements that its optimizer has, too
    sharded: Counter[str]  # elements of which its optimizer has a part: see sharding/units.py
    windows: list[dict[str, int]]  # by axis, R of the units of each window of layers
    ends: list[dict[str, int]]  # and of those of the embedding and of lm_head

    @property
    def layers(self) -> list[int]:
        return list(chain(*self.stages))


ENDS = ("model.embed_tokens.weight", "lm_head.weight")


def shares_of_ranks(model_config: ModelConfig, layout: Layout, seq_length: int) -> list[Share]:
    """The share of each pipeline rank."""
    shapes, tied = model_config.parameter_shapes(), model_config.tie_word_embeddings
    num_layers = layers_of_stages(model_config, layout, seq_length)
    table = placements(shapes, layout, tied, num_layers)
    local, names, stops = _local_shapes(shapes, table, layout), {}, [0, *accumulate(num_layers)]
    for name in (name for name in shapes if ".layers." in name):
        names.setdefault(int(name.split(".")[2]), []).append(name)  # of each layer
    shares = []
    for rank in range(layout.pp):
        stages = stages_of(layout.schedule, rank, layout.pp, layout.pp_chunks)
        layers = [range(stops[stage], stops[stage + 1]) for stage in stages]
        groups = [window for of_stage in layers for window in windows(of_stage, shapes, layout)]
        has_head = layout.num_stages - 1 in stages
        ends = {ENDS[0]} if 0 in stages else set()
        ends |= {saved_name(ENDS[1], tied)} if has_head else set()  # the same matrix, if tied
        norm = ["model.norm.weight"] if has_head else []
        together = [[name for layer in group for name in names[layer]] for group in groups]
        together_ends = [[name] for name in sorted(ends)]
        share = Share(
            layers,
            has_head,
            *_count([*chain(*together, *together_ends), *norm], local, table),
            windows=[_rows(group, local, table, layout) for group in together],
            ends=[_rows(group, local, table, layout) for group in together_ends],
        )
        shares.append(share)
    return shares


Shapes = Mapping[str, Sequence[int]]


def _local_shapes(shapes: Shapes, table: Mapping[str, Placement], layout: Layout) -> Shapes:
    """The part of each parameter that a rank computes with: nothing of other ranks' experts."""
    size = layout.axis_sizes
    rank = dict.fromkeys(size, 0)
    parts = {name: part(shape, table[name].cuts, rank, size) for name, shape in shapes.items()}
    return {name: [s.stop - s.start for s in slices] for name, slices in parts.items()}


def _count(
    names: Iterable[str], local: Shapes, table: Mapping[str, Placement]
) -> tuple[Counter[str], Counter[str]]:
    """Elements of these parameters by kind: of those that are whole, and of those sharded."""
    whole, sharded = Counter(), Counter()
    for name in names:
        kind = "hidden" if table[name].is_hidden_matrix else "ends" if name in ENDS else "rest"
        (sharded if shard_of(table[name]) else whole)[kind] += math.prod(local[name])
    return whole, sharded


def _rows(
    names: Iterable[str], local: Shapes, table: Mapping[str, Placement], layout: Layout
) -> dict[str, int]:
    """R of the buffers [n, R] in which these matrices travel, for each axis that shards any."""
    by_axis = defaultdict(dict)
    for name in names:
        if shard_of(table[name]) and math.prod(local[name]):
            # Experts are sharded over fewer ranks than the other matrices of their layer.
            by_axis[shard_of(table[name]).axis][name] = local[name]
    rows = {}
    for axis, matrices in by_axis.items():
        shards = {name: shard_of(table[name]) for name in matrices}
        rows[axis] = lay_out(matrices, shards, layout.axis_sizes[axis])[1]
    return rows


def _held(share: Share, layout: Layout, workload: Workload) -> tuple[int, int, int]:
    """Bytes of weights, gradients and optimizer state."""
    wide, narrow = max(BYTES["float32"], BYTES[workload.dtype]), BYTES[workload.dtype]
    moments = 2 * (BYTES["bfloat16"] if workload.moments == "bfloat16" else wide)
    states = {"adamw": (moments, moments), "muon": (wide, moments), "sgd": (0, 0)}
    of_hidden, of_others = states[workload.optimizer]  # bytes an element
    hidden, others = share.whole["hidden"], share.whole["ends"] + share.whole["rest"]
    copies = narrow * hidden if narrow < wide else 0  # to compute with

    def elements(units: Iterable[dict[str, int]]) -> list[int]:  # of their buffers [n, R]
        return [sum(layout.axis_sizes[axis] * R for axis, R in of.items()) for of in units]

    # Of what is sharded, a rank's optimizer has R elements of each unit. What it computes with, and
    # the gradients of that, are whole unless the kind of sharding is for them, too.
    units = [{axis: R} for of in (*share.windows, *share.ends) for axis, R in of.items()]
    of_layers = sum(R for of in share.windows for R in of.values())
    owned = sum(R for of in units for R in of.values())
    weights = narrow * share.sharded["hidden"] + wide * share.sharded["ends"]
    gradients = sum(elements(units))
    if layout.sharding in ("gradients", "parameters"):  # one buffer travels while another fills
        gradients = owned + 2 * max(elements(units), default=0)
    if layout.sharding == "parameters":  # a layer, and the next one or an end
        layer = narrow * max(elements(share.windows), default=0)
        weights = layer + max(layer, wide * max(elements(share.ends), default=0))
    return (
        wide * (hidden + others + owned) + copies + weights,
        wide * (hidden + others + gradients),
        of_hidden * (hidden + of_layers) + of_others * (others + owned - of_layers),
    )


def _offloaded(
    share: Share, each: Iterable[float], layer_input: float, num_layers: int
) -> tuple[float, float]:
    """Bytes per token that leave for the host, and those on their way at the fullest moment."""
    moved, on_their_way, each = 0, 0, iter(each)
    for stage in share.stages:
        saved = list(islice(each, len(stage)))
        leave = saved[:num_layers]
        if leave and stage[0] > 0:
            leave[0] -= layer_input  # it came from another stage, and stays: see memory/offload.py
        moved += sum(leave)
        # Two offloaded layers are here at a time, when what other layers save is not yet, or gone.
        stay = sum(saved) - sum(leave)
        on_their_way = max(on_their_way, 2 * max(leave, default=0) - stay)
    return moved, on_their_way


def _in_fp8(share: Share, c: ModelConfig, layout: Layout, workload: Workload) -> int:
    """Bytes of W and its transpose in 8 bits, beyond the copies in bfloat16 that they replace."""
    heads = 2 * c.head_dim * (c.num_attention_heads + c.num_key_value_heads)
    shared = c.n_shared_experts * c.moe_intermediate_size

    def of_layer(i: int) -> int:
        inner = shared if c.has_experts(i) else c.intermediate_size
        fp8 = workload.in_fp8(i, c.num_hidden_layers)
        return fp8 * 2 * c.hidden_size * (heads + 3 * inner) // layout.tp

    layers = [of_layer(i) for i in share.layers]
    if layout.sharding == "parameters":  # of the window that computes
        return max(layers) * math.ceil(len(layers) / len(share.windows))
    replaced = workload.dtype == "bfloat16" and layout.sharding == "none"
    return 0 if replaced else sum(layers)


def _memory_of(
    rank: int,
    share: Share,
    model_config: ModelConfig,
    layout: Layout,
    workload: Workload,
    device: str,
) -> RankMemory:
    dtype, recompute, tp, chunks = workload.dtype, workload.recompute, layout.tp, layout.pp_chunks
    wide = max(BYTES["float32"], BYTES[dtype])  # bytes of a parameter, and of the residual stream
    narrow = BYTES["bfloat16"] if dtype == "bfloat16" else 0  # of the copies to compute with
    E, V = model_config.hidden_size, math.ceil(model_config.vocab_size / tp)
    held, last = _held(share, layout, workload), share.has_head

    tokens = workload.micro_batch_size * workload.seq_length // layout.cp
    fp8 = {i: workload.in_fp8(i, model_config.num_hidden_layers) for i in share.layers}
    shape = model_config, dtype
    each = [saved_per_token(*shape, recompute, layout, i, fp8[i]) for i in share.layers]
    layer_input = saved_per_token(*shape, "full", layout, 0)
    moves = device != "cpu" and tokens * layer_input >= LEAST_OFFLOAD
    moved, on_their_way = _offloaded(share, each, layer_input, workload.offload * moves)
    kept = sum(each) - moved
    schedule = SCHEDULES[layout.pp_engine]
    sizes = rank, layout.pp, workload.num_micro_batches, chunks
    live = losses = schedule.live_activations(*sizes) / chunks  # each is of one chunk
    if schedule.splits_backward:
        # From B to W only factors are left; recomputed, they are more than what forward has kept.
        factors = sum(factors_per_token(*shape, layout, i, fp8[i]) for i in share.layers)
        few = min(workload.num_micro_batches, 4 * layout.pp)  # more of them repeat what these do
        plan = schedule.plan(rank, layout.pp, few, chunks)
        live = peak_live(plan, held=factors / kept) / chunks
        losses = 1  # the last stage's B follows its F at once, and takes what the loss has kept
    everything = [saved_per_token(*shape, "none", layout, i, fp8[i]) for i in share.layers]

    # Backward runs a part of one layer again at a time...
    again = everything if recompute == "full" else map(sub, everything, each)
    layer = tokens * (max(again) + on_their_way)
    # ... when the logits of the last stripe of tokens, which become their gradient, and their cast
    # are gone: so only the larger of both counts. (lm_head's copy would go, too; it is counted.)
    logits = last * V * (wide + narrow) * min(STRIPE_ROWS[device], tokens)
    logits, layer = (logits, 0) if logits > layer else (0, layer)
    # The gradients of lm_head and of its input are made along with the loss, and kept.
    made = losses * last * E * (wide * V + BYTES[dtype] * tokens)
    return RankMemory(
        weights=held[0] + narrow * last * V * E + _in_fp8(share, model_config, layout, workload),
        gradients=held[1],
        optimizer_state=held[2],
        activations=math.ceil(tokens * (live * kept + losses * last * 2 * wide * E) + layer),
        loss=math.ceil(made + logits),
    )
