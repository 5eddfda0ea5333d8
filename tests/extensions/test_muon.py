"""Muon against torch.optim.Muon, and what of a model it updates."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from picotron_min.extensions.optimizers.muon import Matrices, Muon, orthogonalise
from picotron_min.extensions.optimizers.whole_matrices import Batch
from picotron_min.extensions.settings import Recipe
from picotron_min.optimizer import build_optimizer
from tests.assembled import MODELS, make_training
from tests.rows import row

SHAPES = [(24, 8), (8, 24), (16, 16), (6, 1)]
RECIPE = Recipe("muon", 0.02, weight_decay=0.1, momentum=0.9, dtype="bfloat16")


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
    results, keys = [], {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.9}
    theirs = partial(torch.optim.Muon, adjust_lr_fn="match_rms_adamw", **keys)
    for optimizer_of in (muon, theirs):
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


def names_of_matrices() -> list[str]:
    optimizer = make_training(*row("optimizers: muon model=tied")).optimizer
    return [name for batch, *_ in optimizer.matrices for name in batch.names]


def test_matrices_of_layers_alone_are_orthogonalised(pool):
    (names,) = pool.run(1, names_of_matrices)
    shapes = MODELS["tied"].override(num_hidden_layers=2).parameter_shapes()
    assert sorted(names) == sorted(name for name in shapes if "_proj" in name)
