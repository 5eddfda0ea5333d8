"""How many bytes training needs on a rank, as formulas over the model's shape.

    weights, gradients, optimizer state    what the placement table leaves to a rank
    activations                            what forward keeps of each token: activations.py
    loss                                   logits, and the gradients that are made along with it

E hidden size, Q query heads, K key-value heads, D head dimension, M MLP size, V vocabulary. What
sharding, FP8, offloading and schedules that split backward add is each a term of its own. Standard
library only, so that a run can be planned anywhere.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import lru_cache
from itertools import chain, islice
from typing import NamedTuple

from picotron_min.extensions.schedules.simulator import peak_live
from picotron_min.extensions.settings import LEAST_OFFLOAD, Layout, ModelConfig, Workload
from picotron_min.layout import STRIPE_ROWS
from picotron_min.pipeline_schedule import Plan, Schedule
from picotron_min.planner.activations import (
    BYTES,
    WIDE,
    factors_of_depth,
    factors_per_token,
    saved_per_token,
)
from picotron_min.planner.parameters import LayerParameters, Share, share_of_rank


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


def gb(number: float) -> str:
    return f"{gigabytes(number)} GB"


def gigabytes(number: float) -> str:  # 72.3, and 0.0428 of a tiny model
    return f"{number / 1e9:.1f}" if number >= 1e9 else f"{number / 1e9:.3g}"


def memory_per_rank(
    model_config: ModelConfig, layout: Layout, workload: Workload, device: str = "cuda"
) -> RankMemory:
    """The memory of the pipeline rank that needs most, with as many rows of experts as may come.

    Not counted: temporaries of the optimizer and of collectives, statistics of norms and attention,
    the numbers of the experts that tokens use, the [S, S] matrices of attention that is not fused,
    the allocator's slack, and torch itself.
    """
    return max(memory_of_ranks(model_config, layout, workload, device), key=sum)


def memory_of_ranks(
    model_config: ModelConfig, layout: Layout, workload: Workload, device: str = "cuda"
) -> list[RankMemory]:
    """The memory of each pipeline rank."""
    shares = shares_of_ranks(model_config, of_parameters_alone(layout), workload.seq_length)
    return [
        _memory_of(rank, share, model_config, layout, workload, device)
        for rank, share in enumerate(shares)
    ]


def of_parameters_alone(layout: Layout) -> Layout:
    """A layout without what changes nothing about parameters, for caches."""
    return replace(layout, sequence_parallel=False, tp_overlap=False, cp_engine="ring")


@lru_cache(maxsize=1024)
def shares_of_ranks(model_config: ModelConfig, layout: Layout, seq_length: int) -> list[Share]:
    """What each pipeline rank has, where it is the first rank along all other axes."""
    first = dict.fromkeys(layout.axis_sizes, 0)
    places = (first | {"pp": rank} for rank in range(layout.pp))
    return [share_of_rank(model_config, layout, seq_length, place) for place in places]


def parameter_bytes(share: Share, layout: Layout, workload: Workload) -> dict[str, float]:
    """Bytes of weights, gradients and optimizer state, by these names."""
    wide, narrow = WIDE[workload.dtype], BYTES[workload.dtype]
    moments = 2 * (BYTES["bfloat16"] if workload.moments == "bfloat16" else wide)
    states = {"adamw": (moments, moments), "muon": (moments / 2, moments), "sgd": (0, 0)}
    of_hidden, of_others = states[workload.optimizer]  # bytes an element
    elements, owned, buffers = Counter(), Counter(), {False: [[]], True: [[]]}
    sizes = layout.axis_sizes
    for unit in share.units:
        elements.update(unit.elements)
        owned[unit.is_end] += sum(unit.rows.values())
        buffers[unit.is_end].append([sizes[axis] * R for axis, R in unit.rows.items()])  # [n, R]
    # What the optimizer has: all of what is whole, and of each sharded unit a row of its buffer.
    hidden, others = elements["hidden"] + owned[False], elements["others"] + owned[True]
    weights = wide * (hidden + others)
    weights += narrow * elements["hidden"] if narrow < wide else 0  # copies to compute with
    if layout.sharding == "parameters":  # of a layer, and of the next one or an end
        layer, end = (max(map(sum, buffers[is_end])) for is_end in (False, True))
        weights += narrow * layer + max(narrow * layer, wide * end)
    else:
        weights += narrow * elements["sharded_hidden"] + wide * elements["sharded_others"]
    of_units = list(chain(*buffers[False], *buffers[True]))
    gradients = elements["hidden"] + elements["others"]
    if layout.sharding in ("gradients", "parameters"):  # one buffer travels while another fills
        gradients += owned.total() + 2 * max(of_units, default=0)
    else:
        gradients += sum(of_units)
    states = of_hidden * hidden + of_others * others
    return {"weights": weights, "gradients": wide * gradients, "optimizer_state": states}


def _memory_of(
    rank: int, share: Share, c: ModelConfig, layout: Layout, work: Workload, device: str
) -> RankMemory:
    wide, cast = WIDE[work.dtype], BYTES["bfloat16"] if work.dtype == "bfloat16" else 0
    E, V = c.hidden_size, math.ceil(c.vocab_size / layout.tp)
    tokens = work.micro_batch_size * work.seq_length // layout.cp
    fp8 = {i: work.in_fp8(i, c.num_hidden_layers) for i in share.layers}
    rows = most_rows(layout, work)
    each = (kept_and_repeated(c, layout, work, i, fp8[i], rows) for i in share.layers)
    saved, again = zip(*each, strict=True)
    layer_input = saved_per_token(c, work.dtype, "full", layout, 0)
    moves = device != "cpu" and tokens * layer_input >= LEAST_OFFLOAD
    moved, on_their_way = _offloaded(share, saved, layer_input, work.offload * moves)
    kept = sum(saved) - moved

    schedule, sizes = layout.schedule, (rank, layout.pp, work.num_micro_batches)
    live = losses = schedule.live_activations(*sizes, layout.pp_chunks) / layout.pp_chunks
    if schedule.splits_backward:
        factors = sum(factors_per_token(c, work.dtype, layout, i, fp8[i]) for i in share.layers)
        further = sum(layer >= c.num_hidden_layers for layer in share.layers)
        factors += further * factors_of_depth(c, work.dtype, layout)
        # From B to W only factors are left; recomputed, they are more than forward has kept. More
        # micro-batches than these repeat what they do. Each activation is of one chunk.
        few = min(work.num_micro_batches, 4 * layout.pp)
        plan = _plan(schedule, rank, layout.pp, few, layout.pp_chunks)
        live = peak_live(plan, factors / kept) / layout.pp_chunks
        losses = 1  # the last stage's B follows its F at once, and takes what the loss has kept

    terms = parameter_bytes(share, layout, work)
    terms["weights"] += _fp8_weights(share, c, layout, work, fp8)
    activations, loss, logits = live * kept, 0, 0
    if share.has_head:
        terms["weights"] += cast * V * E  # lm_head's copy
        activations += losses * 2 * wide * E  # the last norm's input, plain and normalised
        # The gradients of lm_head and of its input are made along with the loss, and kept.
        rows = tokens * (1 + c.num_nextn_predict_layers)  # of all uses of lm_head
        loss = losses * E * (wide * V + BYTES[work.dtype] * rows)
        # The last stripe's logits, which become their gradient, and their cast.
        logits = V * (wide + cast) * min(STRIPE_ROWS[device], rows)
        logits += (rows > tokens) * BYTES[work.dtype] * E * rows  # side by side
    # Backward runs a part of one layer again at a time, when the logits are gone: so only the
    # larger of both counts. (lm_head's copy would go, too; it is counted.)
    layer = tokens * (max(again) + on_their_way)
    logits, layer = (logits, 0) if logits > layer else (0, layer)
    terms["activations"] = math.ceil(tokens * activations + layer)
    return RankMemory(**terms, loss=math.ceil(loss + logits))


@lru_cache(maxsize=64)
def _plan(schedule: Schedule, *sizes: int) -> Plan:
    return schedule.plan(*sizes)


def kept_and_repeated(
    c: ModelConfig, layout: Layout, work: Workload, layer: int, fp8: bool, rows: float = 1.0
) -> tuple[float, float]:
    """Bytes per token that a layer keeps, and those that it has while backward runs it again."""
    saved, everything = (
        saved_per_token(c, work.dtype, again, layout, layer, fp8, rows)
        for again in (work.recompute, "none")
    )
    return saved, everything if work.recompute == "full" else everything - saved


def most_rows(layout: Layout, work: Workload) -> float:
    """How many rows a rank's experts can get, to an even share: even, where nothing bounds them."""
    of = work.routing
    if of.moe_pad_expert_input_to_capacity:
        return of.moe_expert_capacity_factor
    factors = of.moe_expert_capacity_factor, of.moe_expert_rank_capacity_factor
    return min([factor for factor in factors if factor] + [layout.ep]) if any(factors) else 1.0


def _offloaded(
    share: Share, saved: Iterable[float], layer_input: float, num_layers: int
) -> tuple[float, float]:
    """Offload: bytes per token that leave for the host, and those on their way at the fullest."""
    moved, on_their_way, saved = 0, 0, iter(saved)
    for stage in share.stages:
        of_stage = list(islice(saved, len(stage)))
        leave = of_stage[:num_layers]
        if leave and stage[0] > 0:
            leave[0] -= layer_input  # it came from another stage, and stays: see memory/offload.py
        moved += sum(leave)
        # Two offloaded layers are here at a time, while the other layers have saved nothing yet, or
        # freed it.
        stay = sum(of_stage) - sum(leave)
        on_their_way = max(on_their_way, 2 * max(leave, default=0) - stay)
    return moved, on_their_way


def _fp8_weights(
    share: Share, c: ModelConfig, layout: Layout, work: Workload, fp8: Mapping[int, bool]
) -> int:
    """FP8: bytes of W and its transpose, beyond the copies in bfloat16 that they replace."""
    linears = (LayerParameters.of(c, layout, c.has_experts(i)).linears for i in share.layers)
    layers = [2 * fp8[i] * int(size) for i, size in zip(share.layers, linears, strict=True)]
    if layout.sharding == "parameters":  # of the window that computes
        return max(layers) * math.ceil(len(layers) / len(share.windows))
    replaced = work.dtype == "bfloat16" and layout.sharding == "none"
    return 0 if replaced else sum(layers)
