"""The placement table, and that everything which is done per parameter derives from it."""

import itertools
from collections import Counter

import pytest
import torch

from picotron_min.extensions.settings import Layout
from picotron_min.placement import Cut, part, placements
from picotron_min.runtime.public_models import PRESETS

LAYOUTS = [
    Layout(pp=pp, dp=2, cp=2, tp=tp, sequence_parallel=sequence)
    for pp, tp, sequence in itertools.product((1, 2), (1, 2), (False, True))
]
JOINT = {"dp_cp": ("dp", "cp"), "dp_cp_tp": ("dp", "cp", "tp"), "ends": ("pp",)}
pytestmark = pytest.mark.quick


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
