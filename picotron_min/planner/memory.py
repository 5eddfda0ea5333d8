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
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate, islice
from typing import NamedTuple

from picotron_min.extensions.settings import LEAST_OFFLOAD, Layout, ModelConfig, Workload
from picotron_min.layout import STRIPE_ROWS
from picotron_min.pipeline_schedule import Kind, Plan, Schedule
from picotron_min.planner.activations import (
    BYTES,
    WIDE,
    factors_per_token,
    made_by_backward,
    norms_keep,
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


LEFT_OUT = {"cpu": "Python and torch themselves"}  # of every plan, and of the dry run
LEFT_OUT["cuda"] = "CUDA's context, NCCL's buffers, kernels' workspaces, gaps between tensors"


def gb(number: float) -> str:
    return f"{gigabytes(number)} GB"


def gigabytes(number: float) -> str:  # 72.3, and 0.0428 of a tiny model
    return f"{number / 1e9:.1f}" if number >= 1e9 else f"{number / 1e9:.3g}"


def memory_per_rank(
    model_config: ModelConfig, layout: Layout, workload: Workload, device: str = "cuda"
) -> RankMemory:
    """The memory of the pipeline rank that needs most, with as many rows of experts as may come.

    Not counted: what LEFT_OUT says, temporaries of the optimizer and of collectives, statistics of
    norms and attention, the numbers of the experts that tokens use, and the [S, S] matrices of
    attention that is not fused.
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
    """Bytes of weights, gradients and optimizer state, by these names; without what travels."""
    wide, narrow = WIDE[workload.dtype], BYTES[workload.dtype]
    moments = 2 * (BYTES["bfloat16"] if workload.moments == "bfloat16" else wide)
    states = {"adamw": (moments, moments), "muon": (moments / 2, moments), "sgd": (0, 0)}
    of_hidden, of_others = states[workload.optimizer]  # bytes an element
    elements, owned, buffers = Counter(), Counter(), 0
    for unit in share.units:
        elements.update(unit.elements)
        owned[unit.is_end] += sum(unit.rows.values())
        buffers += unit.buffers
    # What the optimizer has: all of what is whole, and of each sharded unit a row of its buffer.
    hidden, others = elements["hidden"] + owned[False], elements["others"] + owned[True]
    weights = wide * (hidden + others)
    weights += narrow * elements["hidden"] if narrow < wide else 0  # copies to compute with
    if layout.sharding != "parameters":
        weights += narrow * elements["sharded_hidden"] + wide * elements["sharded_others"]
    gradients = elements["hidden"] + elements["others"]
    reduces_each = layout.sharding in ("gradients", "parameters")
    gradients += owned.total() if reduces_each else buffers
    states = of_hidden * hidden + of_others * others
    return {"weights": weights, "gradients": wide * gradients, "optimizer_state": states}


def travelling(
    share: Share, layout: Layout, work: Workload, freed: float | None
) -> tuple[float, float]:
    """Bytes of gathered weights and of buffers of gradients that are whole for a moment.

    A layer computes while the next one's weights arrive, and fills a buffer while that of the unit
    behind it travels: of lm_head, or of a layer that has freed its activations, so many bytes. At a
    loss, where `freed` is None, there are lm_head, and the embedding's gradients of the micro-batch
    before.
    """
    wide, narrow = WIDE[work.dtype], BYTES[work.dtype]
    gathers, is_loss = layout.sharding == "parameters", freed is None
    reduces = gathers or layout.sharding == "gradients"
    layer, end = (
        max((unit.buffers for unit in share.units if unit.is_end is is_end), default=0)
        for is_end in (False, True)
    )
    if is_loss:
        return gathers * wide * end, reduces * wide * end
    behind = max(share.has_head * wide * end, wide * layer - freed)
    return gathers * narrow * 2 * layer, reduces * (wide * layer + behind)


def _memory_of(
    rank: int, share: Share, c: ModelConfig, layout: Layout, work: Workload, device: str
) -> RankMemory:
    weights, gradients, states = parameter_bytes(share, layout, work).values()
    weights += _fp8_weights(share, c, layout, work)
    found = []
    for moment in moments_of(rank, share, c, layout, work, device):
        gathered, buffers = travelling(share, layout, work, moment.freed)
        parts = weights + gathered, gradients + buffers, states, *moment[1:]
        found.append(RankMemory(*map(math.ceil, parts)))
    return max(found, key=sum)


class Moment(NamedTuple):
    """Bytes of a rank when it may be fullest."""

    freed: float | None  # by the layer whose backward was the last; None: a loss is computed
    activations: float
    loss: float


def moments_of(
    rank: int, share: Share, c: ModelConfig, layout: Layout, work: Workload, device: str
) -> list[Moment]:
    """In the backward of a layer; and where a rank has the head, in the last stripe of a loss."""
    tokens = work.micro_batch_size * work.seq_length // layout.cp
    fp8 = {i: work.in_fp8(i, c.num_hidden_layers) for i in share.layers}
    rows = most_rows(layout, work)
    each = {i: kept_and_made(c, layout, work, i, fp8[i], rows, device) for i in share.layers}
    layer_input = saved_per_token(c, work.dtype, "full", layout, 0)
    moves = device != "cpu" and tokens * layer_input >= LEAST_OFFLOAD
    stages = [[each[i][0] for i in stage] for stage in share.stages]
    offloaded = (
        _offloaded(stage, saved, layer_input, work.offload * moves)
        for stage, saved in zip(share.stages, stages, strict=True)
    )
    kept, on_their_way = map(list, zip(*offloaded, strict=True))
    of_loss, of_stripe = _of_loss(c, layout, work, tokens, device) if share.has_head else (0, 0)
    kept[-1] += of_loss / tokens

    schedule, sizes = layout.schedule, (rank, layout.pp)
    if schedule.splits_backward or len(kept) > 1:
        factors = (factors_per_token(c, work.dtype, layout, i, fp8[i]) for i in share.layers)
        factors = [schedule.splits_backward * sum(islice(factors, len(s))) for s in share.stages]
        # More micro-batches than these repeat what they do.
        few = min(work.num_micro_batches, 4 * layout.pp)
        alive = _most_alive(_plan(schedule, *sizes, few, layout.pp_chunks), kept, factors)
    else:
        alive = kept[0] * schedule.live_activations(*sizes, work.num_micro_batches, 1)
    if any(stage.start for stage in share.stages):
        alive += layer_input  # of the next micro-batch, which arrives early

    # A loss is gone when layers' backward begins; until then it has its last stripe.
    alive = tokens * alive - of_loss
    layer = tokens * (max(made for _, made in each.values()) + max(on_their_way))
    freed = tokens * min(saved for saved, _ in each.values())
    at_loss = [Moment(None, alive, of_loss + of_stripe)] * share.has_head
    return [Moment(freed, alive + layer, 0), *at_loss]


def _most_alive(plan: Plan, kept: Sequence[float], left: Sequence[float]) -> float:
    """Bytes at the fullest of a plan: of each chunk those from F to B, and those left until W."""
    change = {Kind.FORWARD: kept, Kind.WEIGHT: [-number for number in left]}
    change[Kind.BACKWARD] = [after - before for before, after in zip(kept, left, strict=True)]
    there = (change[action.kind][action.chunk] for action in plan if action.kind in change)
    return max(accumulate(there))


def _of_loss(
    c: ModelConfig, layout: Layout, work: Workload, tokens: int, device: str
) -> tuple[float, float]:
    """Bytes that a loss keeps until its backward, and those that its last stripe has besides."""
    wide, narrow = WIDE[work.dtype], BYTES[work.dtype]
    cast = narrow if narrow < wide else 0
    E, V = c.hidden_size, math.ceil(c.vocab_size / layout.tp)
    rows = tokens * (1 + c.num_nextn_predict_layers)  # of all uses of lm_head
    # The gradients of lm_head and of its input are made along with the loss. And the last norm.
    norm = norms_keep(device) * wide * tokens / (layout.tp if layout.sequence_parallel else 1)
    kept = E * (wide * V + narrow * rows + norm)
    stripe = min(STRIPE_ROWS[device], rows)
    logits = V * (wide + cast) * stripe  # which become their gradient, and their cast
    if device == "cpu" or not cast:  # the gradient of lm_head is added up through a product
        logits = max(logits, V * narrow * (stripe + E))
    inputs = narrow * E * rows * (1 + (rows > tokens))  # alone, and side by side
    return kept, logits + cast * V * E + inputs  # with lm_head's copy


@lru_cache(maxsize=64)
def _plan(schedule: Schedule, *sizes: int) -> Plan:
    return schedule.plan(*sizes)


def kept_and_made(
    c: ModelConfig,
    layout: Layout,
    work: Workload,
    layer: int,
    fp8: bool,
    rows: float = 1.0,
    device: str = "cuda",
) -> tuple[float, float]:
    """Bytes per token that a layer keeps, and those that it has besides in its backward."""
    of = c, work.dtype
    saved = saved_per_token(*of, work.recompute, layout, layer, fp8, rows, device)
    made = made_by_backward(*of, layout, layer, fp8, rows)
    if work.recompute == "full":  # all but the layer's input is there again
        made += saved_per_token(*of, "none", layout, layer, fp8, rows, device)
        made -= saved_per_token(*of, "full", layout, 0)
    return saved, made


def most_rows(layout: Layout, work: Workload) -> float:
    """How many rows a rank's experts can get, to an even share: even, where nothing bounds them."""
    of = work.routing
    if of.moe_pad_expert_input_to_capacity:
        return of.moe_expert_capacity_factor
    factors = of.moe_expert_capacity_factor, of.moe_expert_rank_capacity_factor
    return min([factor for factor in factors if factor] + [layout.ep]) if any(factors) else 1.0


def _offloaded(
    stage: range, saved: Sequence[float], layer_input: float, num_layers: int
) -> tuple[float, float]:
    """Bytes per token that a stage keeps, and those on their way to the host or back."""
    leave = list(saved[:num_layers])
    if leave and stage.start:
        leave[0] -= layer_input  # it came from another stage, and stays: see memory/offload.py
    stay = sum(saved) - sum(leave)
    # Two offloaded layers are here at a time, while the other layers have saved nothing yet, or
    # freed it.
    return stay, max(0, 2 * max(leave, default=0) - stay)


def _fp8_weights(share: Share, c: ModelConfig, layout: Layout, work: Workload) -> int:
    """FP8: bytes of W and its transpose, beyond the copies in bfloat16 that they replace."""
    layers, n = [], c.num_hidden_layers
    for i in share.layers:
        linears, _, experts = map(int, LayerParameters.of(c, layout, c.has_experts(i)))
        layers.append(2 * (work.in_fp8(i, n) * linears + work.experts_in_fp8(i, n) * experts))
    if layout.sharding == "parameters":  # of the window that computes
        return max(layers) * math.ceil(len(layers) / sum(not unit.is_end for unit in share.units))
    replaced = work.dtype == "bfloat16" and layout.sharding == "none"
    return 0 if replaced else sum(layers)
