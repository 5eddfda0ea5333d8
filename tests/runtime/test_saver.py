"""The thread that writes checkpoints, and waits that may be longer than the timeout."""

import math
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from picotron_min import checkpoint
from picotron_min.mesh import Axes
from picotron_min.runtime import saver
from tests.core.test_checkpoint import State, make_config, make_training


def current_devices_of_writers(folder: Path) -> list[int]:
    """The CUDA device of the thread in each save; all of CUDA is a stand-in."""
    current, seen = threading.local(), []  # CUDA's current device is each thread's own

    def set_device(device: torch.device) -> None:
        current.index = device.index

    def save(*args) -> None:
        seen.append(getattr(current, "index", 0))
        checkpoint.save(*args)

    device = torch.device("cuda", 3 + dist.get_rank())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "set_device", set_device)
        patch.setattr(saver, "save", save)
        set_device(device)  # as at the start of a run, in the main thread
        for in_background in (False, True):
            training = make_training(make_config(dp=2, **{"async": in_background}))
            training.saver.device = device
            training.save(folder, 1)
            training.saver.wait()
    return seen


def test_the_writing_thread_uses_the_gpu_of_its_rank(pool, tmp_path):
    assert pool.run(2, current_devices_of_writers, tmp_path) == [[3, 3], [4, 4]]


def make_timeouts_short(axes: Axes) -> None:
    for group in {dist.group.WORLD, *(axis.group for axis in axes)}:
        distributed_c10d._set_pg_timeout(timedelta(seconds=1), group)


def load_with_a_slow_rank(folder: Path) -> None:
    training = make_training(make_config(dp=2))
    training.step(0)
    training.save(folder, 1)
    saved = State(training)
    training.step(1)
    make_timeouts_short(training.axes)
    if dist.get_rank() == 0:
        time.sleep(1.5)
    training.load(folder / "step-00000001", 1)
    State(training).assert_equal(saved)


def test_loading_may_take_longer_than_the_timeout(pool, tmp_path):
    pool.run(2, load_with_a_slow_rank, tmp_path)


def export_weights_that_are_not_finite(folder: Path) -> None:
    training = make_training(make_config(dp=2))
    if dist.get_rank() == 1:
        training.parameters["model.norm.weight"].data.fill_(math.nan)
    with pytest.raises(FloatingPointError, match=r"not finite: no model is written\. Resume from"):
        training.saver.export(folder)
    assert not folder.exists()


def test_a_model_whose_weights_are_not_finite_is_not_exported(pool, tmp_path):
    pool.run(2, export_weights_that_are_not_finite, tmp_path / "hf")
