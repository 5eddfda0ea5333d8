"""A short run in any layout, with its parts put together: what one rank would have."""

from typing import NamedTuple

import numpy as np
from torch import Tensor

from picotron_min.extensions.settings import ModelConfig
from picotron_min.extensions.sharding.rows import shard_of
from picotron_min.placement import part
from picotron_min.runtime.config import Config
from tests.core.test_layouts import MODELS, make_training
from tests.training import Training

Parts = dict[str, tuple[tuple[slice, ...], np.ndarray]]  # where in the whole, and what is there


class Run(NamedTuple):
    """Of one rank, with its parts; or of all, with whole tensors."""

    losses: list[float]
    norms: list[float]
    val_loss: float  # before the last step
    gradients: dict  # of the last step, scaled and clipped
    weights: dict
    biases: dict  # of routers
    routed: list[np.ndarray]  # where tokens went, in each step
    shapes: dict[str, tuple[int, ...]]


def train_briefly(config: Config, model: str | ModelConfig, steps: int) -> Run:
    num_layers = config.model.num_hidden_layers
    model_config = model if isinstance(model, ModelConfig) else MODELS[model]
    model_config = model_config.override(num_hidden_layers=num_layers)
    training = make_training(config, model_config)
    results, routed = [], []
    for step in range(steps):
        if step == steps - 1:
            val_loss = training.evaluate()  # leaves nothing behind that the last step would see
        results.append(training.step(step))
        routed += [experts.routed.numpy() for experts in training.experts]
    return Run(
        [result.loss for result in results],
        [result.grad_norm for result in results],
        val_loss,
        parts_of(training, {name: p.grad for name, p in training.parameters.items()}),
        parts_of(training, {name: p.data for name, p in training.parameters.items()}),
        parts_of(training, training.model.buffers),
        routed,
        model_config.parameter_shapes() | model_config.buffer_shapes(),
    )


def parts_of(training: Training, tensors: dict[str, Tensor]) -> Parts:
    """This rank's tensors, each with its place in the whole."""
    table, axes = training.model.placements, training.axes
    parts, shapes = {}, training.model_config.parameter_shapes()
    shapes |= training.model_config.buffer_shapes()
    for name, tensor in tensors.items():
        cuts = [cut for cut in (*table[name].cuts, shard_of(table[name])) if cut]
        parts[name] = part(shapes[name], cuts, axes.ranks, axes.sizes), tensor.clone().numpy()
    return parts


def whole_run(
    pool,
    config: Config,
    model: str | ModelConfig,
    steps: int = 3,
    train=train_briefly,
    timeout: float = 60,
) -> Run:
    """The run that its ranks made together; they must agree, and hold every element."""
    ranks: list[Run] = pool.run(config.world_size, train, config, model, steps, timeout=timeout)
    first = ranks[0]
    for run in ranks:
        assert run[:3] == first[:3], "all ranks report the same"
    wholes = {}
    for kind in ("gradients", "weights", "biases"):
        parts = [getattr(run, kind) for run in ranks]
        of_buffers = (kind == "biases",)
        shapes = {n: s for n, s in first.shapes.items() if n.endswith("_bias") in of_buffers}
        wholes[kind] = assemble(parts, shapes)
    return first._replace(**wholes)


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
    for kind in ("losses", "norms", "val_loss"):
        np.testing.assert_allclose(
            getattr(ours, kind), getattr(theirs, kind), rtol=0, atol=atol, err_msg=kind
        )
    np.testing.assert_allclose(ours.routed, theirs.routed, rtol=0, atol=atol, err_msg="routed")
    for kind in ("gradients", "weights", "biases"):
        for name, expected in getattr(theirs, kind).items():
            np.testing.assert_allclose(
                getattr(ours, kind)[name], expected, rtol=0, atol=atol, err_msg=f"{kind} of {name}"
            )
