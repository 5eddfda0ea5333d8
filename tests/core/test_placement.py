"""The placement table, and that everything which is done per parameter derives from it."""

import itertools
from collections import Counter

import pytest
import torch

from picotron_min.extensions.settings import Layout
from picotron_min.placement import Cut, part, placements, saved_name
from picotron_min.runtime.public_models import PRESETS

LAYOUTS = [
    Layout(pp=pp, dp=2, cp=2, tp=tp, sequence_parallel=sequence)
    for pp, tp, sequence in itertools.product((1, 2), (1, 2), (False, True))
]
JOINT = {"dp_cp": ("dp", "cp"), "dp_cp_tp": ("dp", "cp", "tp"), "ends": ("pp",)}
pytestmark = pytest.mark.quick


@pytest.mark.parametrize("preset", PRESETS)
def test_matrices_and_biases_are_cut_and_norms_are_not(preset):
    model_config = PRESETS[preset]
    shapes = model_config.parameter_shapes()
    table = placements(shapes, Layout(tp=2), model_config.tie_word_embeddings)
    assert table.keys() == shapes.keys()
    for name, placement in table.items():
        cuts = [cut for cut in placement.cuts if cut.owner is None]  # experts have owners
        is_whole = "norm" in name or name.endswith("mlp.gate.weight")  # of a router
        if getattr(model_config, "post_norm", False):  # of all heads, which ranks divide
            is_whole = is_whole and name.rsplit(".", 2)[1] not in ("q_norm", "k_norm")
        assert len(cuts) == (not is_whole), name


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: f"{layout.sizes}")
def test_cuts_and_copies_are_all_ranks_and_sums_where_tokens_differ(layout, tied):
    """Tokens differ over dp and cp, and over tp where its ranks see other parts of a sequence."""
    shapes = PRESETS["tiny"].override(tie_word_embeddings=tied).parameter_shapes()
    for name, placement in placements(shapes, layout, tied).items():
        names = [cut.axis for cut in placement.cuts] + list(placement.copies)
        axes = Counter(axis for name in names for axis in JOINT.get(name, (name,)))
        is_at_both_ends = tied and layout.pp > 1 and name == "model.embed_tokens.weight"
        assert axes == Counter(["dp", "cp", "tp"] + ["pp"] * is_at_both_ends), name
        summed = [axis for name in placement.sums for axis in JOINT[name]]
        over_tp = not placement.cuts and layout.sequence_parallel
        assert summed == ["dp", "cp"] + ["tp"] * over_tp + ["pp"] * is_at_both_ends, name


@pytest.mark.parametrize("length", [0, 1, 5, 10, 61])
def test_parts_are_those_of_torch_chunk(length):
    rows = torch.arange(length)
    for size in (1, 2, 3, 4, 8):
        chunks = [chunk.tolist() for chunk in rows.chunk(size)] if length else []
        for rank in range(size):
            (rows_here,) = part([length], [Cut("tp", 0)], {"tp": rank}, {"tp": size})
            expected = chunks[rank] if rank < len(chunks) else []
            assert rows[rows_here].tolist() == expected
            assert rows_here.start <= rows_here.stop, "its length is not negative"


def test_a_second_cut_divides_what_the_first_has_left_and_an_owner_has_all():
    cuts, sizes = [Cut("tp", 0), Cut("dp_cp", 0)], {"tp": 2, "dp_cp": 3}
    places = [
        part([61, 8], cuts, {"tp": tp, "dp_cp": dp}, sizes) for tp in range(2) for dp in range(3)
    ]
    ends = [0, 11, 22, 31, 41, 51, 61]
    assert places == [(slice(*pair), slice(0, 8)) for pair in itertools.pairwise(ends)]
    for owner in (0, 1):
        cuts, sizes = [Cut("ep", 0, owner=owner), Cut("tp", 1)], {"ep": 2, "tp": 2}
        for ep in range(2):
            rows = slice(0, 6) if ep == owner else slice(0, 0)
            assert part([6, 8], cuts, {"ep": ep, "tp": 0}, sizes) == (rows, slice(0, 4))


def test_a_tied_head_is_saved_as_the_embedding():
    names = "lm_head.weight", "model.norm.weight"
    assert [saved_name(name, tied=False) for name in names] == [*names]
    assert saved_name(names[0], tied=True) == "model.embed_tokens.weight"
