"""Waits of the saver that may be longer than the timeout, and models that are not written."""

import math
import time
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d

from picotron_min.runtime import saver
from tests.core.test_checkpoint import State, make_config, make_training


def save_and_load_with_a_slow_rank(folder: Path) -> None:
    training = make_training(make_config(dp=2))
    training.step(0)
    for group in {dist.group.WORLD, *(axis.group for axis in training.axes)}:
        distributed_c10d._set_pg_timeout(timedelta(seconds=1), group)
    with mock.patch.object(saver, "delete_older", lambda *_: time.sleep(1.3)):  # by rank 0 alone
        training.save(folder, 1)
    saved = State(training)
    training.step(1)
    if dist.get_rank() == 0:
        time.sleep(1.3)
    training.load(folder / "step-00000001", 1)
    State(training).assert_equal(saved)


def test_saving_and_loading_may_take_longer_than_the_timeout(pool, tmp_path):
    pool.run(2, save_and_load_with_a_slow_rank, tmp_path)


def export_weights_that_are_not_finite(folder: Path) -> None:
    training = make_training(make_config(dp=2))
    if dist.get_rank() == 1:
        training.parameters["model.norm.weight"].data.fill_(math.nan)
    with pytest.raises(FloatingPointError, match=r"not finite: no model is written\. Resume from"):
        training.saver.export(folder)
    assert not folder.exists()


def test_a_model_whose_weights_are_not_finite_is_not_exported(pool, tmp_path):
    pool.run(2, export_weights_that_are_not_finite, tmp_path / "hf")
