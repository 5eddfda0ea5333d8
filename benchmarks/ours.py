"""Ours: the train step of picotron-min, and the bound, the time of its products alone.

A contender of compare.py is a function of a Place that builds its model and returns its step.
"""

from collections.abc import Callable

import torch

from benchmarks.common import Step, our_step
from benchmarks.products import products_alone
from picotron_min.extensions.build import build_model
from picotron_min.initialise import initialise
from picotron_min.mesh import Axes
from picotron_min.runtime.config_checks import resolve_model
from picotron_min.runtime.config_file import parse_config
from picotron_min.runtime.inputs import open_data
from picotron_min.runtime.token_file import TokenFile
from train import build_run

CPU = torch.device("cpu")


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
    return our_step(build_run(model, config.recipe, place.data))


def bound(place: Place) -> Step:
    return products_alone(picotron_min(place), CPU)
