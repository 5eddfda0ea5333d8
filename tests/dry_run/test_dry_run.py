"""The dry run beside what it stands for: the plan's bytes, and real steps on a CPU."""

import json
from contextlib import ExitStack
from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from picotron_min.dry_run.__main__ import main, problems_of
from picotron_min.dry_run.device import STAND_INS
from picotron_min.dry_run.recorder import Message, Recorder
from picotron_min.dry_run.run import as_fake, batches_of, dry_run, step_of
from picotron_min.extensions.build import build_model
from picotron_min.extensions.kernels.attention import FlashAttention
from picotron_min.extensions.memory import offload
from picotron_min.mesh import build_axes
from picotron_min.model import MLP
from picotron_min.parallelize import ParallelModel
from picotron_min.runtime.config import Config
from picotron_min.runtime.config_checks import resolve_model
from picotron_min.runtime.hardware import GPUS
from tests.assembled import make_training
from tests.rows import lines, row
from train import build_run, train_step

CPU = torch.device("cpu")

ON_A_GPU = {"use_cpu": False, "dtype": "bfloat16", "hidden_size": 64, "intermediate_size": 64}

# Of the last rank, which often counts no gradient. The number behind is of waits beside the step's.
STEPS = """
core: dtype=float32 optimizer=sgd
core: dp=4 tp=2 optimizer=muon
core: cp=4 ulysses mask
core: pp=4 m=4 recompute=selective model=tied
core: dp=2 pp=2 cp=2 tp=2 m=2 count_zeros
documents: cp=4 packed
experts: dp=2 ep=2 padded model=softmax
experts: dp=2 ep=2 layers=3 model=softmax                 3
experts: dp=2 tp=2 ep=2 etp=2 allgather model=gated        1
memory: layers=4 offload=3 recompute=full moments=bfloat16
multi_token: pp=2 m=2 model=depths
overlap: tp=2 sp tp_overlap
precision: tp=2 sp fp8 seq_length=32
schedules: pp=2 dp=2 engine=zb_v m=2
schedules: pp=2 engine=interleaved m=2 sharding=optimizer
sharding: dp=2 sharding=parameters fp8 seq_length=32
sharding: dp=3 sharding=layerwise muon
"""


@pytest.mark.parametrize("text", lines(STEPS), ids=str)
def test_a_step_sends_what_is_planned_and_waits_once(monkeypatch, text):
    monkeypatch.setattr(offload, "LEAST_OFFLOAD", 1)
    words, _, more = text.partition("   ")
    config, _ = row(words, **ON_A_GPU)
    run = dry_run(config, config.world_size - 1)
    assert [*problems_of(config, run, GPUS["H100"])] == []
    assert sorted(run.waits.values()) == [1, *([int(more)] if more.strip() else [])]


def test_an_older_gpu_waits_for_each_product_of_experts():
    """torch has no kernel for them, and reads their sizes: so they are computed one by one."""
    config, _ = row("experts: dp=2 ep=2 layers=3 model=softmax", **ON_A_GPU)
    assert sorted(dry_run(config, 1, (8, 0)).waits.values()) == [1, 3]


# Real steps on CPUs, and what a dry run has of them.


def messages_of(config: Config) -> list[Message]:
    training = make_training(config, resolve_model(config))
    with Recorder("cpu") as recorder:
        plan = recorder.following(training.model.plan)
        run = training.run._replace(model=replace(training.model, plan=plan))
        recorder.begin()
        train_step(run, 0)
    return recorder.messages


def peak_of(config: Config, mode: FakeTensorMode | None) -> int:
    axes, batches = build_axes(CPU, config.layout), batches_of(config, 0)
    with ExitStack() as stack:
        if mode:
            of_tensors = (patch for patch in STAND_INS if patch[1] in ("_apply", "data_ptr"))
            for patch in of_tensors:
                stack.enter_context(mock.patch.object(*patch))
            stack.enter_context(mode)
        recorder = stack.enter_context(Recorder("cpu", mode))
        sizes = resolve_model(config), config.layout, config.workload
        run = build_run(build_model(*sizes, axes, CPU), config.recipe, batches)
        for weight in run.model.parameters.values():
            weight.data.fill_(0.01)
        run = run._replace(batches=as_fake(batches, mode)) if mode else run
        train_step(run, 0)
        recorder.begin()
        train_step(run, 1)
    return recorder.peak


def peaks_of(config: Config) -> list[int]:
    return [peak_of(config, mode) for mode in (None, FakeTensorMode())]


REAL = """
core: dp=2 tp=2 sp model=tied
core: pp=2 m=3 model=tied
core: cp=2 m=2
experts: dp=2 ep=2 padded model=softmax
overlap: tp=2 sp tp_overlap
schedules: pp=2 engine=zb_v m=4
sharding: dp=2 sharding=parameters m=2
"""


@pytest.mark.parametrize("text", lines(REAL), ids=str)
def test_messages_are_those_of_a_real_step(pool, text):
    config, _ = row(text, dtype="float32")
    for rank, messages in enumerate(pool.run(config.world_size, messages_of, config)):
        assert dry_run(config, rank).messages == messages


@pytest.mark.parametrize("words", ["m=2", "dtype=bfloat16", "recompute=full model=depths"])
def test_the_recorder_counts_the_same_bytes_of_fake_and_of_real_tensors(pool, words):
    sizes = {"hidden_size": 64, "intermediate_size": 192, "vocab_size": 1024}
    config, _ = row(f"core: {words}", **{"dtype": "float32"} | sizes)
    ((real, fake),) = pool.run(1, peaks_of, config)
    assert fake == pytest.approx(real, rel=1e-3)


@pytest.mark.parametrize("text", ["cp=2 m=5", "dp=2 sharding=gradients m=5", "pp=2 m=8"])
def test_more_micro_batches_repeat_what_few_do(text):
    config, _ = row(f"core: {text}", **ON_A_GPU)
    run, whole = dry_run(config, 1), step_of(config, 1, (9, 0))
    assert run.operations < whole.operations
    assert run.peak == whole.peak and run.sent == pytest.approx(whole.sent)


# Faults that it must find.


def test_a_sum_on_the_host_is_a_wait(monkeypatch):
    on_host = property(lambda model: lambda totals: totals.cpu().to(totals.device))
    monkeypatch.setattr(ParallelModel, "counted_once", on_host)
    config, _ = row("core: ", **ON_A_GPU)
    (problem,) = problems_of(config, dry_run(config), GPUS["H100"])
    assert "waits where that is not known: tests/" in problem


def test_a_leak_raises_the_peak(monkeypatch):
    config, _ = row("core: m=4", **ON_A_GPU)
    kept, run = [], dry_run(config)
    forward = MLP.forward
    monkeypatch.setattr(MLP, "forward", lambda mlp, x: kept.append(x) or forward(mlp, x))
    assert dry_run(config).peak > 1.01 * run.peak


def test_a_kernel_of_attention_refuses_two_dtypes(monkeypatch):
    flash = FlashAttention.forward
    monkeypatch.setattr(FlashAttention, "forward", lambda a, q, k, v: flash(a, q.float(), k, v))
    with pytest.raises(TypeError, match="float32"):
        dry_run(row("core: ", **ON_A_GPU)[0])


def test_a_message_must_be_contiguous(monkeypatch):
    monkeypatch.setattr("picotron_min.pipeline_parallel.start_send", send_as_it_is)
    with pytest.raises(AssertionError, match="non-contiguous"):
        dry_run(row("core: pp=2", **ON_A_GPU)[0])


def send_as_it_is(tensor, axis, to):
    axis.ledger.record("send", tensor.mT)


# The command.


def test_the_command_prints_a_rank_and_its_exit_code_has_the_verdict(tmp_path, capsys):
    config = tmp_path / "config.json"
    model = {"name": "SmolLM-1.7B", "dtype": "bfloat16", "num_hidden_layers": 4}
    layout = {"pp_size": 2, "dp_size": 8}
    config.write_text(json.dumps({"distributed": layout, "model": model}))
    assert main(["--config", str(config), "--rank", "9", "--explain"]) == 0
    out = capsys.readouterr().out
    assert "rank 9 of 16: pp 1, dp 1, cp 0, tp 0" in out and "1 at train.py:" in out
    assert "picotron_min/loss.py:" in out and "Not counted" in out
    with pytest.raises(SystemExit):
        main(["--config", str(config), "--rank", "16"])
    assert "this config has ranks 0 to 15" in capsys.readouterr().err
    layout["dp_size"], training = 1, {"micro_batch_size": 256}
    config.write_text(json.dumps({"distributed": layout, "model": model, "training": training}))
    assert main(["--config", str(config), "--gpu", "RTX-3090", "--all-kinds"]) == 1
    out = capsys.readouterr().out
    assert "does not fit into the 24.0 GB of RTX-3090" in out and "2 ranks fit together" in out
