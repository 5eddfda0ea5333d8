"""Build a rank's part of a run, and train it for a step, as train.py does, on fake tensors."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import numpy as np

from picotron_min.dry_run.device import GPU, as_on_a_gpu, as_rank
from picotron_min.dry_run.recorder import Recorder
from picotron_min.extensions.build import build_model
from picotron_min.mesh import build_axes
from picotron_min.runtime.config import Config
from picotron_min.runtime.config_checks import resolve_model
from picotron_min.runtime.inputs import open_data
from picotron_min.runtime.token_file import TokenFile
from train import build_run, train_step


def dry_run(config: Config, rank: int = 0, part: Callable[[], str] = str) -> Recorder:
    """A rank's step, when its optimizer has all of its state.

    `sent` of the result has the bytes of each axis, as its ledger counts them.
    """
    model_config, layout = resolve_model(config), config.layout
    with as_rank(rank, layout.world_size):
        axes, batches = build_axes(GPU, layout), batches_of(config, rank)
        with (
            as_on_a_gpu() as mode,
            Recorder("cuda", mode, part) as recorder,
            recorder.seeing_resizes(),
        ):
            recorder.num_experts = model_config.num_local_experts
            model = build_model(model_config, layout, config.workload, axes, GPU)
            model = replace(model, plan=recorder.following(model.plan))
            run = build_run(model, config.recipe, batches)
            run.optimizer.step()  # makes its state
            model.weights_changed()
            for axis in axes:
                axis.ledger.take_bytes()  # what the optimizer has sent is not of this step
            recorder.begin()
            train_step(run, 0)
    recorder.sent = {axis.name: sent for axis in axes if (sent := axis.ledger.take_bytes())}
    return recorder


def batches_of(config: Config, rank: int) -> SimpleNamespace:
    """A rank's micro-batches of a text of zeros, in short documents.

    They are read now, while tensors are real: fake ones have no numbers.
    """
    here, depths = config.layout.coordinates(rank), resolve_model(config).num_nextn_predict_layers
    length = 2 * config.global_batch * (config.training.seq_length + 1)
    ends = np.append(np.arange(700, length, 700), length)
    text = TokenFile(np.zeros(length, np.uint16), length, len(ends), ends)
    data = open_data(config, text, here.dp, here.cp, depths)
    read = [data.batch(0, i) for i in range(data.num_micro_batches)]
    return SimpleNamespace(batch=lambda step, i: read[i], num_micro_batches=len(read))


def shortened(config: Config) -> Config:
    """The config with fewer micro-batches, if more than those only repeat what they do."""
    key, layout = "gradient_accumulation_steps", config.layout
    number = getattr(config.training, key)
    if layout.schedule.live_activations(0, layout.pp, number, layout.pp_chunks) >= number:
        return config  # AFAB has all of them in memory
    few = min(number, 4 * layout.pp)
    return config.model_copy(update={"training": config.training.model_copy(update={key: few})})
