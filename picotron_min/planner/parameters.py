"""What a rank has of the model: its layers, and its part of each parameter.

    rank    how many layers with experts, how many without, which ends: for times (step_time.py)
    share   its parts of parameters, in units that are used together: for memory.py, traffic.py
    unit    a window of layers, the embedding, the last norm, or lm_head
    rows    R of the buffers [n, R] in which the sharded matrices of a unit travel, by axis

Standard library only.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, chain
from typing import NamedTuple

from picotron_min.costs import layers_of_stages
from picotron_min.extensions.experts.mixture import EXPERT
from picotron_min.extensions.optimizers.whole_matrices import Batch, batches
from picotron_min.extensions.settings import Layout, ModelConfig
from picotron_min.extensions.sharding.rows import lay_out, shard_of, windows
from picotron_min.pipeline_schedule import stages_of
from picotron_min.placement import Placement, Table, part, placements, saved_name

EMBEDDING, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"


@lru_cache(maxsize=16)
def layers_of_ranks(c: ModelConfig, layout: Layout, seq_length: int) -> list[list[range]]:
    """The layers of each stage of each pipeline rank."""
    stops = [0, *accumulate(layers_of_stages(c, layout, seq_length))]
    sizes, ranks = (layout.pp, layout.pp_chunks), range(layout.pp)
    of_ranks = (stages_of(layout.schedule, rank, *sizes) for rank in ranks)
    return [[range(stops[s], stops[s + 1]) for s in stages] for stages in of_ranks]


class Rank(NamedTuple):
    """What a pipeline rank has of the model; a fraction where an ideal balance is assumed."""

    layers: tuple[tuple[float, bool], ...]  # how many there are without experts, and with them
    head: float
    embedding: float


@lru_cache(maxsize=4096)
def ranks_of(
    c: ModelConfig, layout: Layout, seq_length: int, is_balanced: bool | None = None
) -> Counter[Rank]:
    """How many pipeline ranks have what, the first rank first; `is_balanced` as in system.py.

    A `layout` with the fields of the pipeline alone is found again in the cache.
    """
    pp = layout.pp
    if is_balanced is not None:
        each = tuple((number / pp, kind) for number, kind in by_kind(c, range(c.num_layers)))
        if is_balanced:
            return Counter({Rank(each, head=1 / pp, embedding=1.0): pp})
        return Counter(Rank(each, float(r == pp - 1), float(r == 0)) for r in range(pp))
    return Counter(
        Rank(
            by_kind(c, tuple(chain(*stages))),
            head=float(stages[-1].stop == c.num_layers),
            embedding=float(stages[0].start == 0),
        )
        for stages in layers_of_ranks(c, layout, seq_length)
    )


@lru_cache(maxsize=4096)
def by_kind(c: ModelConfig, layers: Sequence[int]) -> tuple[tuple[int, bool], ...]:
    """How many of these layers have no experts, and how many have some, without zeros."""
    kinds = Counter(map(c.has_experts, layers))
    return tuple((kinds[kind], kind) for kind in sorted(kinds))


class LayerParameters(NamedTuple):
    """Elements of a layer's matrices on a rank, by which ranks share them."""

    linears: float
    router: float
    experts: float  # that tokens are routed to: fewer ranks have the same ones

    @classmethod
    def of(
        cls, c: ModelConfig, layout: Layout, has_experts: bool, mlp_matrices: int = 3
    ) -> "LayerParameters":
        E, F, X = c.hidden_size, c.moe_intermediate_size, c.num_local_experts
        inner = 3 * F * c.n_shared_experts if has_experts else mlp_matrices * c.intermediate_size
        heads = 2 * (c.num_attention_heads + c.num_key_value_heads) * c.head_dim
        experts = 3 * E * F * X / (layout.ep * layout.etp)
        return cls(E * (heads + inner) / layout.tp, has_experts * E * X, has_experts * experts)


class Part(NamedTuple):
    """What a rank computes with of a parameter."""

    elements: int
    placement: Placement


class Unit(NamedTuple):
    """Parameters that are used together."""

    parts: list[Part]  # that the rank has something of: no other ranks' experts
    rows: dict[str, float]
    elements: Counter[str]  # of parts, by kind: "hidden", "others", and "sharded_" of both
    buffers: int  # elements of all [n, R]
    is_end: bool  # not of layers


class Share(NamedTuple):
    """What a rank has of the model."""

    stages: list[range]  # of layers
    has_head: bool
    chunks: list[list[Unit]]

    @property
    def units(self) -> list[Unit]:
        return list(chain(*self.chunks))

    @property
    def layers(self) -> list[int]:
        return list(chain(*self.stages))


def share_of_rank(
    model_config: ModelConfig, layout: Layout, seq_length: int, places: Mapping[str, int]
) -> Share:
    """Of the rank that is at these places along the axes that cut parameters."""
    c, (shapes, table, names) = model_config, _table(model_config, layout, seq_length)
    stages = layers_of_ranks(c, layout, seq_length)[places["pp"]]
    has_head = stages[-1].stop == c.num_layers
    looks_up = stages[0].start == 0 or (has_head and c.num_nextn_predict_layers > 0)
    chunks = [
        [
            tuple(chain(*(names[layer] for layer in window)))
            for window in windows(stage, shapes, layout)
        ]
        for stage in stages
    ]
    if looks_up:  # also a V's first chunk, if the depths of its last one do
        chunks[0 if stages[0].start == 0 else -1].insert(0, (EMBEDDING,))
    if has_head:
        head = (saved_name(HEAD, c.tie_word_embeddings),)
        chunks[-1] += [(NORM,)] if head in chain(*chunks) else [(NORM,), head]  # tied: once
    sizes = layout.axis_sizes
    units = {names: _unit(names, shapes, table, places, sizes) for names in set(chain(*chunks))}
    return Share(stages, has_head, [[units[names] for names in chunk] for chunk in chunks])


def hidden_batches(
    model_config: ModelConfig, layout: Layout, seq_length: int, places: Mapping[str, int]
) -> Iterator[Batch]:
    """The matrices of a rank's layers that Muon makes whole together."""
    shapes, table, names = _table(model_config, layout, seq_length)
    share = share_of_rank(model_config, layout, seq_length, places)
    mine = chain(*(names[layer] for layer in share.layers))
    return batches(mine, shapes, table, places, layout.axis_sizes)


def _unit(
    names: Sequence[str],
    shapes: Mapping[str, Sequence[int]],
    table: Mapping[str, Placement],
    places: Mapping[str, int],
    sizes: Mapping[str, int],
) -> Unit:
    parts, sharded, rows, elements = [], defaultdict(dict), {}, Counter()
    for i, name in enumerate(names):  # some names are there more than once: see _alike
        slices = part(shapes[name], table[name].cuts, places, sizes)
        shape = [s.stop - s.start for s in slices]
        if mine := math.prod(shape):
            parts.append(Part(mine, table[name]))
            kind = "hidden" if table[name].is_hidden_matrix else "others"
            if shard := shard_of(table[name]):  # of experts: over fewer ranks
                sharded[shard.axis][i], kind = shape, f"sharded_{kind}"
            elements[kind] += mine
    for axis, matrices in sharded.items():
        shards = {i: shard_of(table[names[i]]) for i in matrices}
        rows[axis] = lay_out(matrices, shards, sizes[axis])[1]
    buffers = sum(sizes[axis] * R for axis, R in rows.items())
    return Unit(parts, rows, elements, buffers, is_end=names[0] in (EMBEDDING, NORM, HEAD))


@lru_cache(maxsize=16)
def _table(
    model_config: ModelConfig, layout: Layout, seq_length: int
) -> tuple[dict[str, tuple[int, ...]], Table, list[tuple[str, ...]]]:
    """Shapes and placements by name, and the names of each layer."""
    has_owners = layout.sharding == "layerwise"  # then a matrix is not placed as others like it
    shapes, names = _alike(model_config, 0 if has_owners else layout.ep)
    num_layers = layers_of_stages(model_config, layout, seq_length) if has_owners else ()
    table = placements(shapes, layout, model_config.tie_word_embeddings, num_layers)
    return shapes, table, names


@lru_cache(maxsize=64)
def _alike(c: ModelConfig, ep: int) -> tuple[dict[str, tuple[int, ...]], list[tuple[str, ...]]]:
    """Shapes by name, and the names of each layer; all of them if `ep` is 0.

    Else one layer stands for all of its kind, and in it one expert for all of an ep rank: its names
    are there as often as the rank has experts. So tables of large mixtures are as short as others.
    """
    shapes, X, layers, of_kind = c.parameter_shapes(), c.num_local_experts, [], {}

    def stand_in(name: str) -> str:
        return EXPERT.sub(lambda e: f".experts.{int(e[1]) * ep // X}.", name) if ep else name

    for i in range(c.num_layers):
        kind = tuple(c.mlp_shapes(i).items()) if ep else i
        if kind not in of_kind:
            names = (name for name in shapes if name.startswith(f"model.layers.{i}."))
            of_kind[kind] = tuple(map(stand_in, names))
        layers.append(of_kind[kind])
    kept = {*chain(*layers), EMBEDDING, HEAD, NORM}
    return {name: shape for name, shape in shapes.items() if name in kept}, layers
