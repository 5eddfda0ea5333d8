"""AdamW with bfloat16 moments: torch's updates but for rounding, and where that would freeze."""

import math
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn

from picotron_min.extensions.optimizers import adamw
from picotron_min.extensions.optimizers.adamw import CHUNKS, NarrowAdamW
from picotron_min.extensions.settings import LARGEST_BETA2
from picotron_min.runtime.config import Config, ConfigError
from tests.core import test_checkpoint


def updated(optimizer_of, steps: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    parameter = nn.Parameter(torch.randn(40, 30, generator=generator))
    optimizer = optimizer_of([{"params": [parameter], "weight_decay": 0.1}])
    for _ in range(steps):
        parameter.grad = torch.randn(40, 30, generator=generator)
        optimizer.step()
    return parameter.detach()


def narrow(groups, dtype=None) -> torch.optim.Optimizer:
    optimizer = NarrowAdamW(groups, 0.01, (0.9, 0.95))
    if dtype:
        for state in optimizer.state.values():
            state |= {key: moment.to(dtype) for key, moment in state.items() if key != "step"}
    return optimizer


def wide(groups) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, 0.01, (0.9, 0.95))


def test_updates_are_torchs_but_for_the_rounding_of_moments():
    ours = updated(lambda groups: narrow(groups, torch.float32), 20)
    torch.testing.assert_close(ours, updated(wide, 20), rtol=1e-5, atol=1e-6)
    begin, ours, theirs = updated(wide, 0), updated(narrow, 100), updated(wide, 100)
    assert 0 < (ours - theirs).norm() < 0.01 * (theirs - begin).norm()


class PlainAdamW(NarrowAdamW):
    """The same, one parameter after the other."""

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            lr, (beta1, beta2) = group["lr"], group["betas"]
            for parameter in group["params"]:
                gradient, state = parameter.grad, self.state[parameter]
                state["step"] += 1
                steps = state["step"].item()
                mean = state["exp_avg"].to(gradient.dtype).lerp_(gradient, 1 - beta1)
                square = state["exp_avg_sq"].to(gradient.dtype).mul_(beta2)
                square.addcmul_(gradient, gradient, value=1 - beta2)
                state["exp_avg"].copy_(mean)
                state["exp_avg_sq"].copy_(square)
                spread = square.sqrt().div_(math.sqrt(1 - beta2**steps)).add_(1e-8)
                parameter.mul_(1 - lr * group["weight_decay"])
                parameter.addcdiv_(mean, spread, value=-lr / (1 - beta1**steps))


SHAPES = [(40, 30), (16, 16), (7, 3), (5, 300), (33,), (500,), (2,)]


@pytest.mark.parametrize("most", [512, CHUNKS["cpu"]])  # 1200 elements are cut into three, or not
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_parameters_in_chunks_have_the_bits_of_a_loop(dtype, most):
    results = []
    for kind in (PlainAdamW, NarrowAdamW):
        generator = torch.Generator().manual_seed(0)
        draw = partial(torch.randn, generator=generator, dtype=dtype)
        parameters = [nn.Parameter(draw(shape)) for shape in SHAPES]
        groups = [{"params": parameters[:4], "weight_decay": 0.1}]
        groups.append({"params": parameters[4:], "weight_decay": 0.0})
        optimizer = kind([*groups, {"params": [], "weight_decay": 0.0}], 0.01, (0.9, 0.95))
        for step in range(4):
            for parameter in parameters:
                parameter.grad = 0.1**step * draw(parameter.shape)
            with mock.patch.dict(adamw.CHUNKS, cpu=most):
                optimizer.step()
        states = [optimizer.state[p] for p in parameters]
        kept = [state[key] for state in states for key in ("exp_avg", "exp_avg_sq", "step")]
        results.append([p.detach() for p in parameters] + kept)
    for plain, ours in zip(*results, strict=True):
        assert torch.equal(ours, plain)


def frozen(beta2: float) -> float:
    """How much too large the second moment is, long after gradients have shrunk tenfold."""
    parameter = nn.Parameter(torch.zeros(2000))
    optimizer = NarrowAdamW([{"params": [parameter], "weight_decay": 0.0}], 0.0, (0.9, beta2))
    generator, exact = torch.Generator().manual_seed(0), torch.zeros(2000)
    for scale in (1.0, 0.1):
        for _ in range(1500):
            parameter.grad = scale * torch.randn(2000, generator=generator)
            optimizer.step()
            exact.mul_(beta2).addcmul_(parameter.grad, parameter.grad, value=1 - beta2)
    return (optimizer.state[parameter]["exp_avg_sq"].float().mean() / exact.mean()).item()


def test_the_second_moment_follows_smaller_gradients_and_freezes_where_it_is_refused():
    assert frozen(LARGEST_BETA2) == pytest.approx(1, abs=0.02)
    assert frozen(0.997) > 10
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


@pytest.mark.parametrize("moments", [("float32", "bfloat16"), ("bfloat16", "float32")], ids=str)
@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_a_resume_with_other_moments_converts_the_saved_ones(pool, tmp_path, optimizer, moments):
    before, after = (
        test_checkpoint.make_config(moments=dtype, dp=2, optimizer=optimizer, sharding="optimizer")
        for dtype in moments
    )
    pool.run(2, resume_with, tmp_path, before, after)
