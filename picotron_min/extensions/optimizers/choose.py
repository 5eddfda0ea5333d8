"""Choice of the optimizer: the core's, or one of this folder."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import nn

from picotron_min import optimizer
from picotron_min.extensions.optimizers.adamw import NarrowAdamW
from picotron_min.extensions.optimizers.muon import Matrix, Muon
from picotron_min.extensions.settings import Recipe


def build_optimizer(
    parameters: Iterable[nn.Parameter], recipe: Recipe, matrices: Sequence[Matrix] = ()
) -> torch.optim.Optimizer:
    """Muon for `matrices`, which are among the parameters, and AdamW for the rest; or another."""
    if recipe.optimizer == "muon":
        hidden = {matrix.parameter for matrix in matrices}
        rest = [parameter for parameter in parameters if parameter not in hidden]
        return Muon(matrices, build_optimizer(rest, replace(recipe, optimizer="adamw")), recipe)
    if recipe.optimizer == "adamw" and recipe.moments == "bfloat16":
        groups = optimizer.parameter_groups(parameters, recipe)
        return NarrowAdamW(groups, recipe.learning_rate, recipe.betas)
    return optimizer.build_optimizer(parameters, recipe)
