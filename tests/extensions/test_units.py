"""Sharded units: when weights are here, what travels meanwhile, and a bad gradient in one shard."""

import math
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from picotron_min.pipeline_schedule import Action
from picotron_min.runtime.tokenizer import BytesTokenizer
from tests.assembled import make_training
from tests.core.test_checkpoint import State
from tests.rows import row
from tests.training import Training


def training_of(text: str) -> Training:
    return make_training(*row(f"sharding: {text}"))


def save_evaluate_and_export(folder: Path, sharding: str) -> None:
    """Right after a step, when no weight has been gathered, and again after a forward."""
    training = training_of(f"dp=2 dtype=bfloat16 vocab_size=257 sharding={sharding}")
    training.step(0)

    def written(name: str) -> dict[tuple[str, str], Tensor]:
        training.save(folder / name, 2)
        training.export(folder / name / "hf", BytesTokenizer())
        dist.barrier()
        files = (folder / name).rglob("*.safetensors")
        return {(file.name, key): t for file in files for key, t in load_file(file).items()}

    before = written("before")
    loss = training.evaluate()
    after = written("after")
    assert before.keys() == after.keys() and len(before) > 30
    assert all(torch.equal(after[key], tensor) for key, tensor in before.items())
    assert training.evaluate() == loss


@pytest.mark.parametrize("sharding", ["layerwise", "parameters"])
def test_saving_evaluating_and_exporting_need_no_forward_before(pool, tmp_path, sharding):
    pool.run(2, save_evaluate_and_export, tmp_path, sharding)


def skip_a_step(text: str) -> None:
    training = training_of(text)
    training.step(0)
    before = State(training)
    last = dist.get_rank() == dist.get_world_size() - 1
    gradients = list(training.parameters.values())[-1].grad
    wait = training.model.gradients[-1].wait

    def poisoned() -> None:
        wait()
        if last:
            gradients.view(-1)[0] = math.inf  # in the shard of one rank

    training.model.gradients[-1].wait = poisoned
    result = training.step(1)
    training.model.gradients[-1].wait = wait
    assert result.skipped and math.isinf(result.grad_norm)
    before.assert_equal(State(training))
    for axis in training.axes:
        axis.ledger.take_bytes()
    assert not training.step(2).skipped
    if not training.units[0].frees:
        assert training.axes.dp_cp.ledger.bytes["all_gather"] == 0, "no weight had changed"


@pytest.mark.parametrize(
    "text", ["dp=2 sharding=layerwise", "dp=2 tp=2 sp sharding=parameters optimizer=adamw"]
)
def test_an_infinite_gradient_in_one_shard_skips_the_step_on_all_ranks(pool, text):
    pool.run(4 if "tp" in text else 2, skip_a_step, text)


# Weights of all ranks, and gradients for them, are here for as short as may be.


def most_alive(text: str) -> tuple[int, int, int]:
    """The most layers whose weights are here, are here or arriving, and buffers of gradients."""
    training = training_of(text)
    units, most = training.units[1:-1], [0, 0, 0]

    def count(inner):
        def counted(*args) -> None:
            inner(*args)
            buffers = [unit.buffer for unit in training.units if unit.buffer is not None]
            arriving = [unit for unit in units if unit.arriving]
            here = [u for u in units if next(iter(u.weights.values())).untyped_storage().nbytes()]
            of_all = [of for unit in training.units for of in unit.travelling]
            num_buffers = len(buffers) + len({id(buffer) for _, buffer, _ in of_all})
            for i, n in enumerate((len(here), len(here) + len(arriving), num_buffers)):
                most[i] = max(most[i], n)

        return counted

    for unit in units:
        unit.start, unit.finish, unit.free = map(count, (unit.start, unit.finish, unit.free))
        for name, modules in unit.modules.items():
            modules[0].add_gradient = count(partial(unit.arrived, name))
    training.step(0)
    assert not any(unit.is_current for unit in training.units)
    return tuple(most)


@pytest.mark.parametrize("text", ["dp=2 m=2", "dp=2 tp=2 sp m=2 recompute=full"])
def test_a_layer_is_here_and_one_arriving_one_buffer_travels_and_one_fills(pool, text):
    ranks = 4 if "tp" in text else 2
    assert (
        pool.run(ranks, most_alive, f"{text} sharding=parameters layers=6") == [(1, 2, 2)] * ranks
    )


def gathered_after_b() -> list[bool]:
    """Whether any weight of a layer was whole when a B had ended."""
    training = training_of("dp=2 pp=2 m=3 engine=zb_h1 sharding=parameters")
    backward, found = training.model.pipeline._backward, []
    units = [u for u in training.units if not {"lm_head.weight"} & u.weights.keys()]

    def check_after(action: Action) -> None:
        backward(action)
        sizes = [w.untyped_storage().size() for unit in units for w in unit.weights.values()]
        found.append(any(sizes))

    training.model.pipeline._backward = check_after
    training.step(0)
    return found


def test_weights_are_freed_behind_b_since_w_reads_none(pool):
    assert pool.run(4, gathered_after_b) == [[False] * 3] * 4


def gathers_and_computing(text: str) -> list[tuple[str, int]]:
    """In the forward after an update: of which unit a gather starts, ends, or a module computes."""
    training = training_of(text)
    units, events = training.units, []
    training.step(0)
    model = training.chunks[0].model
    for i, unit in enumerate(units):

        def observed(method: str, i=i, unit=unit):
            inner = getattr(unit, method)

            def call():
                before = unit.arriving
                inner()
                if unit.arriving is not before:
                    events.append((method, i))

            setattr(unit, method, call)

        observed("start")
        observed("finish")
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
