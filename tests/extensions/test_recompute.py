"""A compiled model trains the same in every layout, and its layers really are compiled.

The graphs are captured and differentiated as usual, then run by torch instead of inductor, which
would take minutes and test only torch.
"""

from functools import partial
from unittest import mock

import pytest
import torch
from torch._dynamo.utils import counters

from tests.assembled import make_training
from tests.rows import lines, row

LAYERS = 2  # both run the same graphs


def steps(text: str, compiles: bool) -> list[tuple]:
    training = make_training(*row(f"{text} layers={LAYERS}", compile=compiles))
    return [(result.loss, result.grad_norm) for result in map(training.step, range(2))]


def eager_and_compiled(text: str) -> tuple:
    torch._dynamo.reset()
    counters.clear()
    expected = steps(text, False)
    assert not counters["stats"]
    on_torch = partial(torch.compile, backend="aot_eager")
    with mock.patch.object(torch, "compile", on_torch):
        compiled = steps(text, True)
    frames = counters["frames"]
    assert frames["ok"] == frames["total"], "the compiler gave up on a part"
    return expected, compiled, counters["stats"]["unique_graphs"], counters["graph_break"].total()


# Graphs of a run: one for all layers, one for the loss, one for prediction layers; with messages,
# experts or a queue inside a layer as many as lie between these, but not as many for every layer.
GRAPHS = """
3 multi_token: dp=2 m=2 sharding=parameters recompute=full dtype=bfloat16 model=depths
8+ experts: tp=2 sp tp_overlap ep=2 recompute=selective global_aux model=softmax post_norm
"""


@pytest.mark.parametrize("text", lines(GRAPHS))
def test_layers_are_compiled_and_train_the_same(pool, text):
    number, _, text = text.partition(" ")
    least = int(number.strip("+"))
    ranks = pool.run(row(text)[0].world_size, eager_and_compiled, text)
    expected, compiled, graphs, breaks = ranks[0]
    for ours, theirs in zip(compiled, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-3 if "bfloat16" in text else 1e-10)
    if "+" in number:
        assert least <= graphs < LAYERS * least and breaks > 0
    else:
        assert (graphs, breaks) == (least, 0)
