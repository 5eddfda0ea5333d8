"""The part of traffic.py that depends on parameters: gradients, sharded weights, Muon.

    whole parameters      an all-reduce of their gradients, over every axis that sums them
    sharded, in [n, R]    reduce-scatters of gradients, all-gathers of weights
    Muon, with tp         an all-gather of each hidden matrix's update

Which matrices travel together, and how long a rank's row R is, follows from the placement table, as
it does in sharding/units.py.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from picotron_min.costs import layers_of_stages
from picotron_min.extensions.settings import Layout, ModelConfig, Workload
from picotron_min.extensions.sharding.rows import lay_out, shard_of, windows
from picotron_min.pipeline_schedule import stages_of
from picotron_min.placement import Placement, part, placements, saved_name
from picotron_min.planner.activations import BYTES
from picotron_min.planner.sent import Sent

EMBEDDING, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"


def add_parameters(
    sent: Sent, model_config: ModelConfig, layout: Layout, workload: Workload, rank: int
) -> None:
    """Add to `sent` what a rank sends for its parameters in a step."""
    shapes, tied = model_config.parameter_shapes(), model_config.tie_word_embeddings
    num_layers = layers_of_stages(model_config, layout, workload.seq_length)
    table = placements(shapes, layout, tied, num_layers)
    places = places_of(rank, layout)
    for stage in stages_of(layout.schedule, places["pp"], layout.pp, layout.pp_chunks):
        for names in _groups(stage, num_layers, shapes, layout, tied):
            local = {}
            for name in names:
                slices = part(shapes[name], table[name].cuts, places, layout.axis_sizes)
                local[name] = [s.stop - s.start for s in slices]
            here = {name: shape for name, shape in local.items() if math.prod(shape)}
            _add_gradients(sent, here, table, layout, workload)
            if workload.optimizer == "muon":
                _add_updates(sent, here, table, places, BYTES[workload.dtype])


def places_of(rank: int, layout: Layout) -> dict[str, int]:
    """Where a rank is along the axes that cut parameters: see mesh.py."""
    places = layout.coordinates(rank)._asdict()
    within = rank % (layout.dp * layout.cp * layout.tp)  # its stage, a grid (edp, ep, etp)
    places["dp_cp"] = within // layout.tp
    places["edp"], rest = divmod(within, layout.ep * layout.etp)
    places["ep"], places["etp"] = divmod(rest, layout.etp)
    return places


def _groups(
    stage: int,
    num_layers: Sequence[int],
    shapes: Mapping[str, Sequence[int]],
    layout: Layout,
    tied: bool,
) -> Iterator[list[str]]:
    """The parameters of a stage that are used together, by saved name."""
    last = sum(num_layers[: stage + 1])
    by_layer = defaultdict(list)
    for name in (name for name in shapes if ".layers." in name):
        by_layer[int(name.split(".")[2])].append(name)
    if stage == 0:
        yield [EMBEDDING]
    for window in windows(range(last - num_layers[stage], last), shapes, layout):
        yield [name for layer in window for name in by_layer[layer]]
    if stage == len(num_layers) - 1:
        yield [NORM]
        if not tied or stage > 0:
            yield [saved_name(HEAD, tied)]


def _add_gradients(
    sent: Sent,
    local: Mapping[str, Sequence[int]],
    table: Mapping[str, Placement],
    layout: Layout,
    workload: Workload,
) -> None:
    """Gradients of parameters that are used together, and weights if they are gathered."""
    narrow, m = BYTES[workload.dtype], workload.num_micro_batches
    wide, units = max(BYTES["float32"], narrow), defaultdict(dict)
    for name, shape in local.items():
        if shard_of(table[name]):
            units[table[name].sums][name] = shape  # experts travel on an axis of their own
            continue
        gradient = wide * math.prod(shape)
        for axis in table[name].sums:
            sent.all_reduce(axis, gradient, times=1)
    reductions = m if layout.sharding in ("gradients", "parameters") else 1
    for (axis, *then), matrices in units.items():
        shards = {name: shard_of(table[name]) for name in matrices}
        _, R = lay_out(matrices, shards, layout.axis_sizes[axis])
        buffer, is_end = layout.axis_sizes[axis] * R, EMBEDDING in matrices or HEAD in matrices
        gathers = 1
        if layout.sharding == "parameters":  # of a layer for backward, too
            is_tied = EMBEDDING in matrices and HEAD not in table and layout.pp == 1
            gathers = m * (1 + (is_tied or not is_end))  # and both ends use a tied embedding
        sent.reduce_scatter(axis, wide * buffer, reductions)
        sent.all_gather(axis, (wide if is_end else narrow) * buffer, gathers)
        for other in then:
            sent.all_reduce(other, wide * R)


def _add_updates(
    sent: Sent,
    local: Mapping[str, Sequence[int]],
    table: Mapping[str, Placement],
    places: Mapping[str, int],
    narrow: int,
) -> None:
    """Muon makes the matrices whole that this rank updates: see optimizers/muon.py."""
    for name, shape in local.items():
        shard = shard_of(table[name])
        if table[name].is_hidden_matrix and (not shard or shard.owner == places[shard.axis]):
            for axis in (cut.axis for cut in table[name].cuts if cut.owner is None):
                sent.all_gather(axis, narrow * math.prod(shape) * sent.sizes[axis])
