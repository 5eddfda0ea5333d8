"""Sharded units: when weights are gathered. How many are here at a time is in test_memory.py."""

from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from picotron_min.extensions.sharding.units import ShardedUnit
from picotron_min.runtime.tokenizer import BytesTokenizer
from tests.assembled import make_training
from tests.rows import row
from tests.training import Training


def training_of(text: str) -> Training:
    return make_training(*row(f"sharding: {text}"))


def exports(folder: Path, sharding: str) -> None:
    """Right after a step, when no weight has been gathered, and again after a forward."""
    training = training_of(f"dp=2 dtype=bfloat16 vocab_size=257 sharding={sharding}")
    training.step(0)
    losses, files = [], []
    for name in ("before", "after"):
        training.export(folder / name, BytesTokenizer())
        dist.barrier()
        paths = (folder / name).glob("*.safetensors")
        files.append({key: t for path in paths for key, t in load_file(path).items()})
        losses.append(training.evaluate())
    assert losses[0] == losses[1] and files[0].keys() == files[1].keys() != set()
    assert all(torch.equal(files[1][key], tensor) for key, tensor in files[0].items())


@pytest.mark.parametrize("sharding", ["layerwise", "parameters"])
def test_exporting_and_evaluating_need_no_forward_before(pool, tmp_path, sharding):
    pool.run(2, exports, tmp_path, sharding)


def gathers_and_computing(text: str) -> list[tuple[str, int]]:
    """In the forward after an update: of which unit a gather starts, ends, or a module computes."""
    training = training_of(text)
    units, events = training.units, []
    training.step(0)
    model = training.chunks[0].model

    def noted(event: tuple[str, int], unit: ShardedUnit, method) -> None:
        before = unit.arriving
        method()
        if unit.arriving is not before:
            events.append(event)

    for i, unit in enumerate(units):
        for name in ("start", "finish"):
            setattr(unit, name, partial(noted, (name, i), unit, getattr(unit, name)))
        users = {module for of in unit.modules.values() for module in of}
        parts = [model.model.embed_tokens, *(x.self_attn for x in model.model.layers.values())]
        for part in parts:
            if users & set(part.modules()):
                part.register_forward_hook(lambda *_, i=i: events.append(("compute", i)))
    training.step(1)
    return events


# Three ranks own the matrices of several layers in turn, which are then gathered together.
@pytest.mark.parametrize(
    "text,units", [("dp=2 sharding=optimizer layers=4", 6), ("dp=6 sharding=layerwise layers=4", 4)]
)
def test_only_the_first_gather_is_waited_for(pool, text, units):
    ranks = int(text[3])
    for events in pool.run(ranks, gathers_and_computing, text):
        assert max(i for _, i in events) == units - 1
        for i in range(1, units):
            order = ("start", i), ("compute", i - 1), ("finish", i)
            start, compute, finish = map(events.index, order)
            assert start < compute < finish, "it travels while the one before computes"
