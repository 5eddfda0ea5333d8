"""AdamW with bfloat16 moments: torch's updates but for rounding, half the state, and its trap."""

import math
import weakref
from collections import Counter
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from picotron_min.extensions.optimizers import adamw
from picotron_min.extensions.optimizers.adamw import CHUNKS, NarrowAdamW
from picotron_min.extensions.settings import LARGEST_BETA2
from picotron_min.runtime.config import Config, ConfigError
from tests.assembled import assert_same, whole_run
from tests.core import test_checkpoint
from tests.core.test_costs import GQA, planned
from tests.extensions import test_muon


def updated(optimizer_of, steps: int, scale=1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    parameter = nn.Parameter(torch.randn(40, 30, generator=generator))
    optimizer = optimizer_of([{"params": [parameter], "weight_decay": 0.1}])
    for _ in range(steps):
        parameter.grad = scale * torch.randn(40, 30, generator=generator)
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


def test_with_wide_moments_updates_are_torchs():
    ours = updated(lambda groups: narrow(groups, torch.float32), 20)
    torch.testing.assert_close(ours, updated(wide, 20), rtol=1e-5, atol=1e-6)


def test_rounding_changes_updates_by_less_than_a_hundredth():
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


class Watched(TorchDispatchMode):
    """Counts operations that compute, and the most bytes of new tensors at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.operations, self.bytes, self.peak = Counter(), 0, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result, name = function(*args, **(kwargs or {})), str(function)
        if "empty" in name or "_to_copy" in name or name.startswith("aten.sqrt."):
            self.bytes += result.nbytes
            self.peak = max(self.peak, self.bytes)
            weakref.finalize(result, self.freed, result.nbytes)
        if not any(word in name for word in ("view", "split", "empty", "profiler")):
            self.operations[name] += 1
        return result

    def freed(self, num_bytes: int) -> None:
        self.bytes -= num_bytes


SHAPES = [(40, 30), (16, 16), (7, 3), (5, 300), (33,), (500,), (2,)]


# With 512: 1200 in three, the last with 16 x 16 and 7 x 3; 1500 in three; 33; 500 and 2.
@pytest.mark.parametrize("most,num_chunks", [(512, 3 + 3 + 2), (CHUNKS["cpu"], 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_step_of_few_operations_has_the_bits_of_a_loop(dtype, most, num_chunks):
    results, watched = [], []
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
            with Watched() as mode, mock.patch.dict(adamw.CHUNKS, cpu=most):
                optimizer.step()
        states = [optimizer.state[p] for p in parameters]
        kept = [state[key] for state in states for key in ("exp_avg", "exp_avg_sq", "step")]
        results.append([p.detach() for p in parameters] + kept)
        watched.append(mode)
    for plain, ours in zip(*results, strict=True):
        assert torch.equal(ours, plain)
    plain, ours = watched
    assert ours.operations.total() == 13 * num_chunks + 2  # one of the 13 reads the steps
    assert plain.operations.total() == 14 * len(SHAPES)
    assert ours.peak <= 2 * most * dtype.itemsize


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
    training = {"moments": "bfloat16", "betas": [0.9, 0.999]}
    with pytest.raises(ConfigError, match=r"betas\[1\]=0.999 .* use at most 0.99"):
        test_checkpoint.make_config(**training)
    training = {"moments": "bfloat16", "optimizer": "muon", "momentum": 0.995}
    with pytest.raises(ConfigError, match=r"momentum=0.995 .* use at most 0.99"):
        test_checkpoint.make_config(**training)


NARROW = {"moments": "bfloat16"}


@pytest.mark.parametrize("layout", [{"dp": 2, "tp": 2}, {"pp": 2, "cp": 2}], ids=str)
def test_layouts_train_the_same_model(pool, layout):
    options = {"optimizer": "adamw", "learning_rate": 0.01, "layers": 3, **NARROW}
    config = test_muon.make_config(**layout, **options)
    reference = whole_run(pool, test_muon.make_config(**options), "untied")
    # Sums in another order may round a moment to the next number: 1/256 of an update.
    assert_same(whole_run(pool, config, "untied"), reference, atol=1e-4)


def resume_with(folder: Path, before: Config, after: Config) -> None:
    training = test_checkpoint.make_training(before)
    training.step(0)
    training.step(1)
    training.save(folder, 2)
    saved = test_checkpoint.State(training)
    resumed = test_checkpoint.make_training(after)
    resumed.load(folder / "step-00000002", 2)
    for name, tensor in test_checkpoint.State(resumed).items():
        assert torch.equal(tensor, saved[name].to(tensor.dtype)), name
    assert math.isfinite(resumed.step(2).loss)


@pytest.mark.parametrize("moments", [("float32", "bfloat16"), ("bfloat16", "float32")], ids=str)
@pytest.mark.parametrize(
    "layout",
    [
        {"tp": 2, "optimizer": "muon"},
        {"dp": 2, "optimizer": "adamw", "sharding": "optimizer"},
    ],
    ids=str,
)
def test_a_resume_with_other_moments_converts_the_saved_ones(pool, tmp_path, layout, moments):
    make = partial(test_checkpoint.make_config, **layout)
    before, after = (make(moments=dtype) for dtype in moments)
    pool.run(2, resume_with, tmp_path, before, after)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_the_state_is_half_as_large(optimizer):
    of = partial(planned, GQA, seq_length=64, optimizer=optimizer)
    full, half = of(moments="float32"), of(moments="bfloat16")
    assert half.optimizer_state == full.optimizer_state / 2
