"""Ours: the train step of picotron-min, and the bound of what it cannot do without.

A contender of compare.py is a function of a Place that builds its model and returns its step.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.common import Done, Step, TrainStep
from benchmarks.products import Products
from picotron_min.extensions.build import build_model
from picotron_min.initialise import initialise
from picotron_min.mesh import Axes
from picotron_min.runtime.config_checks import resolve_model
from picotron_min.runtime.config_file import parse_config
from picotron_min.runtime.inputs import open_data
from picotron_min.runtime.token_file import TokenFile
from train import build_run

CPU = torch.device("cpu")
COPIED = 2**25  # bytes: more than a core's caches have


class Place:
    """What a contender is built from on one rank; `sections` are of a config.json."""

    def __init__(self, sections: dict, axes: Axes, text: TokenFile) -> None:
        self.config, self.axes = parse_config(sections), axes
        self.model_config = resolve_model(self.config)
        self.data = open_data(self.config, text, axes.dp.rank, axes.cp.rank)


Build = Callable[[Place], Step]


def picotron_min(place: Place) -> Step:
    config, model_config, axes = place.config, place.model_config, place.axes
    model = build_model(model_config, config.layout, config.workload, axes, CPU)
    initialise(model.parameters, model_config, config.training.seed, model.placements, axes)
    model.weights_changed()  # renews what was made of the weights, such as copies in bfloat16
    return TrainStep(build_run(model, config.recipe, place.data))


def bound(place: Place) -> Step:
    """Only what our step cannot do without: its products, and copies of the bytes that it moves."""
    step, source = picotron_min(place), torch.ones(COPIED // 4)
    step(0)  # makes the optimizer's state
    for axis in place.axes:
        axis.ledger.take_bytes()
    with Products() as products:
        step(1)
    # A byte that is sent is read and written, as in a copy.
    moved = 2 * sum(axis.ledger.take_bytes() for axis in place.axes)
    moved += bytes_of_update(step.run.optimizer)
    whole, rest = divmod(moved // 2, COPIED)
    pieces, target = [source] * whole + [source[: rest // 4]], torch.empty_like(source)
    del step  # with its weights and state, whose memory the copies would compete for

    def again(index: int) -> Done:
        products.again()
        for part in pieces:
            target[: len(part)].copy_(part)
        return Done(math.nan, math.nan)

    return again


def bytes_of_update(optimizer: torch.optim.Optimizer) -> int:
    """Read and written: weights and what is stored of them. Read twice: gradients."""
    weights = [p for group in optimizer.param_groups for p in group["params"]]
    stored = [x for p in weights for x in optimizer.state[p].values() if isinstance(x, Tensor)]
    return 2 * sum(x.nbytes for x in [*weights, *weights, *stored])
