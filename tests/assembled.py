"""Short runs in any layout, with their parts put together: what one rank would have."""

import functools
import json
import tempfile
from dataclasses import asdict
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from picotron_min.extensions.settings import SIZES, ModelConfig
from picotron_min.mesh import build_axes
from picotron_min.placement import part
from picotron_min.runtime.config import OVERRIDES, Config
from picotron_min.runtime.inputs import open_data
from picotron_min.runtime.token_file import TokenFile
from tests.training import Training, config_of

GLOBAL_BATCH = 24

# 61 ids over 2, 4 or 8 ranks leave the last with fewer: 31 + 30, 16 + 16 + 16 + 13, 8 x 7 + 5.
MODEL = ModelConfig(61, 32, 48, 8, 8, 8)
MODELS = {
    "untied": MODEL,
    "tied": MODEL.override(tie_word_embeddings=True),
    "grouped-query": MODEL.override(num_key_value_heads=2),
}


def make_config(
    dp=1, tp=1, micro_batches=1, pp=1, chunks=1, engine="1f1b", cp=1, layers=None, model=(), **more
) -> Config:
    """A config of MODEL; `layers`: one more than stages, so that they are of different sizes."""
    sizes = {name: getattr(MODEL, name) for name in SIZES if name != "vocab_size"}
    keys = {
        **{"dp": dp, "tp": tp, "pp": pp, "cp": cp, "pp_engine": engine, "pp_chunks": chunks},
        "use_cpu": True,
        "dtype": "float64",
        "num_hidden_layers": layers or pp * chunks + 1,
        "optimizer": "sgd",
        "learning_rate": 0.5,
        "weight_decay": 0.01,
        "grad_clip": 0.5,
        "seq_length": 24 if cp == 3 else 16,  # 2 cp and cp tp must divide it
        "micro_batch_size": GLOBAL_BATCH // (dp * micro_batches),
        "gradient_accumulation_steps": micro_batches,
        "eval_batches": 1,
    }
    return config_of(**sizes | keys | dict(model) | more)


def make_training(
    config: Config, model: str | ModelConfig, device: str = "cpu", weights=None
) -> Training:
    """Of a model, or the name of one above, with as many layers as the config has."""
    model_config = model if isinstance(model, ModelConfig) else MODELS[model]
    if layers := config.model.num_hidden_layers:
        model_config = model_config.override(num_hidden_layers=layers)
    t, device = config.training, torch.device(device)
    axes = build_axes(device, config.layout)
    tokens = np.arange(100 * t.seq_length + 1) ** 2 % model_config.vocab_size
    # Documents of 1 to 41 tokens, so of many lengths in rows of 16 and 24.
    ends = np.cumsum(np.arange(len(tokens)) * 7 % 41 + 1)
    ends = np.append(ends[ends < len(tokens)], len(tokens))
    text = TokenFile(tokens.astype(np.uint16), len(tokens), len(ends), ends)
    depths = model_config.num_nextn_predict_layers
    data = open_data(config, text, axes.dp.rank, axes.cp.rank, depths)
    return Training(config, model_config, axes, device, data, weights)


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
    further: list[list[float]]  # the losses of further tokens, in each step
    shapes: dict[str, tuple[int, ...]]


def train_briefly(config: Config, model: str | ModelConfig, steps: int) -> Run:
    training, results, routed = make_training(config, model), [], []
    for step in range(steps):
        if step == steps - 1:
            val_loss = training.evaluate()  # leaves nothing behind that the last step would see
        results.append(training.step(step))
        routed += [experts.routed.numpy() for experts in training.experts]
    model_config = training.model_config
    return Run(
        [result.loss for result in results],
        [result.grad_norm for result in results],
        val_loss,
        parts_of(training, {name: p.grad for name, p in training.parameters.items()}),
        parts_of(training, {name: p.data for name, p in training.parameters.items()}),
        parts_of(training, training.model.buffers),
        routed,
        [[v for k, v in result.measures.items() if k[:4] == "mtp_"] for result in results],
        model_config.parameter_shapes() | model_config.buffer_shapes(),
    )


def parts_of(training: Training, tensors: dict[str, Tensor]) -> Parts:
    """This rank's tensors, each with its place in the whole."""
    table, axes = training.model.placements, training.axes
    parts, shapes = {}, training.model_config.parameter_shapes()
    shapes |= training.model_config.buffer_shapes()
    for name, tensor in tensors.items():
        where = part(shapes[name], table[name].owned, axes.ranks, axes.sizes)
        parts[name] = where, tensor.clone().numpy()
    return parts


def whole_run(
    pool,
    config: Config,
    model: str | ModelConfig,
    steps: int = 3,
    train=train_briefly,
    atol: float = 0.0,
) -> Run:
    """The run that its ranks made together; they must agree, and hold every element.

    `atol` is of copies. Where tp cuts a vocabulary unevenly, buckets have other sizes, the chunks
    of a ring begin elsewhere, and copies of a norm differ by a last bit between tp ranks.
    """
    ranks: list[Run] = pool.run(config.world_size, train, config, model, steps)
    first = ranks[0]
    for run in ranks:
        assert run[:3] == first[:3], "all ranks report the same"
    wholes = {}
    for kind in ("gradients", "weights", "biases"):
        parts = [getattr(run, kind) for run in ranks]
        of_buffers = (kind == "biases",)
        shapes = {n: s for n, s in first.shapes.items() if n.endswith("_bias") in of_buffers}
        wholes[kind] = assemble(parts, shapes, atol)
    return first._replace(**wholes)


def assemble(
    ranks: list[Parts], shapes: dict[str, tuple[int, ...]], atol: float = 0.0
) -> dict[str, np.ndarray]:
    wholes = {name: np.full(shape, np.nan) for name, shape in shapes.items()}
    for parts in ranks:
        for name, (slices, values) in parts.items():
            there = wholes[name][slices]
            known = ~np.isnan(there)
            equal = np.allclose(there[known], values[known], rtol=0, atol=atol)
            assert equal, f"copies of {name} differ"
            wholes[name][slices] = values
    missing = [name for name, whole in wholes.items() if np.isnan(whole).any()]
    assert not missing, "no rank has these whole"
    return wholes


def assert_same(ours: Run, theirs: Run, atol: float = 1e-10) -> None:
    for kind in ("losses", "norms", "val_loss", "routed", "further"):
        np.testing.assert_allclose(
            getattr(ours, kind), getattr(theirs, kind), rtol=0, atol=atol, err_msg=kind
        )
    for kind in ("gradients", "weights", "biases"):
        for name, expected in getattr(theirs, kind).items():
            np.testing.assert_allclose(
                getattr(ours, kind)[name], expected, rtol=0, atol=atol, err_msg=f"{kind} of {name}"
            )


def on_one_rank(config: Config) -> Config:
    """The same training in its plainest form: one rank, and one micro-batch if losses allow it."""
    raw, t = config.model_dump(by_alias=True), config.training
    count = 1
    # Losses, capacities and scales of 8 bits are of a micro-batch of one rank.
    if t.moe_aux_loss_coeff or t.moe_expert_capacity_factor or config.model.fp8:
        count = config.distributed.dp_size * t.gradient_accumulation_steps
    elif t.moe_global_aux_loss_coeff:  # of a step so far, in which the ranks are together
        count = t.gradient_accumulation_steps
    raw["distributed"] = {"use_cpu": True}
    raw["model"] |= {"recompute": "none", "offload": 0, "compile": False}
    raw["training"] |= {"gradient_accumulation_steps": count}
    raw["training"] |= {"micro_batch_size": config.global_batch // count}
    return Config.model_validate(raw)


@functools.cache
def _one_rank(pool, config: str, model: str | ModelConfig, steps: int) -> Run:
    return whole_run(pool, Config.model_validate_json(config), model, steps)


def assert_trains_as_one_rank(pool, config: Config, model: str | ModelConfig, steps=2) -> None:
    plain = on_one_rank(config).model_dump_json(by_alias=True)
    ours = whole_run(pool, config, model, steps, atol=1e-10)
    try:
        assert_same(ours, _one_rank(pool, plain, model, steps))
    except AssertionError:
        print(f"the first wrong tensor, and why:\n{command_of(config, model)}")
        raise


def command_of(config: Config, model: str | ModelConfig) -> str:
    """What explains a difference: see docs/difference.md."""
    numbers = asdict(model if isinstance(model, ModelConfig) else MODELS[model])
    raw = config.model_dump(by_alias=True)
    raw["model"] |= {key: numbers[key] for key in OVERRIDES if key in numbers} | {"vocab_size": 257}
    raw["model"]["num_hidden_layers"] = config.model.num_hidden_layers
    with tempfile.NamedTemporaryFile("w", suffix=".json", delete=False) as file:
        json.dump(raw, file)
    return f"python -m difference --config {file.name}"
