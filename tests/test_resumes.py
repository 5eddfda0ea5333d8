"""The second claim: a resumed run is the unbroken one, also in another layout."""

import functools
import math
import re
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from picotron_min.checkpoint import training_tensors
from picotron_min.extensions.settings import ModelConfig
from picotron_min.runtime.config import Config
from picotron_min.runtime.folders import find_start
from picotron_min.runtime.metadata import read_to_resume
from tests.assembled import Parts, assemble, make_training, on_one_rank, parts_of
from tests.core.test_checkpoint import run_steps
from tests.rows import lines, row
from tests.training import Training

# What both runs have | saved as -> resumed as. Without an arrow the layout stays, and the resumed
# run has the same bits as the unbroken one; `skips`: its second step is skipped.
RESUMES = """
core: model=tied fused=false | dp=1
core: skips optimizer=sgd | dp=2
core: skips dtype=bfloat16 | dp=2 tp=2 sp
core: skips model=tied | pp=2
experts: dtype=bfloat16 model=sigmoid | dp=2 tp=2 ep=2 etp=2
sharding: dtype=bfloat16 model=tied | dp=2 pp=2 sharding=parameters
optimizers: muon moments=bfloat16 | dp=2 tp=2 sharding=layerwise
-
core: | cp=4 ulysses -> dp=2 pp=2 tp=2 sp
core: model=tied | tp=4 sp -> pp=2 cp=2 tp=2
schedules: model=tied | pp=2 engine=interleaved -> tp=2
schedules: model=tied | pp=2 engine=zb_v -> pp=4 engine=afab
experts: model=sigmoid | dp=2 tp=4 ep=4 etp=2 -> dp=1
experts: model=sigmoid | dp=2 tp=2 ep=2 sharding=parameters -> cp=2 tp=2 etp=4
sharding: model=grouped-query | dp=3 -> dp=4 sharding=optimizer
sharding: model=tied | dp=4 sharding=layerwise -> dp=2 tp=2 sp sharding=parameters
sharding: | dp=2 tp=2 sharding=gradients -> dp=4 sharding=layerwise
optimizers: muon | dp=2 tp=2 sharding=optimizer -> pp=4
multi_token: model=depths | pp=2 tp=2 -> dp=2 cp=2
"""
SCHEDULE = {"schedule": "cosine", "warmup_steps": 2, "total_train_steps": 6}
DEFAULTS = SCHEDULE | {"optimizer": "adamw", "learning_rate": 0.01, "layers": 4, "vocab_size": 257}


def pair(text: str) -> tuple[Config, Config, ModelConfig]:
    shared, _, layouts = text.partition(" | ")
    saved, _, resumed = layouts.partition(" -> ")
    first, model = row(f"{shared} {saved}", **DEFAULTS)
    return first, row(f"{shared} {resumed or saved}", **DEFAULTS)[0], model


class LargestTensor(TorchDispatchMode):
    """How many numbers the largest tensor has that is made in here."""

    numbers = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        # Not the bytes in which ranks exchange their plans of what to read.
        is_plain = isinstance(result, Tensor) and not isinstance(result, DTensor)
        if is_plain and result.is_floating_point() and result.device.type != "meta":
            self.numbers = max(self.numbers, result.numel())
        return result


class Part(NamedTuple):
    """A part of a run on one rank; or on all, with whole tensors."""

    results: list  # of its steps
    val_loss: float
    skipped: int
    begin: dict  # all tensors that are saved
    end: dict
    largest: int = 0  # that loading makes


def state(training: Training) -> dict[str, Parts]:
    """All tensors that are saved, by kind, each with its place in the whole."""
    kinds, model = defaultdict(dict), training.model
    tensors = training_tensors(training.parameters, model.buffers, training.optimizer)
    for key, tensor in tensors.items():
        kind, name = re.fullmatch(r"(?:optimizer\.(\w+)\.)?(.*)", key).groups()
        kinds[kind or "model"][name] = tensor.detach().double()  # numpy has no bfloat16
    return {kind: parts_of(training, tensors) for kind, tensors in kinds.items()}


def train_a_part(config, model, steps: range, bad: int | None, folder: Path | None) -> Part:
    training = make_training(config, model)
    with LargestTensor() as largest:
        if steps.start:
            path = find_start("latest", folder)
            saved = read_to_resume(path, model, config.training.optimizer)
            assert saved.step == steps.start
            training.load(path, saved.step, saved.skipped_steps)
    begin = state(training)
    results = [result[:3] for result in run_steps(training, steps, bad)]
    if folder and not steps.start:
        training.save(folder, steps.stop)
    skipped = training.skipped.total
    return Part(results, training.evaluate(), skipped, begin, state(training), largest.numbers)


def part_of_run(pool, config: Config, model: ModelConfig, *arguments) -> Part:
    ranks = pool.run(config.world_size, train_a_part, config, model, *arguments)
    shapes = model.parameter_shapes() | model.buffer_shapes()
    wholes = {"begin": {}, "end": {}}
    for when, whole in wholes.items():
        of_ranks = [getattr(rank, when) for rank in ranks]
        for kind in set().union(*of_ranks):
            parts = [rank.get(kind, {}) for rank in of_ranks]
            names = shapes if kind == "model" else set().union(*parts)
            tensors = assemble(parts, {name: shapes[name] for name in names}, atol=1e-10)
            whole |= {f"{kind} {name}": tensor for name, tensor in tensors.items()}
    assert all(repr(rank[:3]) == repr(ranks[0][:3]) for rank in ranks), "all ranks report the same"
    return ranks[0]._replace(**wholes, largest=max(rank.largest for rank in ranks))


def assert_near(ours: dict, theirs: dict, atol: float) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        np.testing.assert_allclose(tensor, theirs[name], rtol=0, atol=atol, err_msg=name)


@functools.cache
def unbroken(pool, config: str, model: ModelConfig, bad: int | None) -> Part:
    run = part_of_run(pool, Config.model_validate_json(config), model, range(3), bad, None)
    for name in run.begin.keys() & run.end.keys():  # the test would miss what does not change
        assert not np.array_equal(run.begin[name], run.end[name]), name
    return run


@pytest.mark.parametrize("text", lines(RESUMES), ids=str)
def test_a_resumed_run_is_the_unbroken_one(pool, tmp_path, text):
    first, second, model = pair(text.replace(" skips", ""))
    bad, atol = 1 if " skips" in text else None, 1e-10 if "->" in text else 0
    saved = part_of_run(pool, first, model, range(2), bad, tmp_path)
    resumed = part_of_run(pool, second, model, range(2, 3), None, tmp_path)
    assert_near(resumed.begin, saved.end, atol=atol and 1e-12)
    tp = min(first.distributed.tp_size, second.distributed.tp_size)
    assert resumed.largest <= math.ceil(model.vocab_size / tp) * model.hidden_size

    plain = on_one_rank(first) if atol else first
    whole = unbroken(pool, plain.model_dump_json(by_alias=True), model, bad)
    ours, theirs = (saved.results + resumed.results, *resumed[1:3]), whole[:3]
    for mine, expected in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(mine, expected, rtol=0, atol=atol)
    assert_near(resumed.end, whole.end, atol)
