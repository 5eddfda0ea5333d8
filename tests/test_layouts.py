"""The central claim: N ranks train the same model as one rank.

In float64 with SGD, because looser tolerances and Adam hide wrong scales.
"""

import functools
from typing import NamedTuple

import numpy as np
import pytest
import torch

from picotron_min.config import Config, parse_config
from picotron_min.data import Batches
from picotron_min.llama_config import LlamaConfig
from picotron_min.mesh import build_axes
from train import Training

GLOBAL_BATCH = 8
STEPS = 3
VOCABULARY = 61


class Trace(NamedTuple):
    """What a run leaves behind that another can be compared with."""

    losses: list[float]
    norms: list[float]
    gradients: dict[str, np.ndarray]  # of the last step, scaled and clipped
    weights: dict[str, np.ndarray]
    val_loss: float


def make_config(dp=1, micro_batches=1, engine="1f1b", recompute="none", **training) -> Config:
    return parse_config(
        {
            "distributed": {"dp_size": dp, "pp_engine": engine, "use_cpu": True},
            "model": {"dtype": "float64", "recompute": recompute},
            "training": {
                "optimizer": "sgd",
                "learning_rate": 0.5,
                "weight_decay": 0.01,
                "grad_clip": 0.5,
                "seq_length": 16,
                "micro_batch_size": GLOBAL_BATCH // (dp * micro_batches),
                "gradient_accumulation_steps": micro_batches,
                "eval_batches": 1,
            }
            | training,
        }
    )


def make_training(config: Config, tied: bool) -> Training:
    d, t = config.distributed, config.training
    device = torch.device("cpu")
    axes = build_axes(device, pp=d.pp_size, dp=d.dp_size, cp=d.cp_size, tp=d.tp_size)
    llama = LlamaConfig(VOCABULARY, 32, 48, 4, 4, 2, tie_word_embeddings=tied)
    tokens = np.random.default_rng(0).integers(VOCABULARY, size=30 * t.seq_length + 1)
    data = Batches(
        tokens.astype(np.uint16),
        seq_length=t.seq_length,
        seed=t.seed,
        micro_batch_size=t.micro_batch_size,
        num_micro_batches=t.gradient_accumulation_steps,
        dp_rank=axes.dp.rank,
        dp_size=axes.dp.size,
        eval_batches=t.eval_batches,
    )
    return Training(config, llama, axes, device, data)


def train_briefly(config: Config, tied: bool) -> Trace:
    training = make_training(config, tied)
    results = [training.step(step) for step in range(STEPS)]
    parameters = dict(training.model.named_parameters())
    return Trace(
        [result.loss for result in results],
        [result.grad_norm for result in results],
        {name: p.grad.numpy() for name, p in parameters.items()},
        {name: p.detach().numpy() for name, p in parameters.items()},
        training.evaluate(),
    )


@functools.cache
def one_rank(pool, tied: bool) -> Trace:
    (trace,) = pool.run(1, train_briefly, make_config(), tied)
    return trace


def assert_same(trace: Trace, reference: Trace) -> None:
    close = functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-10)
    close(trace.losses, reference.losses, err_msg="losses")
    close(trace.norms, reference.norms, err_msg="gradient norms")
    close(trace.val_loss, reference.val_loss, err_msg="validation loss")
    for name in reference.weights:
        close(trace.gradients[name], reference.gradients[name], err_msg=f"gradient of {name}")
        close(trace.weights[name], reference.weights[name], err_msg=name)
    assert trace.weights.keys() == reference.weights.keys()


LAYOUTS = [(dp, m) for dp in (1, 2, 4, 8) for m in (1, 2, 4, 8) if dp * m <= GLOBAL_BATCH]


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("dp,micro_batches", LAYOUTS)
def test_every_layout_trains_the_same_model_as_one_rank(pool, dp, micro_batches, tied):
    traces = pool.run(dp, train_briefly, make_config(dp, micro_batches), tied)
    for trace in traces:
        assert_same(trace, one_rank(pool, tied))


@pytest.mark.parametrize("engine", ["afab", "1f1b"])
@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_schedule_and_recompute_train_the_same_model(pool, engine, recompute):
    config = make_config(2, 2, engine=engine, recompute=recompute)
    for trace in pool.run(2, train_briefly, config, False):
        assert_same(trace, one_rank(pool, False))


def test_the_reference_run_learns_and_clips(pool):
    reference = one_rank(pool, False)
    assert reference.losses[-1] < reference.losses[0]
    norm = np.sqrt(sum((gradient**2).sum() for gradient in reference.gradients.values()))
    assert min(reference.norms) > 0.5 and norm == pytest.approx(0.5, abs=1e-5)
