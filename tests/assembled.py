"""A short run in any layout, with its parts put together: what one rank would have."""

from typing import NamedTuple

import numpy as np
from torch import Tensor

from picotron_min.placement import part
from picotron_min.runtime.config import Config
from tests.test_layouts import MODELS, make_training
from tests.training import Training

Parts = dict[str, tuple[tuple[slice, ...], np.ndarray]]  # where in the whole, and what is there


class Run(NamedTuple):
    """Of one rank, with its parts; or of all, with whole tensors."""

    losses: list[float]
    norms: list[float]
    val_losses: list[float]  # before the last step, and after it
    gradients: dict  # of the last step, scaled and clipped
    weights: dict
    shapes: dict[str, tuple[int, ...]]


def train_briefly(config: Config, model: str, steps: int) -> Run:
    num_layers = config.model.num_hidden_layers
    model_config = MODELS[model].override(num_hidden_layers=num_layers)
    training = make_training(config, model_config)
    results, val_losses = [], []
    for step in range(steps):
        if step == steps - 1:
            val_losses.append(training.evaluate())
        results.append(training.step(step))
    val_losses.append(training.evaluate())
    return Run(
        [result.loss for result in results],
        [result.grad_norm for result in results],
        val_losses,
        parts_of(training, {name: p.grad for name, p in training.parameters.items()}),
        parts_of(training, {name: p.data for name, p in training.parameters.items()}),
        model_config.parameter_shapes(),
    )


def parts_of(training: Training, tensors: dict[str, Tensor]) -> Parts:
    """This rank's tensors, each with its place in the whole."""
    table, axes = training.model.placements, training.axes
    shapes, parts = training.model_config.parameter_shapes(), {}
    for name, tensor in tensors.items():
        cuts = [cut for cut in (*table[name].cuts, table[name].shard) if cut]
        parts[name] = part(shapes[name], cuts, axes.ranks, axes.sizes), tensor.clone().numpy()
    return parts


def whole_run(pool, config: Config, model: str, steps: int = 3) -> Run:
    """The run that its ranks made together; they must agree, and hold every element."""
    ranks: list[Run] = pool.run(config.world_size, train_briefly, config, model, steps)
    first = ranks[0]
    for run in ranks:
        assert run[:3] == first[:3], "all ranks report the same"
    gradients = assemble([run.gradients for run in ranks], first.shapes)
    weights = assemble([run.weights for run in ranks], first.shapes)
    return first._replace(gradients=gradients, weights=weights)


def assemble(ranks: list[Parts], shapes: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    wholes = {name: np.full(shape, np.nan) for name, shape in shapes.items()}
    for parts in ranks:
        for name, (slices, values) in parts.items():
            there = wholes[name][slices]
            known = ~np.isnan(there)
            assert np.array_equal(there[known], values[known]), f"copies of {name} differ"
            wholes[name][slices] = values
    missing = [name for name, whole in wholes.items() if np.isnan(whole).any()]
    assert not missing, "no rank has these whole"
    return wholes


def assert_same(ours: Run, theirs: Run, atol: float = 1e-10) -> None:
    for kind in ("losses", "norms", "val_losses"):
        np.testing.assert_allclose(
            getattr(ours, kind), getattr(theirs, kind), rtol=0, atol=atol, err_msg=kind
        )
    for kind in ("gradients", "weights"):
        for name, expected in getattr(theirs, kind).items():
            np.testing.assert_allclose(
                getattr(ours, kind)[name], expected, rtol=0, atol=atol, err_msg=f"{kind} of {name}"
            )
