"""Muon against torch.optim.Muon, and what of a model it updates."""

import math
from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from picotron_min.extensions.optimizers.muon import Matrices, Muon, orthogonalise
from picotron_min.extensions.optimizers.whole_matrices import Batch
from picotron_min.extensions.settings import Recipe
from picotron_min.optimizer import build_optimizer
from tests.assembled import make_training
from tests.rows import row

SHAPES = [(24, 8), (8, 24), (16, 16), (6, 1)]
RECIPE = Recipe("muon", 0.02, weight_decay=0.1, momentum=0.9, dtype="bfloat16")
OPTIONS = {"weight_decay": RECIPE.weight_decay, "momentum": RECIPE.momentum}
THEIRS = {"lr": RECIPE.learning_rate, "adjust_lr_fn": "match_rms_adamw", **OPTIONS}


def muon(parameters: list[nn.Parameter], recipe: Recipe = RECIPE) -> Muon:
    def whole(parameter: nn.Parameter) -> Matrices:
        everything = tuple(slice(0, length) for length in parameter.shape)
        return Matrices(Batch(parameter.shape, ["its name"], "", [everything]), [parameter], None)

    return Muon([whole(p) for p in parameters], build_optimizer([], recipe), recipe)


@pytest.mark.quick
def test_updates_in_bfloat16_are_torchs_bit_for_bit():
    generator = torch.Generator().manual_seed(3)
    draws = [[torch.randn(shape, generator=generator) for shape in SHAPES] for _ in range(6)]
    draws[1][0].zero_()
    draws[1][1] *= 1e-9  # below the least norm that is divided by
    results = []
    for optimizer_of in (muon, lambda parameters: torch.optim.Muon(parameters, **THEIRS)):
        parameters = [nn.Parameter(weight.clone()) for weight in draws[0]]
        optimizer = optimizer_of(parameters)
        for gradients in draws[1:]:
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient.clone()
            optimizer.step()
        results.append(parameters)
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_only_what_is_kept_of_the_momentum_is_rounded():
    recipe = replace(RECIPE, moments="bfloat16", dtype="float32")
    weight = nn.Parameter(torch.randn(6, 4))
    optimizer, mu = muon([weight], recipe), recipe.momentum
    kept, expected = torch.zeros(6, 4), weight.detach().clone()
    for _ in range(4):
        weight.grad = torch.randn(6, 4)
        optimizer.step()
        average = kept.lerp(weight.grad, 1 - mu)
        kept = average.bfloat16().float()
        direction = orthogonalise(weight.grad.lerp(average, mu))
        expected.mul_(1 - 0.02 * 0.1).add_(direction, alpha=-0.02 * 0.2 * math.sqrt(6))
        assert torch.equal(weight, expected)
    assert torch.equal(optimizer.state[weight]["momentum_buffer"], average.bfloat16())


def distance_to_torch() -> float:
    """Of the weights after three steps from those that torch's optimizers make of the gradients."""
    config, model_config = row("optimizers: muon weight_decay=0.1 momentum=0.9")
    training, t = make_training(config, model_config), config.training
    reference = {n: nn.Parameter(p.detach().clone()) for n, p in training.parameters.items()}
    hidden = [p for n, p in reference.items() if "_proj" in n]
    others = [
        {"params": [p for n, p in reference.items() if "embed" in n or "lm_head" in n]},
        {"params": [p for n, p in reference.items() if "norm" in n], "weight_decay": 0.0},
    ]
    theirs = torch.optim.Muon(hidden, **THEIRS)
    adamw = torch.optim.AdamW(others, t.learning_rate, t.betas, weight_decay=t.weight_decay)
    for step in range(3):
        training.step(step)
        for name, p in training.parameters.items():
            reference[name].grad = p.grad.clone()
        # torch's iterates in bfloat16, whatever its parameters are; within this, as they are.
        with mock.patch.object(Tensor, "bfloat16", Tensor.clone):
            theirs.step()
        adamw.step()
    return max((p - reference[n]).abs().max().item() for n, p in training.parameters.items())


def test_training_with_muon_is_training_with_torchs(pool):
    assert pool.run(1, distance_to_torch)[0] < 1e-12


def test_a_rank_that_has_no_matrix_still_steps():
    norm = nn.Parameter(torch.ones(4))
    norm.grad = torch.ones(4)
    optimizer = Muon([], build_optimizer([norm], RECIPE), RECIPE)
    for group in optimizer.param_groups:
        group["lr"] = 0.5  # as a step does: all groups are reached
    optimizer.step()
    torch.testing.assert_close(norm.detach(), torch.full((4,), 0.5))
