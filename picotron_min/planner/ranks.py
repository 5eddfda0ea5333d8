"""Pipeline ranks: which layers and ends each has, and how many elements they are.

Layers are alike but for their experts: so a rank is a number of layers without experts, and one of
layers with them, and many ranks are the same.
"""

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, chain
from typing import NamedTuple

from picotron_min.costs import layers_of_stages
from picotron_min.extensions.settings import Layout, ModelConfig
from picotron_min.pipeline_schedule import stages_of


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
    pp, ranks = layout.pp, Counter()
    if is_balanced is not None:
        each = tuple((number / pp, kind) for number, kind in by_kind(c, range(c.num_layers)))
        if is_balanced:
            return Counter({Rank(each, head=1 / pp, embedding=1.0): pp})
        return Counter(Rank(each, float(r == pp - 1), float(r == 0)) for r in range(pp))
    stops = [0, *accumulate(layers_of_stages(c, layout, seq_length))]
    for rank in range(pp):
        stages = stages_of(layout.schedule, rank, pp, layout.pp_chunks)
        layers = tuple(chain(*(range(stops[s], stops[s + 1]) for s in stages)))
        ends = layout.num_stages - 1 in stages, 0 in stages
        ranks[Rank(by_kind(c, layers), *map(float, ends))] += 1
    return ranks


@lru_cache(maxsize=4096)
def by_kind(c: ModelConfig, layers: Sequence[int]) -> tuple[tuple[int, bool], ...]:
    """How many of these layers have no experts, and how many have some, without zeros."""
    kinds = Counter(map(c.has_experts, layers))
    return tuple((kinds[kind], kind) for kind in sorted(kinds))


def layer_parameters(
    c: ModelConfig, layout: Layout, has_experts: bool, mlp_matrices: int = 3
) -> float:
    """Elements of a layer's matrices on a rank."""
    E, heads = c.hidden_size, 2 * (c.num_attention_heads + c.num_key_value_heads) * c.head_dim
    mlp = mlp_matrices * c.intermediate_size / layout.tp
    if has_experts:
        F = c.moe_intermediate_size
        mlp = 3 * F * c.n_shared_experts / layout.tp + c.num_local_experts
    return E * (heads / layout.tp + mlp) + has_experts * expert_parameters(c, layout)


def expert_parameters(c: ModelConfig, layout: Layout) -> float:
    """Those of a layer's routed experts, which fewer ranks have in common."""
    number = c.num_local_experts / (layout.ep * layout.etp)
    return 3 * c.hidden_size * c.moe_intermediate_size * number
