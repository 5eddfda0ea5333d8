"""Sharded data parallelism: every mode trains the same model as one rank, in less memory."""

import itertools
import math
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from picotron_min import costs
from picotron_min.extensions.overlap.linear import linears
from picotron_min.extensions.settings import Layout
from picotron_min.extensions.sharding.rows import deal, lay_out, shard_of, sharded_rows
from picotron_min.extensions.sharding.units import _views
from picotron_min.placement import Cut, Placement, placements
from picotron_min.planner.describe import print_memory
from picotron_min.planner.memory import memory_of_ranks, shares_of_ranks
from picotron_min.runtime.config import Config
from picotron_min.runtime.config_checks import resolve_model
from picotron_min.runtime.config_file import parse_config
from picotron_min.runtime.public_models import find_preset
from picotron_min.runtime.tokenizer import BytesTokenizer
from tests import assembled
from tests.assembled import Parts, assemble, assert_trains_as_one_rank, parts_of
from tests.core import test_checkpoint
from tests.extensions import test_muon

MODES = ["optimizer", "layerwise", "gradients", "parameters"]


# Pure: where a buffer has what.

ROWS = Cut("dp_cp", 0)


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


# The central claim.

LAYOUTS = [
    (dp, pp, cp, tp)
    for dp, pp, cp, tp in itertools.product((1, 2, 3, 4, 8), (1, 2, 3, 4), (1, 2, 3, 4), (1, 2, 4))
    if dp * cp > 1 and dp * pp * cp * tp <= 8
]
VARIANTS = [
    (model, recompute, engine, micro_batches)
    for engine, micro_batches in (("1f1b", 1), ("interleaved", 4), ("afab", 2), ("1f1b", 2))
    for model, recompute in (("untied", "none"), ("tied", "full"), ("grouped-query", "selective"))
]
OPTIMIZERS = {
    "sgd": {},
    "adamw": {"optimizer": "adamw", "learning_rate": 0.01, "betas": [0.8, 0.9]},
    "muon": test_muon.MUON,
}


def config_of(layout: tuple, variant: tuple, **options) -> tuple[Config, str]:
    dp, pp, cp, tp = layout
    model, recompute, engine, m = variant
    m = m if pp > 1 else min(m, 2)  # more are for stages: test_two_ranks... has three on one
    if assembled.MODELS[model].num_key_value_heads % tp:
        model = "untied"
    if assembled.GLOBAL_BATCH % (dp * m):
        m = 3
    chunks = 2 if engine == "interleaved" and pp > 1 else 1
    options |= {"recompute": recompute, "engine": engine, "chunks": chunks}
    options |= {"cp": cp, "sequence_parallel": tp > 1}
    return assembled.make_config(dp, tp, m, pp, **options), model


CHOICES = [(sharding, optimizer) for optimizer in OPTIMIZERS for sharding in MODES]


CASES = [
    (*choice, *case)
    for choice in CHOICES
    for case in zip(LAYOUTS, itertools.cycle(VARIANTS), strict=False)
]


@pytest.mark.turns(1, 7)  # every layout is met, and every mode meets every axis and variant
@pytest.mark.parametrize("sharding,optimizer,layout,variant", CASES, ids=str)
def test_layouts_train_the_same_model_as_one_rank(pool, sharding, optimizer, layout, variant):
    config, model = config_of(layout, variant, sharding=sharding, **OPTIMIZERS[optimizer])
    assert_trains_as_one_rank(pool, config, model)


@pytest.mark.parametrize("sharding,dp", [*((mode, 4) for mode in MODES), ("layerwise", 8)])
def test_ranks_without_rows_or_matrices_train_the_same_model(pool, sharding, dp):
    """3 rows over 4 ranks; the 7 matrices of a stage of one layer over 8 owners."""
    model_config = assembled.MODEL.override(vocab_size=3)
    config = assembled.make_config(dp, layers=1, sharding=sharding)
    assert_trains_as_one_rank(pool, config, model_config)


SMALL = {"model": {"num_hidden_layers": 3}, "optimizer": "adamw"}


def results_and_weights(config: Config, steps: int) -> tuple[list[float], Parts, dict]:
    training = test_checkpoint.make_training(config)
    losses = [training.step(step).loss for step in range(steps)] + [training.evaluate()]
    weights = parts_of(training, {name: p.data for name, p in training.parameters.items()})
    return losses, weights, training.model_config.parameter_shapes()


# With several micro-batches the others add in another order: first over ranks.
BITS = [*itertools.product(MODES, [1]), ("optimizer", 3), ("layerwise", 3)]


@pytest.mark.turns(3, 5)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("sharding,micro_batches", BITS)
def test_two_ranks_train_to_the_same_bits_as_without_sharding(pool, sharding, dtype, micro_batches):
    options = {"dtype": dtype, "grad_clip": None, "gradient_accumulation_steps": micro_batches}
    make = partial(test_checkpoint.make_config, dp=2, **options, **SMALL)
    (losses, expected, shapes), _ = pool.run(2, results_and_weights, make(), 3)
    ranks = pool.run(2, results_and_weights, make(sharding=sharding), 3)
    weights = assemble([parts for _, parts, _ in ranks], shapes)
    assert all(ours == losses for ours, _, _ in ranks)
    for name, (_, weight) in expected.items():
        assert np.array_equal(weights[name], weight), name


def save_evaluate_and_export(folder: Path, config: Config) -> None:
    """Right after a step, when no weight has been gathered, and again after a forward."""
    training = test_checkpoint.make_training(config)
    for step in range(2):
        training.step(step)

    def written(name: str) -> dict[tuple[str, str], Tensor]:
        training.save(folder / name, 2)
        training.export(folder / name / "hf", BytesTokenizer())
        dist.barrier()
        files = (folder / name).rglob("*.safetensors")
        return {(file.name, key): t for file in files for key, t in load_file(file).items()}

    before = written("before")
    loss = training.evaluate()
    after = written("after")
    assert before.keys() == after.keys() and len(before) > 40
    assert all(torch.equal(after[key], tensor) for key, tensor in before.items())
    assert training.evaluate() == loss


@pytest.mark.parametrize("sharding", ["layerwise", "parameters"])
def test_saving_evaluating_and_exporting_need_no_forward_before(pool, tmp_path, sharding):
    config = test_checkpoint.make_config(dp=2, dtype="bfloat16", sharding=sharding)
    pool.run(2, save_evaluate_and_export, tmp_path, config)


# A step with a bad gradient, and one without.


def skip_a_step(config: Config) -> None:
    training = test_checkpoint.make_training(config)
    training.step(0)
    before = test_checkpoint.State(training)
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
    before.assert_equal(test_checkpoint.State(training))
    for axis in training.axes:
        axis.ledger.take_bytes()
    assert not training.step(2).skipped
    if config.distributed.sharding != "parameters":
        assert training.axes.dp_cp.ledger.bytes["all_gather"] == 0, "no weight had changed"


@pytest.mark.parametrize("sharding,tp", [*zip(MODES, (1, 2, 1, 2), strict=True)])
def test_an_infinite_gradient_in_one_shard_skips_the_step_on_all_ranks(pool, sharding, tp):
    config = test_checkpoint.make_config(dp=2, tp=tp, sharding=sharding)
    pool.run(config.world_size, skip_a_step, config)


# Memory.


def bytes_held(config: Config) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Of weights, gradients and optimizer state after a step, and what planner/memory.py plans."""
    training = test_checkpoint.make_training(config)
    training.step(0)
    training.evaluate()
    units, parameters = training.units, training.parameters.values()

    def distinct(tensors) -> int:
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors}
        return sum(storage.nbytes() for storage in storages.values())

    weights = [weight for unit in units for weight in unit.weights.values()]
    weights += [unit.flat for unit in units] + list(parameters)
    models = [chunk.model for chunk in training.chunks]
    copies = [linear.copy for model in models for linear in linears(model).values()]
    weights += [copy for copy in copies if copy is not None]
    gradients = [p.grad for p in parameters] + [unit.row for unit in units]
    gradients += [unit.buffer for unit in units if unit.buffer is not None]
    states = [s for of in training.optimizer.state.values() for s in of.values() if s.ndim]
    device, workload = "cpu", config.workload
    rank, model_config = training.axes.pp.rank, training.model_config
    planned = memory_of_ranks(model_config, config.layout, workload, device)[rank]
    return (distinct(weights), distinct(gradients), distinct(states)), planned[:3]


def most_alive(config: Config) -> tuple[int, int, int]:
    """The most layers whose weights are here, are here or arriving, and buffers of gradients."""
    training = test_checkpoint.make_training(config)
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


@pytest.mark.parametrize("tp,recompute", [(1, "none"), (2, "full")])
def test_a_layer_is_here_and_one_arriving_one_buffer_travels_and_one_fills(pool, tp, recompute):
    model = {"num_hidden_layers": 6, "recompute": recompute}
    config = test_checkpoint.make_config(dp=2, tp=tp, model=model, sharding="parameters")
    for most in pool.run(2 * tp, most_alive, config):
        assert most == (1, 2, 2)


def assert_holds_what_is_planned(pool, config: Config) -> None:
    """The fullest rank of each pipeline stage."""
    ranks = pool.run(config.world_size, bytes_held, config)
    model_config, layout = resolve_model(config), config.layout
    E, of_stage = model_config.hidden_size, len(ranks) // layout.pp
    for stage, share in enumerate(shares_of_ranks(model_config, layout, 16)):
        here = ranks[stage * of_stage :][:of_stage]
        held = [max(of) for of in zip(*(held for held, _ in here), strict=True)]
        weights, gradients, states = here[0][1]
        if config.model.dtype == "bfloat16" and stage == layout.pp - 1:
            weights -= 2 * -(-257 // layout.tp) * E  # lm_head's cast is planned with the weights
        if layout.sharding in ("gradients", "parameters"):
            units = [rows for unit in share.units for rows in unit.rows.items()]
            largest = max((layout.axis_sizes[axis] * R for axis, R in units), default=0)
            buffers = 2 * 4 * largest  # two that travel
            assert gradients - held[1] == buffers
            gradients -= buffers
        if layout.sharding == "parameters":
            assert weights >= held[0], "gathered weights are gone between steps"
            weights = held[0]
        # Copies of the shared experts' gates are not planned.
        gates = 2 * 2 * E if model_config.moe_shared_expert_gate else 0
        assert held[:2] == pytest.approx((weights, gradients), abs=8 * E + gates)
        # The fullest rank of one window may not be that of another.
        least = states * (0.9 if layout.sharding == "layerwise" else 1)
        assert least <= held[2] + 8 * E <= states + 16 * E


HELD = [{"dp": 4}, {"dp": 2, "tp": 2}, {"dp": 3}, {"dp": 2, "pp": 2, "tied": True}, {"cp": 2}]


@pytest.mark.turns(2, 7)
@pytest.mark.parametrize("layout", HELD, ids=str)
@pytest.mark.parametrize("sharding", ["none", *MODES])
def test_what_a_rank_holds_is_what_is_planned(pool, sharding, layout):
    dtype = "bfloat16" if layout.get("dp") == 2 else "float32"
    config = test_checkpoint.make_config(dtype=dtype, sharding=sharding, **layout)
    assert_holds_what_is_planned(pool, config)


def test_one_rank_is_not_sharded():
    shapes = assembled.MODEL.parameter_shapes()
    layout = Layout(tp=2, pp=2, sharding="optimizer")
    assert not any(shard_of(p) for p in placements(shapes, layout, tied=False).values())


def test_create_config_shows_what_sharding_saves_and_sends(capsys):
    config = parse_config(
        {
            "distributed": {"dp_size": 8, "sharding": "parameters"},
            "model": {"name": "Llama-3.1-8B", "dtype": "bfloat16"},
            "training": {"gradient_accumulation_steps": 4, "seq_length": 4096},
        }
    )
    print_memory(config, find_preset("Llama-3.1-8B"))
    out = capsys.readouterr().out
    assert 'sharding "parameters"' in out and "optimizer state    8.0" in out
    assert "weights and gradients are sent for each micro-batch: 4 times a step" in out
