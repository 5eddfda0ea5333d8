"""A compiled model trains the same in every layout, and its layers really are compiled.

The graphs are captured and differentiated as usual, then run by torch instead of inductor, which
would take minutes and test only torch.
"""

from functools import partial
from unittest import mock

import pytest
import torch
from torch._dynamo.utils import counters

from tests.assembled import MODELS, make_config, make_training
from tests.extensions.test_experts import MODELS as EXPERTS
from tests.extensions.test_experts import make_expert_config

KINDS = MODELS | EXPERTS
KINDS["two depths"] = MODELS["untied"].override(num_nextn_predict_layers=2)
LAYERS = 3  # all run the same graphs


def steps(config, compiles: bool, model: str = "grouped-query") -> list[tuple]:
    keys = {"compile": compiles, "num_hidden_layers": LAYERS}
    config = config.model_copy(update={"model": config.model.model_copy(update=keys)})
    training = make_training(config, KINDS[model])
    return [(result.loss, result.grad_norm) for result in map(training.step, range(2))]


def eager_and_compiled(config, *model: str) -> tuple:
    torch._dynamo.reset()
    counters.clear()
    expected = steps(config, False, *model)
    assert not counters["stats"]
    on_torch = partial(torch.compile, backend="aot_eager")
    with mock.patch.object(torch, "compile", on_torch):
        compiled = steps(config, True, *model)
    frames = counters["frames"]
    assert frames["ok"] == frames["total"], "the compiler gave up on a part"
    return expected, compiled, counters["stats"]["unique_graphs"], counters["graph_break"].total()


def compare(pool, config, *model: str) -> tuple[int, int]:
    """Return the number of graphs, and of breaks between them."""
    args = config.world_size, eager_and_compiled, config, *model
    expected, compiled, graphs, breaks = pool.run(*args)[0]
    for ours, theirs in zip(compiled, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-10)
    return graphs, breaks


@pytest.mark.turns(3, 5)
@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
def test_a_layer_of_one_process_is_one_graph(pool, recompute):
    graphs, breaks = compare(pool, make_config(recompute=recompute, micro_batches=2))
    assert (graphs, breaks) == (2, 0), "one for all layers, one for the loss"


def test_prediction_layers_are_one_graph_more(pool):
    assert compare(pool, make_config(micro_batches=2), "two depths") == (3, 0)


def test_bfloat16_copies_are_compiled_too(pool):
    assert compare(pool, make_config(micro_batches=2, dtype="bfloat16")) == (2, 0)


@pytest.mark.turns(1, 5)
@pytest.mark.parametrize("recompute", ["full", "none"])
@pytest.mark.parametrize("sharding", ["parameters", "optimizer"])
def test_gathers_are_outside_of_compiled_layers(pool, sharding, recompute):
    config = make_config(dp=2, micro_batches=2, recompute=recompute, sharding=sharding)
    assert compare(pool, config) == (2, 0), "one graph for all layers, one for the loss"


OVERLAP = {"sequence_parallel": True, "tp_overlap": True}
LAYOUTS = {  # each with the graphs that a layer has at least
    "tensor": (8, {"tp": 2, "recompute": "selective"} | OVERLAP),
    "ring": (4, {"cp": 2, "recompute": "full"}),
    "ulysses": (4, {"cp": 2, "cp_engine": "ulysses"}),
    "zero bubble": (6, {"engine": "zb_h1", "micro_batches": 2}),
}


@pytest.mark.turns(3, 5)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_between_messages_a_layer_is_compiled(pool, layout):
    expected_graphs, sizes = LAYOUTS[layout]
    graphs, breaks = compare(pool, make_config(**sizes))
    # Not as many for every layer: they share theirs.
    assert expected_graphs <= graphs < LAYERS * expected_graphs and breaks > 0


@pytest.mark.turns(1, 3)
@pytest.mark.parametrize(
    "layout,graphs", [({"tp": 2}, 8), ({"dp": 2, "recompute": "full"}, 4)], ids=["tp", "dp"]
)
def test_layers_with_experts_are_compiled_around_the_dispatch(pool, layout, graphs):
    config = make_expert_config("global", ep=2, **layout)
    assert compare(pool, config, "softmax")[0] == graphs, "the same for all layers"
