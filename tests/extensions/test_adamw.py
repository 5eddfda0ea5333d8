"""AdamW with bfloat16 moments: torch's updates but for rounding, and where that would freeze."""

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from picotron_min.extensions.optimizers.adamw import CHUNKS, NarrowAdamW
from picotron_min.extensions.settings import LARGEST_BETA2
from picotron_min.runtime.config import Config, ConfigError
from tests.core import test_checkpoint

SHAPES = [(40, 30), (16, 16), (7, 3), (5, 300), (33,), (500,), (2,)]


def updated(kind, dtype: torch.dtype, steps: int, moments=None) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    draw = partial(torch.randn, generator=generator, dtype=dtype)
    parameters = [nn.Parameter(draw(shape)) for shape in SHAPES]
    groups = [{"params": parameters[:4], "weight_decay": 0.1}]
    groups += [{"params": parameters[4:], "weight_decay": 0.0}, {"params": [], "weight_decay": 0.0}]
    optimizer = kind(groups, 0.01, (0.9, 0.95))
    for state in optimizer.state.values() if moments else ():
        state |= {key: moment.to(moments) for key, moment in state.items() if key != "step"}
    for step in range(steps):
        for parameter in parameters:
            parameter.grad = 0.1 ** (step % 4) * draw(parameter.shape)
        optimizer.step()
    return [parameter.detach() for parameter in parameters]


@pytest.mark.parametrize("most", [512, CHUNKS["cpu"]])  # 1200 elements are cut into three, or not
def test_updates_are_torchs_but_for_the_rounding_of_moments(monkeypatch, most):
    monkeypatch.setitem(CHUNKS, "cpu", most)
    theirs = updated(torch.optim.AdamW, torch.float64, 20)
    for ours, expected in zip(
        updated(NarrowAdamW, torch.float64, 20, moments=torch.float64), theirs, strict=True
    ):
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-12)
    begin, narrow = updated(NarrowAdamW, torch.float64, 0), updated(NarrowAdamW, torch.float64, 20)
    for start, ours, expected in zip(begin, narrow, theirs, strict=True):
        assert 0 < (ours - expected).norm() < 0.01 * (expected - start).norm()


def frozen(beta2: float) -> float:
    """How much too large the second moment is, long after gradients have shrunk tenfold."""
    parameter = nn.Parameter(torch.zeros(2000))
    optimizer = NarrowAdamW([{"params": [parameter], "weight_decay": 0.0}], 0.0, (0.9, beta2))
    generator, exact = torch.Generator().manual_seed(0), torch.zeros(2000)
    for scale in (1.0, 0.1):
        for _ in range(1000):
            parameter.grad = scale * torch.randn(2000, generator=generator)
            optimizer.step()
            exact.mul_(beta2).addcmul_(parameter.grad, parameter.grad, value=1 - beta2)
    return (optimizer.state[parameter]["exp_avg_sq"].float().mean() / exact.mean()).item()


def test_the_second_moment_follows_smaller_gradients_and_freezes_where_it_is_refused():
    assert frozen(LARGEST_BETA2) == pytest.approx(1, abs=0.02)
    assert frozen(0.997) > 5
    for keys, what in (
        ({"betas": [0.9, 0.999]}, r"betas\[1\]=0.999"),
        ({"optimizer": "muon", "momentum": 0.995}, "momentum=0.995"),
    ):
        with pytest.raises(ConfigError, match=f"{what} .* use at most 0.99"):
            test_checkpoint.make_config(moments="bfloat16", **keys)


def resume_with(folder: Path, before: Config, after: Config) -> None:
    training = test_checkpoint.make_training(before)
    training.step(0)
    training.save(folder, 1)
    saved = test_checkpoint.State(training)
    resumed = test_checkpoint.make_training(after)
    resumed.load(folder / "step-00000001", 1)
    for name, tensor in test_checkpoint.State(resumed).items():
        assert torch.equal(tensor, saved[name].to(tensor.dtype)), name


@pytest.mark.parametrize(
    "optimizer,before,after", [("muon", "float32", "bfloat16"), ("adamw", "bfloat16", "float32")]
)
def test_a_resume_with_other_moments_converts_the_saved_ones(
    pool, tmp_path, optimizer, before, after
):
    config = partial(test_checkpoint.make_config, dp=2, optimizer=optimizer, sharding="optimizer")
    pool.run(2, resume_with, tmp_path, config(moments=before), config(moments=after))
