"""Initial weights, saves and exports; that resumed runs are right is in test_resumes.py."""

import math
import threading
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor

from picotron_min.checkpoint import training_tensors
from picotron_min.runtime import hugging_face, saver
from picotron_min.runtime.config import Config
from picotron_min.runtime.config_checks import resolve_model
from picotron_min.runtime.folders import find_start
from picotron_min.runtime.tokenizer import BytesTokenizer
from tests import assembled
from tests.training import Training


def make_config(tied=False, **keys) -> Config:
    keys = {"micro_batch_size": 2, "gradient_accumulation_steps": 2, "dtype": "float32"} | keys
    keys = {"schedule": "cosine", "warmup_steps": 2, "total_train_steps": 6} | keys
    keys = {"optimizer": "adamw", "learning_rate": 0.01, "tie_word_embeddings": tied} | keys
    return assembled.make_config(**keys)


def make_training(config: Config, weights: dict[str, Path] | None = None) -> Training:
    return assembled.make_training(config, resolve_model(config), weights=weights)


def initial_weights() -> list[dict[str, Tensor]]:
    """Of a model, with another seed, in float64, and with a further layer."""
    configs = [make_config(**how) for how in ({}, {"seed": 43}, {"dtype": "float64"})]
    configs.append(make_config(model={"num_nextn_predict_layers": 1}))
    return [{n: p.detach() for n, p in make_training(c).parameters.items()} for c in configs]


def test_initial_weights_are_a_function_of_seed_and_name(pool):
    ((weights, other_seed, float64, deeper),) = pool.run(1, initial_weights)
    for name, weight in weights.items():
        assert torch.equal(weight, deeper[name])
        assert float64[name].dtype == torch.float64 and torch.equal(float64[name].float(), weight)
        if weight.ndim == 1:
            assert torch.equal(weight, torch.ones(32))
            continue
        assert not torch.equal(weight, other_seed[name])
        into_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
        std = 0.02 / math.sqrt(2 * 2) if into_residual else 0.02
        # Four standard errors of a mean, and of a standard deviation.
        assert abs(weight.mean()) < 4 * std / weight.numel() ** 0.5
        assert abs(weight.std() / std - 1) < 4 / (2 * weight.numel()) ** 0.5
    projection = "model.layers.{}.self_attn.q_proj.weight"
    assert not torch.equal(weights[projection.format(0)], weights[projection.format(1)])


class State(dict):
    """A copy of every tensor that training changes, by name."""

    def __init__(self, training: Training) -> None:
        buffers = training.model.buffers
        tensors = training_tensors(training.parameters, buffers, training.optimizer)
        tensors |= {
            f"step.{name}": training.optimizer.state[p]["step"]
            for name, p in training.parameters.items()
            if "step" in training.optimizer.state[p]
        }
        super().__init__({name: tensor.clone() for name, tensor in tensors.items()})

    def assert_equal(self, other: "State") -> None:
        assert self.keys() == other.keys()
        for name in self:
            assert torch.equal(self[name], other[name]), name


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


DISK_IS_FULL = OSError("the disk is full")


def saves_that_fail(folder: Path) -> None:
    training = make_training(make_config())
    training.save(folder, 1)
    first = find_start("latest", folder)
    before = {path.name: path.read_bytes() for path in first.iterdir()}
    training.step(0)
    for broken in ("runtime.saver.write_json", "runtime.folders._sync", "checkpoint.dcp.save"):
        with mock.patch(f"picotron_min.{broken}", side_effect=DISK_IS_FULL):
            for step in (1, 2):
                with pytest.raises(OSError, match="the disk is full"):
                    training.save(folder, step)
        assert find_start("latest", folder) == first
        assert {path.name: path.read_bytes() for path in first.iterdir()} == before
    leftover = folder / ".step-00000002.partial"
    (leftover / "shard-00009-model-00001-of-00001.safetensors").write_text("of a larger world")
    training.save(folder, 2)
    assert names(find_start("latest", folder)) == names(first) and not leftover.exists()
    training.save(folder, 1)
    after = {path.name: path.read_bytes() for path in first.iterdir()}
    assert after.keys() == before.keys() and after != before

    full = mock.patch.object(hugging_face, "write_json", side_effect=DISK_IS_FULL)
    with full, pytest.raises(OSError, match="the disk is full"):
        training.export(folder / "hf", BytesTokenizer())
    assert not (folder / "hf").exists(), "a finished model is complete or absent, too"

    training = make_training(make_config(**{"async": True}))
    with mock.patch.object(saver, "write_json", side_effect=DISK_IS_FULL):
        training.save(folder, 3)
        with pytest.raises(OSError, match="the disk is full"):
            training.saver.wait()
    assert find_start("latest", folder).name == "step-00000002"


def test_a_checkpoint_is_complete_or_absent_and_errors_reach_the_loop(pool, tmp_path):
    pool.run(1, saves_that_fail, tmp_path)


def load_among_pickles_and_without_files(run: Path) -> None:
    training, folder = make_training(make_config()), run / "step-00000001"
    training.step(0)
    training.save(run, 1)
    assert {path.suffix for path in folder.iterdir()} == {".safetensors", ".json"}
    for name in (".metadata", "data.pt"):
        (folder / name).write_bytes(b"what a stranger could put into a pickle")
    other = make_training(make_config())
    other.load(folder, step=1)
    State(other).assert_equal(State(training))
    for path in folder.glob("*.safetensors"):
        path.unlink()
    with pytest.raises(OSError, match=f"cannot load {folder}: "):
        other.load(folder, step=1)


def test_loading_runs_no_code_of_the_checkpoint_and_misses_its_files(pool, tmp_path):
    pool.run(1, load_among_pickles_and_without_files, tmp_path)


def background_saves(folder: Path) -> None:
    """What is saved is the moment of the save, and a second save waits for the first."""
    training = make_training(make_config(dp=2, **{"async": True}, keep=2))
    training.step(0)
    expected, write, may_write = State(training), saver.save, threading.Event()
    with mock.patch.object(saver, "save", lambda *of: may_write.wait() and write(*of)):
        training.save(folder, 1)
        for step in (1, 2):
            training.step(step)  # which does not wait
        assert find_start("latest", folder) is None
        may_write.set()
        training.save(folder, 3)
        assert (folder / "step-00000001").exists()
    training.saver.wait()
    training.load(folder / "step-00000001", step=1)
    State(training).assert_equal(expected)
    training.save(folder, 4)
    training.saver.wait()


def test_training_continues_while_a_checkpoint_is_written_and_the_newest_are_kept(pool, tmp_path):
    (tmp_path / "step-final").mkdir()  # the user's own
    pool.run(2, background_saves, tmp_path)
    assert names(tmp_path) == ["step-00000003", "step-00000004", "step-final"]
