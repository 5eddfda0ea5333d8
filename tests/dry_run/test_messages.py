"""The messages of a dry run are those of real ranks, and those of broken plans do not fit."""

import functools
from dataclasses import replace

import pytest

from picotron_min.dry_run.__main__ import lines_of
from picotron_min.dry_run.messages import kinds_of_ranks, misfit
from picotron_min.dry_run.recorder import Message, Recorder
from picotron_min.dry_run.run import dry_run
from picotron_min.extensions.settings import Layout
from picotron_min.runtime.config import Config
from picotron_min.runtime.config_checks import resolve_model
from picotron_min.runtime.hardware import GPUS
from tests.assembled import make_training
from tests.rows import lines, row
from train import train_step

PIPELINE = "core: pp=2 tp=2 m=3 model=tied"
REAL = f"""
{PIPELINE}
core: cp=2 m=2
experts: dp=2 ep=2 padded model=softmax
overlap: tp=2 sp tp_overlap
schedules: pp=2 engine=zb_v m=4
sharding: dp=2 sharding=parameters m=2
sharding: dp=3 sharding=layerwise muon
"""


@functools.cache
def steps_of(text: str) -> tuple[Config, dict[int, Recorder]]:
    config, _ = row(text, dtype="float32")
    return config, {rank: dry_run(config, rank) for rank in range(config.world_size)}


def real_messages(config: Config) -> list[Message]:
    training = make_training(config, resolve_model(config))
    with Recorder("cpu") as recorder:
        plan = recorder.following(training.model.plan)
        run = training.run._replace(model=replace(training.model, plan=plan))
        recorder.begin()
        train_step(run, 0)
    return recorder.messages


@pytest.mark.parametrize("text", lines(REAL))
def test_messages_are_those_of_a_real_step_and_fit_together(pool, text):
    config, steps = steps_of(text)
    for rank, step in steps.items():
        assert "PROBLEM" not in "\n".join(lines_of(config, rank, step, GPUS["H100"]))
    runs = {rank: step.messages for rank, step in steps.items()}
    assert pool.run(config.world_size, real_messages, config) == [*runs.values()]
    assert misfit(runs) is None
    assert misfit({rank: runs[rank] for rank in kinds_of_ranks(config.layout)}) is None


@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize("how", ["shape", "missing", "swapped", "collective"])
def test_a_broken_plan_is_named_by_rank_and_action(how, rank):
    runs = {rank: step.messages for rank, step in steps_of(PIPELINE)[1].items()}
    messages = list(runs[rank])
    within = [i for i, message in enumerate(messages) if message.action]
    alike = [i for i in within if messages[i].is_planned == (how != "collective")]
    i, j = alike[0], alike[-1]
    kind, micro_batch, *_ = messages[i].action
    if how == "missing":
        del messages[i]
    elif how == "swapped":
        messages[i], messages[j] = messages[j], messages[i]
    else:
        messages[i] = messages[i]._replace(tensors=("float32[1, 2]",))
    why = misfit(runs | {rank: messages})
    assert f"rank {rank} is at" in why and f"{kind.value[-1]}{micro_batch}" in why


def test_kinds_are_all_stages_and_the_ends_of_each_axis():
    layout = Layout(pp=3, dp=4, cp=1, tp=2)
    assert kinds_of_ranks(layout) == [0, 1, 6, 7, 8, 16, 17, 22, 23]
