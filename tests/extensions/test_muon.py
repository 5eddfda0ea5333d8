"""Muon against torch.optim.Muon, over tensor-parallel parts, in every layout, and resumed."""

import functools
import math
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from picotron_min.extensions.optimizers.muon import Muon, orthogonalise
from picotron_min.extensions.settings import Layout, Recipe
from picotron_min.mesh import build_axes
from picotron_min.optimizer import build_optimizer
from picotron_min.runtime.config import Config, ConfigError
from picotron_min.runtime.config_file import parse_config
from picotron_min.runtime.metadata import read_to_resume
from tests import assembled
from tests.assembled import Run, assert_same, whole_run
from tests.core import test_checkpoint
from tests.core.test_costs import GQA, planned

SHAPES = [(24, 8), (8, 24), (16, 16), (6, 1)]
RECIPE = Recipe("muon", 0.02, weight_decay=0.1, momentum=0.9, dtype="float64")


def matrices_and_gradients(steps: int, dtype=torch.float64) -> tuple[list[Tensor], list]:
    generator = torch.Generator().manual_seed(3)
    draw = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]
    gradients = [
        [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in SHAPES]
        for _ in range(steps)
    ]
    return [weight.to(dtype) for weight in draw], gradients


def updated(optimizer_of, weights: list[Tensor], gradients: list[list[Tensor]]) -> list[Tensor]:
    parameters = [nn.Parameter(weight.clone()) for weight in weights]
    optimizer = optimizer_of(parameters)
    for of_step in gradients:
        for parameter, gradient in zip(parameters, of_step, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
    return [parameter.detach() for parameter in parameters]


def ours(parameters: list[nn.Parameter], recipe: Recipe = RECIPE) -> torch.optim.Optimizer:
    return Muon(dict.fromkeys(parameters), build_optimizer([], recipe), recipe)


def theirs(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    options = {"weight_decay": RECIPE.weight_decay, "momentum": RECIPE.momentum}
    return torch.optim.Muon(
        parameters, RECIPE.learning_rate, adjust_lr_fn="match_rms_adamw", **options
    )


def in_float64():
    """torch.optim.Muon iterates in bfloat16, whatever its parameters; within this, as they are."""
    return mock.patch.object(torch.Tensor, "bfloat16", torch.Tensor.clone)


def test_updates_are_torchs_in_float64():
    given = matrices_and_gradients(steps=5)
    with in_float64():
        expected = updated(theirs, *given)
    for a, b in zip(updated(ours, *given), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_updates_in_bfloat16_are_torchs_bit_for_bit():
    given = matrices_and_gradients(5, torch.float32)
    recipe = Recipe("muon", 0.02, weight_decay=0.1, momentum=0.9, dtype="bfloat16")
    results = updated(lambda parameters: ours(parameters, recipe), *given)
    for a, b in zip(results, updated(theirs, *given), strict=True):
        assert torch.equal(a, b)


def test_directions_stay_and_their_lengths_become_equal():
    generator = torch.Generator().manual_seed(0)
    u, _ = torch.linalg.qr(torch.randn(40, 12, generator=generator, dtype=torch.float64))
    v, _ = torch.linalg.qr(torch.randn(12, 12, generator=generator, dtype=torch.float64))
    lengths = torch.logspace(0, -2.3, 12, dtype=torch.float64)
    for matrix in (u * lengths @ v.T, (u * lengths @ v.T).T):
        before = matrix.clone()
        direction = orthogonalise(matrix)
        assert torch.equal(matrix, before), "the gradient is not changed"
        along = u.T @ (direction if len(direction) == 40 else direction.T) @ v
        assert (along - along.diag().diag()).abs().max() < 1e-9
        assert 0.65 < along.diag().min() < along.diag().max() < 1.25


def test_an_update_is_of_the_size_of_adamws():
    for shape in SHAPES[:3]:
        weight = nn.Parameter(torch.zeros(shape, dtype=torch.float64))
        weight.grad = torch.randn(shape, dtype=torch.float64)
        ours([weight]).step()
        rms = weight.detach().square().mean().sqrt() / RECIPE.learning_rate
        assert 0.1 < rms < 0.25


def parts_of_tensor_parallel_ranks(dim: int) -> list[tuple[Tensor, Tensor]]:
    axis = build_axes(torch.device("cpu"), Layout(tp=torch.distributed.get_world_size())).tp
    shapes = [shape for shape in SHAPES if shape[dim] % axis.size == 0]
    weights, gradients = matrices_and_gradients(steps=3)
    fits = [shape in shapes for shape in SHAPES]
    weights = [w for w, fit in zip(weights, fits, strict=True) if fit]
    gradients = [[g for g, fit in zip(gs, fits, strict=True) if fit] for gs in gradients]

    def mine(whole: Tensor) -> Tensor:
        return whole.chunk(axis.size, dim)[axis.rank].contiguous()

    def in_parts(parameters):
        matrices = dict.fromkeys(parameters, (axis, dim))
        return Muon(matrices, build_optimizer([], RECIPE), RECIPE)

    parts = updated(
        in_parts, [mine(w) for w in weights], [[mine(g) for g in gs] for gs in gradients]
    )
    sent = (axis.size - 1) / axis.size * 8 * sum(math.prod(shape) for shape in shapes)
    assert axis.ledger.bytes["all_gather"] == 3 * sent
    return [
        (part, mine(whole))
        for part, whole in zip(parts, updated(ours, weights, gradients), strict=True)
    ]


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("tp", [2, 4])
def test_parts_of_a_matrix_are_updated_as_the_whole(pool, tp, dim):
    for pairs in pool.run(tp, parts_of_tensor_parallel_ranks, dim):
        assert len(pairs) >= 3
        for part, expected in pairs:
            torch.testing.assert_close(part, expected, rtol=0, atol=1e-12)


MUON = {"optimizer": "muon", "learning_rate": 0.02, "betas": [0.8, 0.9], "momentum": 0.9}


def make_config(dp=1, pp=1, cp=1, tp=1, **options) -> Config:
    micro_batches = options.pop("micro_batches", 3 if pp > 1 else 1)
    options = {"sequence_parallel": tp > 1, **MUON, **options}
    return assembled.make_config(dp, tp, micro_batches, pp, cp=cp, **options)


def distance_to_torch(config: Config, model: str) -> tuple[float, int]:
    """Of the weights after three steps from those that torch's optimizers make of the gradients."""
    model_config = assembled.MODELS[model].override(
        num_hidden_layers=config.model.num_hidden_layers
    )
    training = assembled.make_training(config, model_config)

    def whole(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        parts = training.parts_of_whole({n: t.contiguous() for n, t in tensors.items()})
        return {name: part.full_tensor().clone() for name, part in parts.items()}

    weights = whole({name: p.data for name, p in training.parameters.items()})
    reference = {name: nn.Parameter(weight.clone()) for name, weight in weights.items()}
    t, hidden = config.training, [p for n, p in reference.items() if "_proj" in n]
    options = {"weight_decay": t.weight_decay, "momentum": t.momentum}
    others = [
        {"params": [p for n, p in reference.items() if "embed" in n or "lm_head" in n]},
        {"params": [p for n, p in reference.items() if "norm" in n], "weight_decay": 0.0},
    ]
    muon = torch.optim.Muon(hidden, t.learning_rate, adjust_lr_fn="match_rms_adamw", **options)
    adamw = torch.optim.AdamW(others, t.learning_rate, t.betas, weight_decay=t.weight_decay)
    for step in range(3):
        training.step(step)
        for name, gradient in whole({n: p.grad for n, p in training.parameters.items()}).items():
            reference[name].grad = gradient
        with in_float64():
            muon.step()
        adamw.step()
    after = whole({name: p.data for name, p in training.parameters.items()})
    moved = [(after[name] - weights[name]).abs().max().item() for name in after]
    assert min(moved) > 1e-3, "every parameter is trained"
    return max((after[name] - p).abs().max().item() for name, p in reference.items()), len(hidden)


@pytest.mark.turns(3, 5)
@pytest.mark.parametrize("dp", [1, 2, 3, 4])
@pytest.mark.parametrize("tp", [1, 2])
def test_training_with_muon_is_training_with_torchs(pool, dp, tp):
    model = "tied" if dp == 2 else "untied"
    for distance, num_hidden in pool.run(dp * tp, distance_to_torch, make_config(dp, tp=tp), model):
        assert distance < 1e-12 and num_hidden == 2 * 7


LAYOUTS = [
    {"dp": 2, "micro_batches": 3},
    {"dp": 4, "recompute": "full"},
    {"tp": 2, "sequence_parallel": False},
    {"tp": 4},
    {"cp": 2, "tp": 2},
    {"dp": 2, "cp": 2, "cp_engine": "ulysses"},
    {"pp": 2, "engine": "interleaved", "chunks": 2},
    {"dp": 2, "pp": 2, "tp": 2, "recompute": "selective"},
    {"pp": 2, "cp": 2, "tp": 2, "engine": "afab"},
]


@functools.cache
def one_rank(pool, model: str, layers: int) -> Run:
    config = make_config()
    shape = config.model.model_copy(update={"num_hidden_layers": layers})
    return whole_run(pool, config.model_copy(update={"model": shape}), model)


@pytest.mark.turns(3, 7)
@pytest.mark.parametrize("model", ["untied", "tied"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_layouts_train_the_same_model_with_muon(pool, layout, model):
    config = make_config(**layout)
    reference = one_rank(pool, model, config.model.num_hidden_layers)
    assert_same(whole_run(pool, config, model), reference)


CHECKPOINTS = {
    "one": {},
    "fused off": {"fused": False},
    "dp2": {"dp": 2},
    "bfloat16": {"dp": 2, "dtype": "bfloat16"},
    "pp2-tp2": {"pp": 2, "tp": 2, "tied": True},
}


@pytest.mark.parametrize("layout", CHECKPOINTS)
def test_a_resumed_run_with_muon_is_bit_identical(pool, tmp_path, layout):
    config = test_checkpoint.make_config(optimizer="muon", **CHECKPOINTS[layout])
    skipped = 1 if layout == "dp2" else None
    pool.run(config.world_size, test_checkpoint.resume_run, tmp_path, config, skipped)


def save_after_three_steps(folder: Path, config: Config) -> list[str]:
    training = test_checkpoint.train_and_save(folder, config)
    return sorted(test_checkpoint.State(training))


def resume_at_step_three(folder: Path, config: Config) -> list[tuple[float, float]]:
    training = test_checkpoint.make_training(config)
    path = folder / "step-00000003"
    training.load(path, read_to_resume(path, training.model_config, "muon").step)
    return [training.step(step)[:2] for step in range(3, 6)]


def run_unbroken(config: Config) -> list[tuple[float, float]]:
    training = test_checkpoint.make_training(config)
    return [training.step(step)[:2] for step in range(6)][3:]


@pytest.mark.parametrize("saved,resumed", [("dp2", "tp2"), ("tp4", "pp2-afab"), ("pp4", "one")])
def test_any_layout_resumes_from_any_other_with_muon(pool, tmp_path, saved, resumed):
    def config_of(name: str) -> Config:
        config = test_checkpoint.of_layout(name)
        training = config.training.model_copy(update={"optimizer": "muon"})
        return config.model_copy(update={"training": training})

    before, after, one = config_of(saved), config_of(resumed), config_of("one")
    keys = pool.run(before.world_size, save_after_three_steps, tmp_path, before)
    states = [key for key in set().union(*keys) if key.startswith("optimizer.")]
    hidden = {key for key in states if "_proj" in key}
    assert hidden and {key.split(".")[1] for key in hidden} == {"momentum_buffer"}
    assert {key.split(".")[1] for key in set(states) - hidden} == {"exp_avg", "exp_avg_sq"}
    (expected,) = pool.run(1, run_unbroken, one)
    for results in pool.run(after.world_size, resume_at_step_three, tmp_path, after):
        np.testing.assert_allclose(results, expected, rtol=0, atol=1e-10)


def test_muon_needs_one_state_a_hidden_matrix():
    memory, adamw = (planned(GQA, seq_length=64, tp=2, optimizer=o) for o in ("muon", "adamw"))
    hidden = GQA.num_hidden_layers * (128 * (128 + 64 + 64 + 128) + 3 * 128 * 352)
    assert adamw.optimizer_state - memory.optimizer_state == 4 * hidden / 2


def test_a_rank_that_has_no_matrix_still_steps():
    norm = nn.Parameter(torch.ones(4))
    norm.grad = torch.ones(4)
    optimizer = Muon({}, build_optimizer([norm], RECIPE), RECIPE)
    for group in optimizer.param_groups:
        group["lr"] = 0.5  # as a step does: all groups are reached
    optimizer.step()
    torch.testing.assert_close(norm.detach(), torch.full((4,), 0.5))


@pytest.mark.parametrize("sharding", ["optimizer", "gradients", "parameters"])
def test_muon_is_refused_where_matrices_are_cut(sharding):
    distributed = {"dp_size": 2, "sharding": sharding}
    why = f'needs whole matrices and sharding="{sharding}" cuts them: use sharding layerwise or'
    with pytest.raises(ConfigError, match=why):
        parse_config({"distributed": distributed, "training": {"optimizer": "muon"}})
