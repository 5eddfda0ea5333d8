"""Where the parameters of a mixture lie."""

import itertools

import numpy as np
import pytest

from picotron_min.extensions.settings import Layout, ModelConfig
from picotron_min.placement import part, placements

SMALL = ModelConfig(
    *(61, 6, 8, 2, 1, 1),
    num_local_experts=4,
    moe_intermediate_size=8,
    n_shared_experts=1,
    moe_shared_expert_gate=True,
    mlp_only_layers=(1,),
)


def ranks_of_a_stage(layout: Layout) -> list[dict[str, int]]:
    """The place of each rank on every axis, by arithmetic: (dp, cp, tp) and (edp, ep, etp)."""
    places = itertools.product(*map(range, (layout.dp, layout.cp, layout.tp)))
    ranks, each = [], layout.ep * layout.etp
    for number, (dp, cp, tp) in enumerate(places):
        of_experts = {"edp": number // each, "ep": number % each // layout.etp}
        place = {"dp_cp": dp * layout.cp + cp, "dp_cp_tp": number, "tp": tp, "ends": 0}
        ranks.append(place | of_experts | {"etp": number % layout.etp})
    return ranks


GRIDS = [
    (pp, dp, cp, tp, ep, etp)
    for pp, dp, cp, tp in itertools.product((1, 2), (1, 2, 3), (1, 2), (1, 2, 4))
    for ep, etp in itertools.product((1, 2, 4), (1, 2, 4))
    if dp * cp * tp <= 8 and dp * cp * tp % (ep * etp) == 0
]


@pytest.mark.parametrize("sharding", ["none", "optimizer", "layerwise"])
def test_every_number_counts_at_one_rank_of_a_stage(sharding):
    """Cut axes x copies are the ranks of a stage, each once: so says a count of elements."""
    for (pp, dp, cp, tp, ep, etp), tied in zip(GRIDS, itertools.cycle((False, True))):
        shapes = SMALL.override(tie_word_embeddings=tied).parameter_shapes()
        layout = Layout(pp, dp, cp, tp, sharding=sharding, ep=ep, etp=etp)
        sizes, ranks = layout.axis_sizes, ranks_of_a_stage(layout)
        for name, placement in placements(shapes, layout, tied, [2 // pp] * pp).items():
            holders = np.zeros(shapes[name], int)
            for rank in ranks:
                if all(rank[axis] == 0 for axis in placement.copies):
                    holders[part(shapes[name], placement.owned, rank, sizes)] += 1
            assert (holders == 1).all(), (name, layout, placement)
