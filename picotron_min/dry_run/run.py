"""Build a rank's part of a run, and train it for a step, as train.py does, on fake tensors."""

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
from torch._subclasses.fake_tensor import unset_fake_temporarily

from picotron_min.data import Batch, Batches
from picotron_min.dry_run.device import GPU, as_on_a_gpu, as_rank
from picotron_min.dry_run.recorder import Message, Recorder
from picotron_min.extensions.build import build_model
from picotron_min.mesh import build_axes
from picotron_min.runtime.config import Config
from picotron_min.runtime.config_checks import resolve_model
from picotron_min.runtime.inputs import open_data
from picotron_min.runtime.token_file import TokenFile
from train import build_run, train_step


class DryRun(NamedTuple):
    """What a rank's step does."""

    rank: int
    peak: int  # bytes on its GPU, at the fullest
    at_peak: Counter[str]  # those bytes, by the line of code that has made them
    sent: dict[tuple[str, str], float]  # bytes, by axis and collective
    messages: list[Message]
    waits: Counter[str]  # lines at which the host waits for its GPU
    operations: int


def dry_run(config: Config, rank: int = 0, capability: tuple[int, int] = (9, 0)) -> DryRun:
    """A rank's step on a GPU of this compute capability, when its optimizer has all of its state.

    Many micro-batches repeat what few do: so at most five a stage are run, whose last ones tell
    what each of the others sends.
    """
    m, layout = config.training.gradient_accumulation_steps, config.layout
    few = layout.pp * (4 if layout.schedule.splits_backward or layout.pp_chunks > 1 else 2)
    if m <= few + layout.pp:
        return step_of(config, rank, capability)
    fewer, more = (
        step_of(of_micro_batches(config, n), rank, capability) for n in (few, few + layout.pp)
    )
    times = (m - few) / layout.pp
    sent = {key: fewer.sent[key] + times * (n - fewer.sent[key]) for key, n in more.sent.items()}
    return more._replace(peak=max(fewer.peak, more.peak), sent=sent)


def of_micro_batches(config: Config, number: int) -> Config:
    raw = config.model_dump(by_alias=True)
    raw["training"]["gradient_accumulation_steps"] = number
    return Config.model_validate(raw)


def step_of(config: Config, rank: int, capability: tuple[int, int]) -> DryRun:
    model_config, layout = resolve_model(config), config.layout
    with as_rank(rank, layout.world_size):
        axes, batches = build_axes(GPU, layout), batches_of(config, rank)
        with as_on_a_gpu(capability) as mode, Recorder("cuda", mode) as recorder:
            model = build_model(model_config, layout, config.workload, axes, GPU)
            model = replace(model, plan=recorder.following(model.plan))
            run = build_run(model, config.recipe, as_fake(batches, mode))
            run.optimizer.step()  # makes its state
            model.weights_changed()
            for axis in axes:
                axis.ledger.take_bytes()
            recorder.begin()
            train_step(run, 0)
    sent = {(a.name, kind): n for a in axes for kind, n in a.ledger.bytes.items() if n}
    seen = recorder.peak, recorder.at_peak, sent, recorder.messages
    return DryRun(rank, *seen, recorder.waits, recorder.operations)


def batches_of(config: Config, rank: int) -> Batches:
    """The rank's micro-batches of a text of zeros that needs no memory, in short documents."""
    here, depths = config.layout.coordinates(rank), resolve_model(config).num_nextn_predict_layers
    length = 2 * config.global_batch * (config.training.seq_length + 1)
    zeros = np.lib.stride_tricks.as_strided(np.zeros(1, np.uint16), (length,), (0,))
    ends = np.append(np.arange(700, length, 700), length)
    return open_data(config, TokenFile(zeros, length, len(ends), ends), here.dp, here.cp, depths)


def as_fake(batches: Batches, mode) -> SimpleNamespace:
    def batch(step: int, micro_batch: int) -> Batch:
        with unset_fake_temporarily():
            real = batches.batch(step, micro_batch)
        return type(real)(*map(mode.from_tensor, real[:3]), real.extra)

    return SimpleNamespace(batch=batch, num_micro_batches=batches.num_micro_batches)
