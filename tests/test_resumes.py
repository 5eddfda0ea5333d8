"""The second claim: a resumed run is the unbroken one, also in another layout."""

import functools
import math
import re
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch.distributed as dist

import train
from picotron_min.checkpoint import training_tensors
from picotron_min.extensions.settings import ModelConfig
from picotron_min.runtime.config import Config
from picotron_min.runtime.folders import find_start
from picotron_min.runtime.metadata import read_to_resume
from tests.assembled import Parts, assemble, make_training, on_one_rank, parts_of
from tests.rows import lines, row
from tests.training import Training
from train import StepResult

# What both runs have | saved as -> resumed as. Without an arrow the layout stays, and the resumed
# run has the same bits as the unbroken one; `skips`: its second step is skipped.
RESUMES = """
core: model=tied fused=false | dp=1
core: skips optimizer=sgd | dp=2
core: skips dtype=bfloat16 model=tied | pp=2 tp=2 sp
sharding: skips dtype=bfloat16 model=sigmoid layers=2 | dp=2 ep=2 sharding=parameters
optimizers: skips muon moments=bfloat16 | dp=2 tp=2 sharding=layerwise
precision: model=softmax layers=2 dtype=bfloat16 | dp=2 ep=2 fp8_experts
-
core: | cp=4 ulysses -> dp=2 pp=2 tp=2 sp
schedules: model=tied | pp=2 engine=interleaved -> pp=2 engine=zb_v
experts: model=sigmoid layers=2 | dp=2 tp=2 ep=2 etp=2 sharding=parameters -> cp=2 etp=2
sharding: model=grouped-query | dp=3 -> dp=4 sharding=optimizer
sharding: model=tied | dp=4 sharding=layerwise -> dp=2 tp=2 sp sharding=parameters
optimizers: muon | dp=2 tp=2 sharding=gradients -> pp=4
multi_token: model=depths | pp=2 tp=2 -> dp=2 cp=2
"""
DEFAULTS = {"optimizer": "adamw", "learning_rate": 0.01, "layers": 4, "vocab_size": 257}
DEFAULTS |= {"schedule": "cosine", "warmup_steps": 2, "total_train_steps": 6}


def pair(text: str) -> tuple[Config, Config, ModelConfig]:
    shared, _, layouts = text.partition(" | ")
    saved, _, resumed = layouts.partition(" -> ")
    first, model = row(f"{shared} {saved}", **DEFAULTS)
    return first, row(f"{shared} {resumed or saved}", **DEFAULTS)[0], model


class Part(NamedTuple):
    """A part of a run on one rank; or on all, with whole tensors."""

    results: list  # of its steps
    val_loss: float
    skipped: int
    state: dict  # all tensors that are saved, at its end


def state_of(training: Training) -> dict[str, Parts]:
    """All tensors that are saved, by kind, each with its place in the whole."""
    kinds, model = defaultdict(dict), training.model
    tensors = training_tensors(training.parameters, model.buffers, training.optimizer)
    for key, tensor in tensors.items():
        kind, name = re.fullmatch(r"(?:optimizer\.(\w+)\.)?(.*)", key).groups()
        kinds[kind or "model"][name] = tensor.detach().double()  # numpy has no bfloat16
    return {kind: parts_of(training, tensors) for kind, tensors in kinds.items()}


def spoilt_step(training: Training, step: int, is_bad: bool) -> StepResult:
    """If it is bad, the gradient of a single rank is not finite."""
    factor, measure = math.nan if is_bad and dist.get_rank() == 0 else 1, train.measure_gradient
    with mock.patch.object(train, "measure_gradient", lambda *of: factor * measure(*of)):
        return training.step(step)


def train_a_part(config, model, steps: range, bad: int | None, folder: Path | None) -> Part:
    training = make_training(config, model)
    if steps.start:
        path = find_start("latest", folder)
        saved = read_to_resume(path, model, config.training.optimizer)
        assert saved.step == steps.start
        training.load(path, saved.step, saved.skipped_steps)
    results = [spoilt_step(training, step, step == bad)[:4] for step in steps]
    assert [result[3] for result in results] == [step == bad for step in steps]
    if folder and not steps.start:
        training.save(folder, steps.stop)
    return Part(results, training.evaluate(), training.skipped.total, state_of(training))


def part_of_run(pool, config: Config, model: ModelConfig, *arguments) -> Part:
    ranks = pool.run(config.world_size, train_a_part, config, model, *arguments)
    shapes, whole = model.parameter_shapes() | model.buffer_shapes(), {}
    for kind in set().union(*(rank.state for rank in ranks)):
        parts = [rank.state.get(kind, {}) for rank in ranks]
        names = shapes if kind == "model" else set().union(*parts)
        tensors = assemble(parts, {name: shapes[name] for name in names}, atol=1e-10)
        whole |= {f"{kind} {name}": tensor for name, tensor in tensors.items()}
    assert all(repr(rank[:3]) == repr(ranks[0][:3]) for rank in ranks), "all ranks report the same"
    return ranks[0]._replace(state=whole)


@functools.cache
def unbroken(pool, config: str, model: ModelConfig, bad: int | None) -> Part:
    return part_of_run(pool, Config.model_validate_json(config), model, range(3), bad, None)


@pytest.mark.parametrize("text", lines(RESUMES), ids=str)
def test_a_resumed_run_is_the_unbroken_one(pool, tmp_path, text):
    first, second, model = pair(text.replace(" skips", ""))
    bad, atol = 1 if " skips" in text else None, 1e-10 if "->" in text else 0
    saved = part_of_run(pool, first, model, range(2), bad, tmp_path)
    resumed = part_of_run(pool, second, model, range(2, 3), None, tmp_path)
    plain = on_one_rank(first) if atol else first
    whole = unbroken(pool, plain.model_dump_json(by_alias=True), model, bad)
    ours, theirs = (saved.results + resumed.results, *resumed[1:3]), whole[:3]
    for mine, expected in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(mine, expected, rtol=0, atol=atol)
    assert resumed.state.keys() == whole.state.keys()
    for name, tensor in resumed.state.items():
        np.testing.assert_allclose(tensor, whole.state[name], rtol=0, atol=atol, err_msg=name)
        # It would miss what does not change.
        assert not np.array_equal(tensor, saved.state[name]), name
