"""The central claim: N ranks train the same model as one rank.

In float64 with SGD, because looser tolerances and Adam hide wrong scales.
"""

import functools
import itertools
from functools import partial
from typing import NamedTuple

import numpy as np
import pytest
import torch

from picotron_min.extensions.settings import SIZES, ModelConfig
from picotron_min.mesh import build_axes
from picotron_min.runtime.config import Config
from picotron_min.runtime.config_file import parse_config
from picotron_min.runtime.token_file import TokenFile
from tests.training import Training, open_data, shard_dim

GLOBAL_BATCH = 24
STEPS = 2


class Trace(NamedTuple):
    """The results of a run that are compared with another run's."""

    losses: list[float]
    norms: list[float]
    gradients: dict[str, np.ndarray]  # of the last step, scaled and clipped; this rank's part
    weights: dict[str, np.ndarray]  # this rank's part
    val_loss: float
    tp_rank: int


# 61 ids over 2, 4 or 8 ranks leave the last with fewer: 31 + 30, 16 + 16 + 16 + 13, 8 x 7 + 5.
MODEL = ModelConfig(61, 32, 48, 8, 8, 8)
MODELS = {
    "untied": MODEL,
    "tied": MODEL.override(tie_word_embeddings=True),
    "grouped-query": MODEL.override(num_key_value_heads=2),
}


def make_config(
    dp=1,
    tp=1,
    micro_batches=1,
    pp=1,
    chunks=1,
    sequence_parallel=False,
    tp_overlap=False,
    overlap=True,
    engine="1f1b",
    recompute="none",
    cp=1,
    cp_engine="ring",
    dtype="float64",
    **training,
) -> Config:
    return parse_config(
        {
            "distributed": {
                "dp_size": dp,
                "tp_size": tp,
                "pp_size": pp,
                "pp_chunks": chunks,
                "cp_size": cp,
                "cp_engine": cp_engine,
                "sequence_parallel": sequence_parallel,
                "overlap": overlap,
                "tp_overlap": tp_overlap,
                "pp_engine": engine,
                "use_cpu": True,
            },
            "model": {name: getattr(MODEL, name) for name in SIZES if name != "vocab_size"}
            # One more layer than stages, so that they are of different sizes.
            | {"num_hidden_layers": pp * chunks + 1, "dtype": dtype, "recompute": recompute},
            "training": {
                "optimizer": "sgd",
                "learning_rate": 0.5,
                "weight_decay": 0.01,
                "grad_clip": 0.5,
                "seq_length": 24 if cp == 3 else 16,  # 2 cp and cp tp must divide it
                "micro_batch_size": GLOBAL_BATCH // (dp * micro_batches),
                "gradient_accumulation_steps": micro_batches,
                "eval_batches": 1,
            }
            | training,
        }
    )


def make_training(config: Config, model_config: ModelConfig) -> Training:
    t, device = config.training, torch.device("cpu")
    axes = build_axes(device, config.layout)
    tokens = np.arange(100 * t.seq_length + 1) ** 2 % model_config.vocab_size
    text = TokenFile(tokens.astype(np.uint16), num_bytes=len(tokens), num_documents=1)
    data = open_data(config, text, axes.dp.rank, axes.cp.rank)
    return Training(config, model_config, axes, device, data)


def train_briefly(config: Config, model: str) -> Trace:
    model_config = MODELS[model].override(num_hidden_layers=config.model.num_hidden_layers)
    training = make_training(config, model_config)
    results = [training.step(step) for step in range(STEPS)]
    gradients = {name: p.grad for name, p in training.parameters.items()}
    weights = {name: p.detach() for name, p in training.parameters.items()}
    return Trace(
        [result.loss for result in results],
        [result.grad_norm for result in results],
        {name: tensor.numpy() for name, tensor in gradients.items()},
        {name: tensor.numpy() for name, tensor in weights.items()},
        training.evaluate(),
        training.axes.tp.rank,
    )


@functools.cache
def one_rank(pool, model: str, layers: int, seq_length: int) -> Trace:
    config = make_config(seq_length=seq_length)
    config = config.model_copy(
        update={"model": config.model.model_copy(update={"num_hidden_layers": layers})}
    )
    (trace,) = pool.run(1, train_briefly, config, model)
    return trace


def assert_trains_the_same(pool, config: Config, model: str) -> None:
    reference = one_rank(pool, model, config.model.num_hidden_layers, config.training.seq_length)
    names = set()
    close = partial(np.testing.assert_allclose, rtol=0, atol=1e-10)
    for trace in pool.run(config.world_size, train_briefly, config, model):
        close(trace.losses, reference.losses, err_msg="losses")
        close(trace.norms, reference.norms, err_msg="gradient norms")
        close(trace.val_loss, reference.val_loss, err_msg="validation loss")
        for name in trace.weights:
            part = partial(part_of, name=name, rank=trace.tp_rank, size=config.distributed.tp_size)
            gradient, weight = part(reference.gradients[name]), part(reference.weights[name])
            close(trace.gradients[name], gradient, err_msg=f"gradient of {name}")
            close(trace.weights[name], weight, err_msg=name)
        names |= trace.weights.keys()
    assert names == reference.weights.keys()


def part_of(whole: np.ndarray, name: str, rank: int, size: int) -> np.ndarray:
    """A tp rank's part of a parameter: 61 rows over 4 ranks are 16, 16, 16 and 13."""
    dim = shard_dim(name)
    if dim is None:
        return whole
    each = -(-whole.shape[dim] // size)
    return np.split(whole, range(each, whole.shape[dim], each), dim)[rank]


POWERS = (1, 2, 4, 8)
DATA = [(dp, m) for dp in POWERS for m in (1, 2, 3) if GLOBAL_BATCH % (dp * m) == 0]
TENSOR = [
    (dp, tp, model)
    for dp in POWERS
    for tp in POWERS[1:]
    for model in MODELS
    if dp * tp <= 8 and MODELS[model].num_key_value_heads % tp == 0
]


@pytest.mark.turns(3, 7)
@pytest.mark.parametrize("model", ["untied", "tied"])
@pytest.mark.parametrize("dp,micro_batches", DATA)
def test_data_parallel_layouts_train_the_same_model_as_one_rank(pool, dp, micro_batches, model):
    assert_trains_the_same(pool, make_config(dp, micro_batches=micro_batches), model)


@pytest.mark.turns(3, 7)
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["plain", "sequence"])
@pytest.mark.parametrize("dp,tp,model", TENSOR)
def test_tensor_parallel_layouts_train_the_same_model(pool, dp, tp, model, sequence_parallel):
    config = make_config(dp, tp, sequence_parallel=sequence_parallel)
    assert_trains_the_same(pool, config, model)


# Every (dp, pp, tp) of at most 8 ranks with every engine, tied and untied: ten for each layout. The
# five variants alternate, so that every engine meets each of them; `pytest --all-layouts` runs all
# combinations and takes ten minutes. Few sizes divide 3 micro-batches.
VARIANTS = [(2, "none"), (3, "full"), (6, "none"), (4, "selective"), (2, "full")]
PIPELINES = [
    (dp, pp, tp, engine, model)
    for pp in (2, 3, 4, 8)
    for dp, tp in itertools.product(POWERS, POWERS)
    if dp * pp * tp <= 8
    for engine in ("afab", "1f1b", "interleaved", "zb_h1", "zb_v")
    for model in ("untied", "tied")
    if pp < 8 or not engine.startswith("zb")
]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.function is test_pipelines_train_the_same_model:
        pairs = zip(PIPELINES, itertools.cycle(VARIANTS), strict=False)
        if metafunc.config.getoption("--all-layouts"):
            pairs = itertools.product(PIPELINES, VARIANTS)
        metafunc.parametrize("layout,variant", list(pairs), ids=str)


@pytest.mark.turns(2, 7)
def test_pipelines_train_the_same_model(pool, layout, variant):
    dp, pp, tp, engine, model = layout
    micro_batches, recompute = variant
    if GLOBAL_BATCH % (dp * micro_batches):
        micro_batches = 3
    config = make_config(
        dp,
        tp,
        micro_batches,
        pp,
        chunks=2 if engine in ("interleaved", "zb_v") and pp < 8 else 1,
        sequence_parallel=tp > 1 and recompute != "none",
        tp_overlap=tp > 1 and recompute != "none" and model == "tied",
        engine=engine,
        recompute=recompute,
    )
    assert_trains_the_same(pool, config, model)


# Every (dp, pp, cp, tp) of at most 8 ranks with both engines; the other choices alternate.
CONTEXTS = [
    (dp, pp, cp, tp, cp_engine)
    for dp, pp, cp, tp in itertools.product(POWERS, (1, 2, 3, 4), (2, 3, 4, 8), POWERS)
    if dp * pp * cp * tp <= 8
    for cp_engine in ("ring", "ulysses")
    if cp_engine == "ring" or MODEL.num_attention_heads % (cp * tp) == 0
]
CONTEXT_VARIANTS = [
    (engine, model, recompute)
    for engine in ("1f1b", "afab", "interleaved")
    for model, recompute in [("untied", "none"), ("tied", "full"), ("grouped-query", "selective")]
]


@pytest.mark.turns(2, 5)
@pytest.mark.parametrize(
    "layout,variant", list(zip(CONTEXTS, itertools.cycle(CONTEXT_VARIANTS), strict=False)), ids=str
)
def test_context_parallel_layouts_train_the_same_model(pool, layout, variant):
    dp, pp, cp, tp, cp_engine = layout
    engine, model, recompute = variant
    if MODELS[model].num_key_value_heads % tp:
        model = "untied"
    config = make_config(
        dp,
        tp,
        micro_batches=3 if pp > 1 else 1,
        pp=pp,
        chunks=2 if engine == "interleaved" and pp > 1 else 1,
        sequence_parallel=tp > 1 and recompute != "none",
        tp_overlap=tp > 1 and recompute != "none" and model == "tied",
        engine=engine,
        recompute=recompute,
        cp=cp,
        cp_engine=cp_engine,
    )
    assert_trains_the_same(pool, config, model)


@pytest.mark.turns(3, 5)
@pytest.mark.parametrize("engine", ["afab", "1f1b"])
@pytest.mark.parametrize("recompute", ["full", "selective"])
@pytest.mark.parametrize("tp", [1, 2])
def test_schedule_and_recompute_train_the_same_model(pool, tp, engine, recompute):
    config = make_config(2, tp, 2, sequence_parallel=tp > 1, engine=engine, recompute=recompute)
    assert_trains_the_same(pool, config, "untied")


# dp, tp, pp, cp, sequence parallelism: the forms that the core has, without the extension.
SIMPLE = [(1, 2, 1, 1, False), (1, 4, 1, 1, True), (2, 2, 2, 1, True), (1, 2, 2, 2, False)]


@pytest.mark.parametrize("layout", [(2, 1, 1, 1, False), *SIMPLE], ids=str)
def test_the_simple_forms_of_the_core_train_the_same_model(pool, layout):
    dp, tp, pp, cp, sequence_parallel = layout
    config = make_config(
        dp, tp, 2, pp, sequence_parallel=sequence_parallel, cp=cp, recompute="full", overlap=False
    )
    assert_trains_the_same(pool, config, "tied")


def test_the_reference_run_learns_and_clips(pool):
    reference = one_rank(pool, "untied", 2, 16)
    assert reference.losses[-1] < reference.losses[0]
    norm = np.sqrt(sum((gradient**2).sum() for gradient in reference.gradients.values()))
    assert min(reference.norms) > 0.5 and norm == pytest.approx(0.5, abs=1e-5)
