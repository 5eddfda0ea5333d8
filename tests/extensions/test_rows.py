"""Where sharded matrices lie: in the placement table, and in a buffer."""

import math

import pytest
import torch

from picotron_min.extensions.sharding.rows import deal, lay_out
from picotron_min.extensions.sharding.units import _views
from picotron_min.placement import Cut

ROWS = Cut("dp_cp", 0)


@pytest.mark.quick
@pytest.mark.parametrize("n", [1, 2, 3, 4, 8])
def test_a_buffer_has_every_element_once_and_rows_as_torch_chunk_cuts_them(n):
    shapes = {"a": (61, 4), "b": (3, 2), "c": (8, 1)}
    pieces, R = lay_out(shapes, dict.fromkeys(shapes, ROWS), n)
    assert sum(-(-rows // n) * columns for rows, columns in shapes.values()) == R
    buffer, elements = torch.full((n, R), math.nan), 0
    for name, shape in shapes.items():
        whole = torch.randn(shape)
        for piece in pieces[name]:
            inside, rows = _views(piece, buffer, whole)
            assert inside.isnan().all(), "elements share a place"
            inside.copy_(rows)
            elements += rows.numel()
        for rank, chunk in enumerate(whole.chunk(n)):
            start = pieces[name][0].start
            assert torch.equal(buffer[rank, start : start + chunk.numel()], chunk.flatten())
    assert elements == sum(map(math.prod, shapes.values())) == (~buffer.isnan()).sum()


def test_all_ranks_deal_alike_and_the_largest_first():
    owners, loads = deal([2, 9, 4, 4, 3], 2)
    assert owners == [0, 0, 1, 1, 1] and loads == [11, 11]
