"""Initial weights, saves and exports; that resumed runs are right is in test_resumes.py."""

import math
import pickle
import time
import warnings
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from picotron_min.checkpoint import training_tensors
from picotron_min.mesh import build_axes
from picotron_min.runtime import hugging_face, saver
from picotron_min.runtime.config import Config
from picotron_min.runtime.config_checks import resolve_model
from picotron_min.runtime.folders import find_start
from picotron_min.runtime.token_file import TokenFile
from picotron_min.runtime.tokenizer import BytesTokenizer
from tests.training import SHAPE, StepResult, Training, config_of, open_data

CPU = torch.device("cpu")


def make_config(tp=1, tied=False, fused=True, model=(), **more) -> Config:
    keys = {
        "tp": tp,
        "sequence_parallel": tp > 1,
        "use_cpu": True,
        "tie_word_embeddings": tied,
        "fused": fused,
        "learning_rate": 0.01,
        "schedule": "cosine",
        "warmup_steps": 2,
        "total_train_steps": 6,
        "seq_length": 16,
        "micro_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "eval_batches": 1,
    }
    return config_of(**SHAPE | keys | dict(model) | more)


def make_training(config: Config, weights: dict[str, Path] | None = None) -> Training:
    axes = build_axes(CPU, config.layout)
    tokens = np.random.default_rng(0).integers(256, size=2000).astype(np.uint16)
    data = open_data(config, TokenFile(tokens, len(tokens), 1), axes.dp.rank, axes.cp.rank)
    return Training(config, resolve_model(config), axes, CPU, data, weights)


def initial_weights(config: Config) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in make_training(config).parameters.items()}


def test_initial_weights_are_a_function_of_seed_and_name(pool):
    weights, second_rank = pool.run(2, initial_weights, make_config(dp=2))
    (other_seed,) = pool.run(1, initial_weights, make_config(seed=43))
    (float64,) = pool.run(1, initial_weights, make_config(dtype="float64"))
    (deeper,) = pool.run(1, initial_weights, make_config(model={"num_nextn_predict_layers": 1}))
    for name, weight in weights.items():
        assert torch.equal(weight, second_rank[name]) and torch.equal(weight, deeper[name])
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


def run_steps(training: Training, steps: range, bad_step: int | None) -> list[StepResult]:
    """Train; in `bad_step` one gradient of the last rank is not a number."""
    last_rank = dist.get_rank() == dist.get_world_size() - 1
    weight = list(training.parameters.values())[-1]
    results = []
    for step in steps:
        hooks = []
        if step == bad_step and last_rank:
            hooks.append(weight.register_hook(lambda gradient: gradient * math.nan))
        results.append(training.step(step))
        for hook in hooks:
            hook.remove()
    return results


def train_and_save(folder: Path, config: Config) -> Training:
    training = make_training(config)
    run_steps(training, range(2), bad_step=None)
    training.save(folder, 2)
    return training


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def fail(*args, **kwargs):
    raise OSError("the disk is full")


def saves_that_fail(folder: Path) -> None:
    training = make_training(make_config())
    training.save(folder, 1)
    first = find_start("latest", folder)
    before = {path.name: path.read_bytes() for path in first.iterdir()}
    training.step(0)
    for broken in ("runtime.saver.write_json", "runtime.folders._sync", "checkpoint.dcp.save"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(f"picotron_min.{broken}", fail)
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

    with pytest.MonkeyPatch.context() as patch, pytest.raises(OSError, match="the disk is full"):
        patch.setattr(hugging_face, "write_json", fail)
        training.export(folder / "hf", BytesTokenizer())
    assert not (folder / "hf").exists(), "a finished model is complete or absent, too"

    training = make_training(make_config(**{"async": True}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saver, "write_json", fail)
        training.save(folder, 3)
        while not training.saver.writing.done():
            time.sleep(0.01)
        with pytest.raises(OSError, match="the disk is full"):
            training.saver.wait(until_written=False)
    assert find_start("latest", folder).name == "step-00000002"


def test_a_checkpoint_is_complete_or_absent_and_errors_reach_the_loop(pool, tmp_path):
    pool.run(1, saves_that_fail, tmp_path)


class WritesAFile:
    """What a stranger could put into a pickle."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def load_among_pickles_and_without_files(run: Path) -> None:
    training, folder, trace = make_training(make_config()), run / "step-00000001", run / "unpickled"
    training.step(0)
    training.save(run, 1)
    for path in folder.iterdir():
        assert path.suffix in (".safetensors", ".json")
        assert not path.read_bytes().startswith(b"\x80")  # as pickles do
    trap = pickle.dumps(WritesAFile(trace))
    for name in (".metadata", "data.pt"):
        (folder / name).write_bytes(trap)
    other = make_training(make_config())
    other.load(folder, step=1)
    State(other).assert_equal(State(training))
    assert not trace.exists()
    pickle.loads(trap)
    assert trace.exists(), "the trap does not work"
    for path in folder.glob("*.safetensors"):
        path.unlink()
    with pytest.raises(OSError, match=f"cannot load {folder}: "):
        other.load(folder, step=1)


def test_loading_runs_no_code_of_the_checkpoint_and_misses_its_files(pool, tmp_path):
    pool.run(1, load_among_pickles_and_without_files, tmp_path)


def background_saves(folder: Path) -> None:
    """What is saved is the moment of the save, and a second save waits for the first."""
    config = make_config(dp=dist.get_world_size(), **{"async": True}, keep=0)
    training = make_training(config)
    training.step(0)
    expected = State(training)
    slow, began = saver.save, time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saver, "save", lambda *a: time.sleep(1) or slow(*a))
        training.save(folder, 1)
        for step in (1, 2):
            training.step(step)
        assert find_start("latest", folder) is None
        assert time.monotonic() - began < 1, "the save was waited for"
        training.save(folder, 3)
        assert find_start("latest", folder) == folder / "step-00000001"
        assert time.monotonic() - began > 1
        training.saver.wait()
    assert find_start("latest", folder) == folder / "step-00000003"
    after = State(training)
    training.load(folder / "step-00000001", step=1)
    State(training).assert_equal(expected)
    training.load(folder / "step-00000003", step=3)
    State(training).assert_equal(after)


def test_training_continues_while_a_checkpoint_is_written(pool, tmp_path):
    pool.run(2, background_saves, tmp_path)


def saves(folder: Path, keep: int, steps: int, config: Config | None = None) -> None:
    training = make_training(config or make_config(keep=keep))
    for step in range(1, steps + 1):
        training.save(folder, step)


def test_the_newest_checkpoints_are_kept(pool, tmp_path):
    (tmp_path / "step-final").mkdir()  # the user's own
    pool.run(1, saves, tmp_path, 2, 4)
    assert names(tmp_path) == ["step-00000003", "step-00000004", "step-final"]


TEXT = "Grüße, 世界 🌍!\n\tif x  !=  'y':\r\n\t"


def export(folder: Path, config: Config) -> tuple[dict[str, Tensor], Tensor | None]:
    training = make_training(config)
    training.step(0)
    distributed_c10d._set_pg_timeout(timedelta(seconds=1), dist.group.WORLD)

    class SlowTokenizer(BytesTokenizer):
        def save(self, folder: Path) -> None:
            super().save(folder)
            time.sleep(1.5)  # an export may take longer than the timeout

    for tokenizer in (BytesTokenizer(), SlowTokenizer()):  # the second replaces the first
        training.export(folder, tokenizer)
    tokens, is_whole = torch.tensor([list(TEXT.encode())]), training.axes.pp.size == 1
    with torch.no_grad():
        model, positions = training.chunks[0].model, torch.arange(tokens.shape[1])
        logits = model(tokens, positions) if is_whole else None
    weights = {name: p.detach() for name, p in training.parameters.items()}
    weights = training.parts_of_whole(weights)
    return {name: part.full_tensor() for name, part in weights.items()}, logits


@pytest.mark.parametrize(
    "layout",
    [{"dp": 2, "dtype": "float64"}, {"pp": 2, "tied": True, "dtype": "bfloat16"}],
    ids=str,
)
def test_transformers_loads_the_finished_model(pool, tmp_path, caplog, layout):
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    folder, config = tmp_path / "hf", make_config(**layout)
    (weights, logits), (others, _) = pool.run(2, export, folder, config)
    weights |= others
    logging.enable_propagation()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        ids = tokenizer(TEXT, return_tensors="pt").input_ids
        model.generate(ids, max_new_tokens=4, do_sample=False)
        theirs = model(ids).logits
    logging.disable_propagation()
    assert not any(report.values()) and not caplog.messages, report

    dtype = getattr(torch, config.model.dtype)
    loaded, in_file = dict(model.named_parameters()), {}
    for path in folder.glob("*.safetensors"):
        in_file |= load_file(path)
    assert loaded.keys() == weights.keys() and ("lm_head.weight" in loaded) == (
        "tied" not in layout
    )
    for name, weight in weights.items():
        assert in_file[name].dtype == dtype
        assert torch.equal(loaded[name], weight.to(dtype))
    if logits is not None:
        torch.testing.assert_close(theirs.detach(), logits, rtol=0, atol=1e-6)
    assert ids[0].tolist() == list(TEXT.encode()) and tokenizer.decode(ids[0]) == TEXT
    assert model.config.eos_token_id == tokenizer.eos_token_id == 256
