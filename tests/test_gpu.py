"""What only a GPU can show, skipped without one; and that benchmarks/gpu.py finds the fastest."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from benchmarks import gpu
from benchmarks.common import Done
from benchmarks.gpu import Preset, Result, Work
from picotron_min.attention import SoftmaxAttention, merge_blocks
from picotron_min.dry_run.device import GPU as FAKE_GPU
from picotron_min.dry_run.device import as_on_a_gpu
from picotron_min.dry_run.recorder import Recorder
from picotron_min.extensions.documents.attention import DocumentAttention, VarlenAttention
from picotron_min.extensions.documents.rectangles import Documents
from picotron_min.extensions.kernels import attention
from picotron_min.extensions.kernels.attention import FLASH_CUDA, RepeatedAttention
from picotron_min.extensions.memory import offload
from picotron_min.extensions.precision import extension as precision
from picotron_min.extensions.settings import Layout
from picotron_min.layout import STRIPE_ROWS
from picotron_min.loss import IGNORE_INDEX, head_loss, stripe_loss
from picotron_min.planner.memory import memory_per_rank
from picotron_min.runtime.failures import RankMonitor
from picotron_min.runtime.launch import Launch, compute_deterministically, set_environment
from picotron_min.runtime.saver import Saver
from tests.assembled import make_training
from tests.rows import lines, row
from tests.training import with_autograd
from train import Run, train_step

ROOT = Path(__file__).parent.parent
GPU = torch.device("cuda")
SPEED = "tokens_per_second"


def compare_copies_with_autocast(text: str) -> None:
    with mock.patch.object(precision, "apply_copies"):
        without = make_training(*row(text))
    ours = make_training(*row(text))
    for step in range(3):
        assert ours.step(step)[:2] == without.step(step)[:2]
    for name, weight in ours.parameters.items():
        assert torch.equal(weight, without.parameters[name]), name


COPIES = """
precision: dtype=bfloat16 optimizer=adamw m=2
precision: dtype=bfloat16 optimizer=adamw m=2 tp=2 sp recompute=selective
precision: dtype=bfloat16 optimizer=adamw m=2 pp=2 engine=interleaved recompute=full
"""


@pytest.mark.parametrize("text", lines(COPIES))
def test_copies_of_the_weights_give_what_autocast_would_to_the_last_bit(pool, text):
    pool.run(row(text)[0].world_size, compare_copies_with_autocast, text)


def test_a_checkpoint_is_copied_from_the_gpu_with_one_wait():
    saver = Saver.__new__(Saver)
    saver.copies = {}
    stream = mock.patch("torch.cuda.current_stream")
    with as_on_a_gpu() as mode, Recorder("cuda", mode) as recorder, stream as stream:
        tensors = {name: torch.ones(3, device=FAKE_GPU) for name in "abc"}
        for copy in saver._copy(tensors).values():
            assert copy.is_cpu and copy.is_page_locked
    assert not recorder.waits and stream().synchronize.call_count == 1


def test_no_sum_of_a_stripe_is_rounded_on_a_gpu():
    spy = mock.patch.object(torch, "addmm", wraps=torch.addmm)
    with as_on_a_gpu() as mode, Recorder("cuda", mode) as recorder, spy as addmm:
        recorder.begin()
        x, weight = (torch.ones(n, 8, device=FAKE_GPU) for n in (5000, 16))
        targets = torch.ones(5000, device=FAKE_GPU, dtype=torch.int64)
        with torch.autocast("cuda", torch.bfloat16):
            head_loss(x, weight.requires_grad_(), targets, stripe_loss)
    outs = [(call.args[1].dtype, call.kwargs["out"].dtype) for call in addmm.call_args_list]
    assert outs == [(torch.bfloat16, torch.float32)] * 2


def test_the_kernel_of_a_gpu_gets_a_contiguous_lse(monkeypatch):
    aten = mock.Mock()
    monkeypatch.setattr(attention, "aten", aten)
    q, late = torch.randn(2, 4, 6, 8), slice(3, 6)
    lse = torch.randn(2, 4, 6)[:, :, late]
    FLASH_CUDA.backward(q[:, :, late], q[:, :, late], q, q, q[:, :, late], lse, False)
    (call,) = aten._scaled_dot_product_flash_attention_backward.call_args_list
    assert call.args[5].is_contiguous() and torch.equal(call.args[5], lse)


def test_gpu_memory_grows_in_segments_unless_the_user_chose(monkeypatch):
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.setenv(name, "mine")
        set_environment()
        assert os.environ.pop(name) == "mine" and "PYTORCH_ALLOC_CONF" not in os.environ
    set_environment()
    assert os.environ["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"


def test_a_row_is_held_against_a_recorded_one():
    row = gpu.record({"device": "a GPU"}, "tiny", Result("ours", 4, [0.1], [], {SPEED: 2000}))
    for speed, remark in ((2090, ""), (2110, "   SLOWER: 2110 recorded")):
        assert gpu.slower(row, [row | {SPEED: speed}]) == remark
        assert not gpu.slower(row, [row | {"device": "another", SPEED: speed}])


TINY = Preset("tiny", 64, tokens=512)


@pytest.mark.parametrize(
    "seconds,error,best",
    [
        ({1: 0.03, 2: 0.02, 4: 0.01, 8: 0.002}, None, 8),
        ({1: 0.03, 2: 0.01, 4: 0.03}, None, 2),  # larger is slower
        ({1: 0.02, 2: 0.01}, torch.OutOfMemoryError("full"), 2),
        ({1: 0.02, 2: 0.01}, RuntimeError("CUBLAS_STATUS_ALLOC_FAILED"), 2),
    ],
    ids=str,
)
def test_the_fastest_micro_batch_is_found_whatever_fails(monkeypatch, seconds, error, best):
    now = [0.0]
    monkeypatch.setattr(gpu, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(gpu, "clean_up", lambda device: None)  # seconds, for nothing here

    def make(size: int) -> Callable:
        if size not in seconds:
            raise error

        def step(index: int) -> Done:
            now[0] += seconds[size]
            return Done(1.0, 2.0)

        return step

    work = Work(TINY, torch.device("cpu"))
    result = gpu.fastest("somebody", work, make, [1, 2, 4, 8], 2)
    assert result.micro_batch == best and len(result.step_seconds) == 2
    assert result.speed["tokens_per_second"] == pytest.approx(TINY.tokens / seconds[best])


@pytest.mark.slow
def test_the_benchmark_runs_to_its_end_on_a_cpu(tmp_path, monkeypatch, capsys):
    # Which takes 10 seconds here: that our model compiles is shown by test_recompute.py.
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    monkeypatch.setattr(Preset, "micro_batches", [1])
    options = ["--presets", "tiny", "--device", "cpu", "--steps", "2"]
    options += ["--json", str(tmp_path / "rows.json")]
    gpu.main([*options, "--profile", str(tmp_path / "traces")])
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [row["contender"] for row in rows] == list(gpu.CONTENDERS)
    assert "traceEvents" in json.loads((tmp_path / "traces" / "tiny.json").read_text())
    assert "Self CPU" in capsys.readouterr().out


BARE = """
import sys
for name in "pydantic rich datasets transformers tokenizers huggingface_hub wandb".split():
    sys.modules[name] = None  # as if it were not installed
from benchmarks import gpu
with gpu.one_process("cpu") as device:
    work = gpu.Work(gpu.PRESETS["tiny"], device)
    print(gpu.picotron_min(work, work.workload(1))(0).loss)
"""


@pytest.mark.slow
def test_the_benchmark_needs_nothing_but_torch_numpy_and_safetensors():
    """filelock comes with torch."""
    run = subprocess.run([sys.executable, "-c", BARE], capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 0, run.stderr
    assert float(run.stdout) == pytest.approx(5.55, rel=0.01)  # log 257


# From here on a GPU is needed. References are in float64, and errors relative to the whole tensor:
# bfloat16 has 8 binary digits.


def assert_near(ours: Tensor, reference: Tensor, error: float) -> None:
    ours = ours.double()
    assert (ours - reference).norm() < error * reference.norm(), (ours - reference).abs().max()


def drawn(dtype: torch.dtype, S: int, D: int, *heads: int) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, n, S, D, device=GPU, dtype=dtype) for n in heads]


def with_gradients(function: Callable, inputs: list[Tensor], gradient: Tensor) -> list[Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, gradient)]


def ring_of_two(q, own_k, own_v, other_k, other_v, gradient) -> list[Tensor]:
    """A rank's own keys, and those of a later rank, which only the late rows see."""
    late = slice(q.shape[2] // 2, None)
    out, lse = FLASH_CUDA.attend(q, own_k, own_v, True)
    out = out.float()
    block = FLASH_CUDA.attend(q[:, :, late], other_k, other_v, False)
    out[:, :, late], lse[:, :, late] = merge_blocks(out[:, :, late], lse[:, :, late], *block)
    out = out.to(q.dtype)
    dq, *own = FLASH_CUDA.backward(gradient, q, own_k, own_v, out, lse, True)
    inputs = gradient[:, :, late], q[:, :, late], other_k, other_v
    late_dq, *other = FLASH_CUDA.backward(*inputs, out[:, :, late], lse[:, :, late], False)
    dq[:, :, late] += late_dq
    return [out, dq, *own, *other]


def ring_in_one_piece(q, own_k, own_v, other_k, other_v) -> Tensor:
    S = q.shape[2]
    sees = torch.ones(S, 2 * S, dtype=torch.bool, device=GPU)
    sees[:, :S] = sees[:, :S].tril()
    sees[: S // 2, S:] = False
    keys, values = torch.cat([own_k, other_k], dim=2), torch.cat([own_v, other_v], dim=2)
    return F.scaled_dot_product_attention(q, keys, values, attn_mask=sees, enable_gqa=True)


@pytest.mark.gpu
@pytest.mark.parametrize("heads,head_dim", [((8, 8), 64), ((8, 2), 128)], ids=str)
def test_the_ring_s_kernel_equals_attention_in_one_piece(heads, head_dim):
    *inputs, gradient = drawn(torch.bfloat16, 256, head_dim, heads[0], *[heads[1]] * 4, heads[0])
    wide = [x.double() for x in inputs]
    expected = with_gradients(ring_in_one_piece, wide, gradient.double())
    for ours, reference in zip(ring_of_two(*inputs, gradient), expected, strict=True):
        assert_near(ours, reference, 0.01)


DOCUMENTS = Documents(((10, 50, 36), (96,)))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "ours,reference,dtype,S",
    [
        (
            partial(VarlenAttention(), documents=DOCUMENTS),
            partial(DocumentAttention(SoftmaxAttention()), documents=DOCUMENTS),
            torch.bfloat16,
            96,
        ),
        (RepeatedAttention(), SoftmaxAttention(), torch.float32, 4096),
        (RepeatedAttention(), SoftmaxAttention(), torch.bfloat16, 4096),
    ],
    ids=["documents", "repeated, float32", "repeated, bfloat16"],
)
def test_kernels_equal_the_written_out_attention_and_store_no_scores(ours, reference, dtype, S):
    *inputs, gradient = drawn(dtype, S, 64, 4, 2, 2, 4)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    found = with_gradients(ours, inputs, gradient)
    scores = 2 * 2 * 4 * S**2  # of 2 sequences and 2 heads of 4
    assert S < 4096 or torch.cuda.max_memory_allocated() - before < scores
    expected = with_gradients(reference, [x.double() for x in inputs], gradient.double())
    for mine, theirs in zip(found, expected, strict=True):
        assert_near(mine, theirs, 0.01)


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_the_fused_loss_in_bfloat16_is_near_the_one_in_float64(compiled):
    torch.manual_seed(0)
    inputs = [torch.randn(3000, 64, device=GPU), 0.1 * torch.randn(5000, 64, device=GPU)]
    targets = torch.randint(5000, (3000,), device=GPU)
    targets[::7] = IGNORE_INDEX
    of_stripe = torch.compile(stripe_loss, dynamic=False) if compiled else stripe_loss
    one = torch.ones((), device=GPU)
    in_stripes = mock.patch.dict(STRIPE_ROWS, cuda=1024)
    with in_stripes, torch.autocast(GPU.type, torch.bfloat16):
        found = with_gradients(lambda x, w: head_loss(x, w, targets, of_stripe), inputs, one)

    def by_the_book(x: Tensor, weight: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(x, weight), targets, reduction="sum")

    expected = with_gradients(by_the_book, [x.double() for x in inputs], one.double())
    assert found[0].dtype == torch.float32
    for ours, reference, error in zip(found, expected, (1e-3, 0.01, 0.01), strict=True):
        assert_near(ours, reference, error)


@pytest.fixture
def gpu_process():
    with gpu.one_process(GPU.type) as device:
        yield device


def run_of(micro_batch: int, device: torch.device, **options) -> Run:
    work = Work(TINY, device)
    workload = replace(work.workload(micro_batch), **options)
    return gpu.our_run(work, workload)


def gradients_by_the_book(run: Run) -> dict[str, Tensor]:
    """Of the mean loss of the first step, before clipping, in float64."""
    model = with_autograd(run.model.pipeline.chunks[0].model)
    work = Work(TINY, run.model.pipeline.device)
    batch = work.data(work.workload(TINY.micro_batches[-1])).batch(0, 0).to(work.device)
    logits = model(batch.tokens, batch.positions)
    loss = F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten())
    parameters = run.model.parameters
    return dict(zip(parameters, torch.autograd.grad(loss, parameters.values()), strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("compile", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
def test_gradients_of_a_step_are_those_by_the_book(gpu_process, recompute, compile):
    run = run_of(2, gpu_process, dtype="bfloat16", recompute=recompute, compile=compile)
    result = train_step(run, 0)
    reference = gradients_by_the_book(run_of(2, gpu_process, dtype="float64"))
    norm = torch.stack([g.norm() for g in reference.values()]).norm().item()
    assert result.grad_norm == pytest.approx(norm, rel=0.01)
    for name, parameter in run.model.parameters.items():
        assert_near(parameter.grad, min(1.0, 1.0 / norm) * reference[name], 0.05)


@pytest.mark.gpu
@pytest.mark.parametrize("compile", [False, True], ids=["eager", "compiled"])
def test_deterministic_steps_give_the_same_bits_twice(gpu_process, compile):
    compute_deterministically()
    try:
        weights = []
        for _ in range(2):
            run = run_of(2, gpu_process, dtype="bfloat16", compile=compile)
            for index in range(3):
                train_step(run, index)
            weights.append([p.detach().clone() for p in run.model.parameters.values()])
        assert all(map(torch.equal, *weights))
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.gpu
@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
def test_offload_on_a_gpu_trains_the_same_in_memory_that_it_keeps(gpu_process, recompute):
    # Written-out attention: fused backward adds in another order each time.
    kind = {"dtype": "float32", "flash_attention": False, "recompute": recompute}
    plain, ours = (run_of(2, gpu_process, offload=layers, **kind) for layers in (0, 3))
    hosts = []
    with mock.patch.object(offload, "LEAST_OFFLOAD", 1):
        for step in range(4):
            result, expected = train_step(ours, step), train_step(plain, step)
            assert result.loss == pytest.approx(expected.loss, rel=1e-5)
            for name, parameter in ours.model.parameters.items():
                assert_near(parameter.grad, plain.model.parameters[name].grad.double(), 1e-5)
            hosts.append(torch.cuda.host_memory_stats()["num_host_alloc"])
    # A copy may still be in flight when its memory is wanted again, so a few more are allocated.
    assert 0 < hosts[-1] < 2 * hosts[0], "pinned memory is used again"


@pytest.mark.gpu
def test_offload_leaves_as_much_less_on_a_gpu_as_planned(gpu_process):
    work, peaks, plans = Work(Preset("tiny", 2048, "full", tokens=8192), gpu_process), [], []
    for layers in (0, 3):
        workload = replace(work.workload(4), offload=layers)
        run = gpu.our_run(work, workload)
        train_step(run, 0)
        torch.cuda.reset_peak_memory_stats()
        train_step(run, 1)
        peaks.append(torch.cuda.max_memory_allocated())
        plans.append(memory_per_rank(work.model_config, Layout(), workload).activations)
        del run
        gpu.clean_up(gpu_process)
    assert peaks[0] - peaks[1] == pytest.approx(plans[0] - plans[1], rel=0.2)


@pytest.mark.gpu
@pytest.mark.parametrize("how", [{}, {"recompute": "full"}, {"offload": 3}], ids=str)
def test_nothing_but_one_read_makes_the_host_wait_for_the_gpu(gpu_process, how, monkeypatch):
    monkeypatch.setattr(offload, "LEAST_OFFLOAD", 1)
    run = run_of(2, gpu_process, dtype="bfloat16", **how)
    ranks = RankMonitor(dist.HashStore(), Launch(0, 0, 1, lambda timeout: None), 60)
    ranks.group = dist.new_group(backend="gloo")
    train_step(run, 0)
    cpu, reads = Tensor.cpu, []

    def allowed(tensor: Tensor) -> Tensor:  # the one read of train_step
        torch.cuda.set_sync_debug_mode("default")
        reads.append(cpu(tensor))
        torch.cuda.set_sync_debug_mode("error")
        return reads[-1]

    with mock.patch.object(Tensor, "cpu", allowed):
        torch.cuda.set_sync_debug_mode("error")
        try:
            train_step(run, 1)
            assert not ranks.stop_requested()
        finally:
            torch.cuda.set_sync_debug_mode("default")
            ranks.done.set()
    assert len(reads) == 1
