"""The dry run beside what it stands for: the plan's bytes, and real steps."""

import json
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile

from picotron_min.dry_run.__main__ import lines_of, main
from picotron_min.dry_run.device import GPU, STAND_INS, as_rank, aten
from picotron_min.dry_run.recorder import Recorder
from picotron_min.dry_run.run import batches_of, dry_run, shortened
from picotron_min.extensions.build import build_model
from picotron_min.extensions.kernels.attention import FlashAttention
from picotron_min.extensions.memory import offload
from picotron_min.mesh import Axes, build_axes
from picotron_min.model import MLP
from picotron_min.parallelize import ParallelModel
from picotron_min.runtime.config import Config
from picotron_min.runtime.config_checks import resolve_model
from picotron_min.runtime.hardware import GPUS
from tests.rows import lines, row
from train import Run, build_run, train_step

TINY = Path(__file__).parents[2] / "config.json"
ON_A_GPU = {"use_cpu": False, "dtype": "bfloat16", "hidden_size": 64, "intermediate_size": 64}


def problems_of(config: Config, rank: int, run: Recorder) -> list[str]:
    return [line for line in lines_of(config, rank, run, GPUS["H100"]) if "PROBLEM" in line]


# Of the last rank, which often counts no gradient. The number behind is of waits beside the step's.
# More layouts are in test_messages.py.
STEPS = """
core: dp=4 tp=2 optimizer=muon
core: cp=4 ulysses mask
core: dp=2 pp=2 cp=2 tp=2 m=2 count_zeros
documents: cp=4 packed
experts: dp=4 ep=4 model=softmax num_local_experts=4        2
experts: dp=2 ep=2 layers=3 model=softmax                 3
experts: dp=2 tp=2 ep=2 etp=2 allgather model=gated        1
memory: layers=4 offload=3 recompute=full moments=bfloat16
multi_token: pp=2 m=2 model=depths
schedules: pp=2 engine=interleaved m=2 sharding=optimizer
precision: dp=2 ep=2 padded fp8_experts model=softmax
"""


@pytest.mark.parametrize("text", lines(STEPS), ids=str)
def test_a_step_sends_what_is_planned_and_waits_once(monkeypatch, text):
    monkeypatch.setattr(offload, "LEAST_OFFLOAD", 1)
    words, _, more = text.partition("   ")
    config, _ = row(words, **ON_A_GPU)
    run = dry_run(config, config.world_size - 1)
    assert problems_of(config, config.world_size - 1, run) == []
    assert sorted(run.waits.values()) == [1, *([int(more)] if more.strip() else [])]


def run_of(config: Config, axes: Axes, batches: SimpleNamespace) -> Run:
    sizes = resolve_model(config), config.layout, config.workload
    model = build_model(*sizes, axes, axes.world.device)
    for weight in model.parameters.values():
        weight.data.fill_(0.01)
    return build_run(model, config.recipe, batches)


@contextmanager
def fake_tensors() -> Iterator[FakeTensorMode]:
    needed = {patch[1]: mock.patch.object(*patch) for patch in STAND_INS}
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with needed["swap_tensors"], needed["data_ptr"], fake as mode:
        yield mode


def peak_on_a_cpu(config: Config, tensors: AbstractContextManager) -> int:
    """Of the last rank that counts tokens: the fake group takes the others' part."""
    rank = config.world_size - config.layout.cp * config.layout.tp
    with as_rank(rank, config.world_size):
        axes, batches = build_axes(torch.device("cpu"), config.layout), batches_of(config, rank)
        with tensors as mode, Recorder("cpu", mode) as recorder, recorder.seeing_resizes():
            run = run_of(config, axes, batches)
            train_step(run, 0)
            recorder.begin()
            train_step(run, 1)
    return recorder.peak


@pytest.mark.parametrize("words", ["dtype=bfloat16 dp=2", "recompute=full model=depths"])
def test_the_recorder_counts_the_same_bytes_of_fake_and_of_real_tensors(words):
    sizes = {"hidden_size": 128, "intermediate_size": 512, "vocab_size": 2048}
    config, _ = row(f"core: {words}", **{"dtype": "float32"} | sizes)
    real, fake = peak_on_a_cpu(config, nullcontext()), peak_on_a_cpu(config, fake_tensors())
    assert fake == pytest.approx(real, rel=1e-3)


def test_as_many_operations_are_counted_as_torchs_profiler_sees():
    config, _ = row("core: m=2", dtype="float32")
    with as_rank(0, 1):
        run = run_of(config, build_axes(torch.device("cpu"), config.layout), batches_of(config, 0))
        train_step(run, 0)
        with Recorder("cpu") as recorder:
            train_step(run, 1)
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            train_step(run, 2)
    seen = sum(launched(event) for event in profiler.events() if not event.cpu_parent)
    assert seen > 500 and sum(recorder.launches.values()) == pytest.approx(seen, rel=0.01)


KERNELS = {
    name.partition(".")[0]
    for key in ("CPU", "CompositeExplicitAutograd")
    for name in torch._C._dispatch_get_registrations_for_dispatch_key(key)
}


def launched(event: FunctionEvent) -> int:
    """The outermost kernels in it that write a tensor: no view, no memory alone, no number."""
    if event.name not in KERNELS:  # the profiler's own, or made of others
        return sum(map(launched, event.cpu_children))
    name = event.name.removeprefix("aten::")
    packet = getattr(aten, name)
    is_view = any(getattr(packet, overload).is_view for overload in packet.overloads())
    return not (is_view or name.startswith(("empty", "_unsafe_view", "_local_scalar")))


@pytest.mark.gpu
@pytest.mark.parametrize("words", ["m=2", "dp=2", "dp=2 recompute=full", "m=2 offload=3"])
def test_a_gpu_allocates_what_a_dry_run_counts(words):
    sizes = {"hidden_size": 2048, "intermediate_size": 8192, "seq_length": 2048, "layers": 4}
    config, _ = row(f"core: {words}", **ON_A_GPU | sizes)
    rank, before = config.world_size - 1, torch.cuda.memory_allocated()
    with as_rank(rank, config.world_size):
        run = run_of(config, build_axes(GPU, config.layout), batches_of(config, rank))
        torch.cuda.reset_peak_memory_stats()
        train_step(run, 0)
        train_step(run, 1)
    measured = torch.cuda.max_memory_allocated() - before
    assert measured == pytest.approx(dry_run(config, rank).peak, rel=0.02)


def test_more_micro_batches_need_no_more_memory():
    config, _ = row("schedules: dp=2 pp=2 m=9 engine=zb_h1 sharding=gradients", **ON_A_GPU)
    few = shortened(config)
    assert few != config and dry_run(few).peak == dry_run(config).peak
    afab, _ = row("core: pp=2 m=12 engine=afab")
    assert shortened(afab) == afab


def test_a_sum_on_the_host_is_a_wait(monkeypatch):
    on_host = property(lambda model: lambda totals: totals.cpu().to(totals.device))
    monkeypatch.setattr(ParallelModel, "counted_once", on_host)
    config, _ = row("core: ", **ON_A_GPU)
    (problem,) = problems_of(config, 0, dry_run(config))
    assert "waits where that is not known: tests/" in problem


def test_a_leak_raises_the_peak(monkeypatch):
    config, _ = row("core: m=2", **ON_A_GPU)
    kept, run = [], dry_run(config)
    forward = MLP.forward
    monkeypatch.setattr(MLP, "forward", lambda mlp, x: kept.append(x) or forward(mlp, x))
    assert dry_run(config).peak > 1.01 * run.peak


def test_a_kernel_of_attention_refuses_two_dtypes(monkeypatch):
    flash = FlashAttention.forward
    monkeypatch.setattr(FlashAttention, "forward", lambda a, q, k, v: flash(a, q.float(), k, v))
    with pytest.raises(AssertionError, match="float32"):
        dry_run(row("core: ", **ON_A_GPU)[0])


def test_a_message_must_be_contiguous(monkeypatch):
    send = "picotron_min.pipeline_parallel.start_send"
    monkeypatch.setattr(send, lambda x, axis, to: axis.ledger.record("send", x.mT))
    with pytest.raises(AssertionError, match="non-contiguous"):
        dry_run(row("core: pp=2", **ON_A_GPU)[0])


def test_the_command_prints_ranks_and_its_exit_code_has_the_verdict(tmp_path, capsys):
    assert main(["--config", str(TINY)]) == 0
    out = capsys.readouterr().out
    assert "rank 3 of 4: pp 0, dp 1, cp 0, tp 1" in out and "1 at train.py:" in out
    assert "picotron_min/model.py:" in out and "4 ranks fit together" in out
    assert "80.0 GB of H100, of which a plan may use 72.6 GB" in out
    layout = {"tp_size": 8, "cp_size": 4, "pp_size": 16, "dp_size": 32}
    model = {"name": "meta-llama/Llama-3.1-405B", "dtype": "bfloat16", "num_hidden_layers": 16}
    sections = {"distributed": layout, "model": model, "training": {"micro_batch_size": 1024}}
    config = tmp_path / "config.json"
    config.write_text(json.dumps(sections))
    assert main(["--config", str(config), "--rank", "5000", "--gpu", "L4"]) == 1
    out = capsys.readouterr().out
    assert "rank 5000 of 16384: pp 4, dp 28, cp 1, tp 0" in out
    assert "does not fit into the 24.0 GB of L4" in out
    with pytest.raises(SystemExit):
        main(["--config", str(config), "--rank", "16384"])
    assert "there are 0 to 16383" in capsys.readouterr().err
