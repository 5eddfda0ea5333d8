"""The part of traffic.py that depends on parameters: gradients, sharded weights, Muon.

whole parameters      an all-reduce of their gradients, over every axis that sums them
sharded, in [n, R]    reduce-scatters of gradients, all-gathers of weights
Muon, with tp         an all-gather of each hidden matrix's update
"""

from collections.abc import Mapping

from picotron_min.extensions.settings import Layout, ModelConfig, Workload
from picotron_min.extensions.sharding.rows import shard_of
from picotron_min.pipeline_schedule import ends_share_rank
from picotron_min.planner.activations import BYTES, WIDE
from picotron_min.planner.parameters import Unit, parameters_of_rank
from picotron_min.planner.sent import Sent


def add_parameters(
    sent: Sent, model_config: ModelConfig, layout: Layout, workload: Workload, rank: int
) -> None:
    """Add to `sent` what a rank sends for its parameters in a step."""
    places, wide = places_of(rank, layout), WIDE[workload.dtype]
    pipeline = layout.schedule, layout.pp, layout.pp_chunks
    is_tied = model_config.tie_word_embeddings and ends_share_rank(*pipeline)
    for unit in parameters_of_rank(model_config, layout, workload.seq_length, places).units:
        for part in unit.parts:
            for axis in () if shard_of(part.placement) else part.placement.sums:
                sent.all_reduce(axis, wide * part.elements)
        # A layer's weights are needed for forward and backward, a tied embedding at both ends. A V
        # has the ends in two chunks, which reduce their gradients one by one.
        gathers = 1 if unit.is_end and not is_tied else 2
        reductions = 2 if unit.is_end and is_tied and layout.pp > 1 else 1
        _add_sharded(sent, unit, layout, workload, gathers, reductions)
        if workload.optimizer == "muon":
            _add_updates(sent, unit, places, BYTES[workload.dtype])


def places_of(rank: int, layout: Layout) -> dict[str, int]:
    """Where a rank is along the axes that cut parameters: see mesh.py."""
    places = layout.coordinates(rank)._asdict()
    within = rank % (layout.dp * layout.cp * layout.tp)  # its stage, a grid (edp, ep, etp)
    places["dp_cp"] = within // layout.tp
    places["edp"], rest = divmod(within, layout.ep * layout.etp)
    places["ep"], places["etp"] = divmod(rest, layout.etp)
    return places


def _add_sharded(
    sent: Sent, unit: Unit, layout: Layout, workload: Workload, gathers: int, reductions: int
) -> None:
    """Gradients, and the weights that are gathered; both are numbers of times a micro-batch."""
    wide, m, kind = WIDE[workload.dtype], workload.num_micro_batches, layout.sharding
    width = wide if unit.is_end else BYTES[workload.dtype]  # of gathered weights
    gathers = m * gathers if kind == "parameters" else 1
    reductions = m * reductions if kind in ("gradients", "parameters") else 1
    for axis, R in unit.rows.items():
        buffer = layout.axis_sizes[axis] * R
        sent.reduce_scatter(axis, wide * buffer, reductions)
        sent.all_gather(axis, width * buffer, gathers)
        for part in unit.parts:
            for other in part.placement.sums[1:]:  # a tied embedding: the ends of the pipeline
                sent.all_reduce(other, wide * R)


def _add_updates(sent: Sent, unit: Unit, places: Mapping[str, int], narrow: int) -> None:
    """Muon makes the matrices whole that this rank updates: see optimizers/muon.py."""
    for part in unit.parts:
        shard = shard_of(part.placement)
        if part.placement.is_hidden_matrix and (not shard or shard.owner == places[shard.axis]):
            for axis in (cut.axis for cut in part.placement.cuts if cut.owner is None):
                sent.all_gather(axis, narrow * part.elements * sent.sizes[axis])
