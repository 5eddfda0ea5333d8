"""Where sharded matrices lie: in the placement table, and in a buffer."""

import math

import pytest
import torch

from picotron_min import costs
from picotron_min.extensions.settings import Layout
from picotron_min.extensions.sharding.rows import deal, lay_out, shard_of, sharded_rows
from picotron_min.extensions.sharding.units import _views
from picotron_min.placement import Cut, Placement, placements
from picotron_min.planner.memory import shares_of_ranks
from picotron_min.runtime.public_models import find_preset

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


@pytest.mark.parametrize("name", ["SmolLM-1.7B", "Llama-3.2-1B", "Llama-3.1-8B", "Llama-3.1-70B"])
def test_owners_have_about_the_same(name):
    model_config = find_preset(name)
    layers = model_config.num_hidden_layers
    hidden = layers * sum(costs.layer_flops(model_config, seq_length=0, layer=0).values()) // 2
    for n in (2, 4, 8, 16, 32, 64):
        layout = Layout(dp=n, sharding="layerwise")
        (share,) = shares_of_ranks(model_config, layout, 0)
        of_layers = [window["dp_cp"] for window in share.windows]
        assert 1 <= n * sum(of_layers) / hidden <= (1.13 if n < 64 else 1.34)
        assert len(of_layers) >= min(layers, layers // (n // 4 + 1)), "in several messages"


def test_a_vector_is_not_sharded_even_if_it_is_cut_over_tp():
    shapes = {"matrix": (8, 4), "vector": (8,)}
    table = dict.fromkeys(shapes, Placement((Cut("tp", 0),), ("dp_cp",), ("dp_cp",)))
    layout = Layout(dp=2, tp=2, sharding="optimizer")
    assert [*sharded_rows(shapes, table, (), layout)] == ["matrix"]


def test_more_ranks_than_matrices_leave_some_with_nothing():
    shapes = find_preset("tiny").parameter_shapes()
    layout = Layout(dp=64, sharding="layerwise")
    table = placements(shapes, layout, False, [2, 2])
    owners = [shard_of(p).owner for p in table.values() if p.is_hidden_matrix]
    assert len(owners) == 28 and set(owners) == set(range(14)), "14 for each stage"


def test_all_ranks_deal_alike_and_the_largest_first():
    owners, loads = deal([2, 9, 4, 4, 3], 2)
    assert owners == [0, 0, 1, 1, 1] and loads == [11, 11]


def test_one_rank_is_not_sharded():
    shapes = find_preset("tiny").parameter_shapes()
    layout = Layout(tp=2, pp=2, sharding="optimizer")
    assert not any(shard_of(p) for p in placements(shapes, layout, tied=False).values())
