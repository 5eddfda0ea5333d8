"""What only a GPU can show, skipped without one; and first what a CPU can show of it."""

import functools
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import gpu
from benchmarks.gpu import Preset, Result, Work
from picotron_min.dry_run.device import GPU as FAKE_GPU
from picotron_min.dry_run.device import as_on_a_gpu
from picotron_min.dry_run.recorder import Recorder
from picotron_min.dry_run.run import dry_run
from picotron_min.extensions.kernels import attention
from picotron_min.extensions.kernels.attention import FLASH_CUDA
from picotron_min.extensions.memory import offload
from picotron_min.extensions.settings import ModelConfig
from picotron_min.layout import STRIPE_ROWS
from picotron_min.loss import head_loss, stripe_loss
from picotron_min.runtime.config import Config
from picotron_min.runtime.failures import RankMonitor
from picotron_min.runtime.launch import Launch, compute_deterministically, set_environment
from picotron_min.runtime.saver import Saver
from tests.assembled import make_training
from tests.rows import lines, row
from train import Run, train_step

GPU = torch.device("cuda")
SPEED = "tokens_per_second"


def test_what_arrives_on_the_host_is_brought_to_the_gpu(monkeypatch):
    monkeypatch.setattr(dist, "get_backend", lambda group: "gloo")
    config, _ = row("core: pp=2 cp=2 m=2", use_cpu=False, dtype="bfloat16")
    waits = dry_run(config, config.world_size - 1).waits
    assert any("collectives.py" in line for line in waits)  # slow, and right


def test_a_checkpoint_is_copied_from_the_gpu_with_one_wait():
    saver = Saver.__new__(Saver)
    saver.copies = {}
    stream = mock.patch("torch.cuda.current_stream")
    with as_on_a_gpu() as mode, Recorder("cuda", mode) as recorder, stream as stream:
        tensors = {name: torch.ones(3, device=FAKE_GPU) for name in "abc"}
        for copy in saver._copy(tensors).values():
            assert copy.device.type == "cpu" and copy.is_page_locked
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
    monkeypatch.setattr(attention, "aten", aten := mock.Mock())
    q, lse = torch.randn(2, 4, 3, 8), torch.randn(2, 4, 6)[:, :, 3:]
    FLASH_CUDA.backward(q, q, q, q, q, lse, False)
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


BARE = """
import sys
for name in "pydantic datasets transformers tokenizers huggingface_hub wandb".split():
    sys.modules[name] = None  # as if it were not installed
from benchmarks import gpu
work = gpu.Work(gpu.PRESETS["tiny"], gpu.torch.device("cpu"))
with gpu.one_process("cpu"):
    assert gpu.our_step(gpu.our_run(work, work.workload(4)))(0).loss > 0
"""


@pytest.mark.slow
def test_the_benchmark_needs_nothing_but_torch_numpy_and_safetensors():
    """filelock comes with torch."""
    root = Path(__file__).parent.parent
    subprocess.run([sys.executable, "-c", BARE], check=True, cwd=root)


# From here on a GPU is needed. Errors are relative to the whole tensor: bfloat16 has 8 binary
# digits. The ring's kernel is in test_context_parallel.py.


def assert_near(ours: Tensor, reference: Tensor, error: float) -> None:
    ours, reference = ours.double(), reference.double()
    assert (ours - reference).norm() < error * reference.norm(), (ours - reference).abs().max()


@pytest.fixture
def gpu_process():
    with gpu.one_process(GPU.type) as device:
        yield device


def run_of(device: torch.device, **options) -> Run:
    work = Work(Preset("tiny", 64, tokens=512), device)
    return gpu.our_run(work, replace(work.workload(2), **options))


WAYS = [{"compile": True}, {"recompute": "selective", "compile": True}]
WAYS += [{"recompute": "full", "offload": 3}, {"offload": 3}]


@pytest.mark.gpu
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_gradients_in_bfloat16_are_near_those_in_float64(gpu_process, way, monkeypatch):
    monkeypatch.setitem(STRIPE_ROWS, "cuda", 48)  # of 128
    monkeypatch.setattr(offload, "LEAST_OFFLOAD", 1)
    ours, exact = run_of(gpu_process, **way), run_of(gpu_process, dtype="float64")
    norm, expected = (train_step(run, 0).grad_norm for run in (ours, exact))
    assert norm == pytest.approx(expected, rel=0.01)
    for name, parameter in ours.model.parameters.items():
        assert_near(parameter.grad, exact.model.parameters[name].grad, 0.05)


@pytest.mark.gpu
@pytest.mark.parametrize("compile", [False, True], ids=["eager", "compiled"])
def test_deterministic_steps_give_the_same_bits_twice(gpu_process, compile):
    compute_deterministically()
    try:
        weights = []
        for _ in range(2):
            run = run_of(gpu_process, compile=compile)
            for index in range(3):
                train_step(run, index)
            weights.append([p.detach().clone() for p in run.model.parameters.values()])
        assert all(map(torch.equal, *weights))
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.gpu
@pytest.mark.parametrize("way", [{}, {"recompute": "full"}, {"offload": 3}], ids=str)
def test_nothing_but_one_read_makes_the_host_wait_for_the_gpu(gpu_process, way, monkeypatch):
    monkeypatch.setattr(offload, "LEAST_OFFLOAD", 1)
    run = run_of(gpu_process, **way)
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


# Ranks that share a GPU, over gloo.

SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "vocab_size": 500, "moe_intermediate_size": 128}
SIZES |= {"seq_length": 64, "micro_batches": 4, "layers": 4}
# What is on, how far losses and norms may be apart, and in which layouts.
KINDS = """
dtype=float64 | 1e-9 1e-9 | dp=2 sharding=optimizer, dp=2 sharding=parameters, tp=2 sp tp_overlap
dtype=float64 | 1e-9 1e-9 | pp=2, pp=2 engine=zb_h1, cp=2, cp=2 ulysses
dtype=bfloat16 | 1e-2 3e-2 | dp=2, dp=2 sharding=optimizer, dp=2 sharding=parameters, tp=2
dtype=bfloat16 | 1e-2 3e-2 | tp=2 sp tp_overlap, pp=2 engine=interleaved, cp=2, cp=2 ulysses
dtype=float32 | 1e-4 1e-3 | dp=2, tp=2, pp=2, cp=2, cp=2 ulysses
dtype=bfloat16 fp8 | 1e-2 5e-2 | tp=2 sp, dp=2 sharding=parameters, pp=2 engine=zb_h1
dtype=bfloat16 mask | 1e-2 3e-2 | dp=2, cp=2, cp=2 ulysses
dtype=bfloat16 recompute=full offload=1 | 1e-2 3e-2 | tp=2 sp, pp=2
dtype=float64 num_local_experts=4 | 1e-9 1e-9 | dp=2 ep=2, tp=2 sp
dtype=bfloat16 num_local_experts=4 | 1e-2 5e-2 | dp=2, dp=2 ep=2, tp=2 sp
"""
CASES = [
    (kind, f"{kind} {layout}", limits)
    for kind, limits, layouts in (line.split(" | ") for line in lines(KINDS))
    for layout in layouts.split(", ")
]


def losses_and_norms(config: Config, model: ModelConfig, device: str) -> list[tuple]:
    training = make_training(config, model, device=device)
    return [training.step(step)[:2] for step in range(3)]


@functools.cache
def trained(pool, text: str, device: str = "cuda:0") -> Tensor:
    """[step, loss or norm]; all ranks have the same."""
    config, model = row(f"gpu: {text}", **SIZES)
    ranks = pool.run(config.world_size, losses_and_norms, config, model, device, timeout=120)
    assert all(rank == ranks[0] for rank in ranks)
    return torch.tensor(ranks[0], dtype=torch.float64)


def assert_same(ours: Tensor, reference: Tensor, limits: str) -> None:
    apart = ((ours - reference) / reference).abs().amax(0)
    assert (apart < torch.tensor([float(x) for x in limits.split()])).all(), (ours, reference)


@pytest.mark.gpu
@pytest.mark.parametrize("alone,shared,limits", CASES)
def test_two_ranks_on_one_gpu_train_what_one_rank_does(pool, alone, shared, limits):
    assert_same(trained(pool, shared), trained(pool, alone), limits)


AS_ON_A_CPU = """
dtype=float64 | 1e-9 1e-9
dtype=float64 num_local_experts=4 | 1e-9 1e-9
dtype=float32 | 1e-4 1e-3
dtype=bfloat16 | 1e-2 3e-2
dtype=bfloat16 mask | 1e-2 3e-2
dtype=bfloat16 fp8 | 1e-2 5e-2
"""


@pytest.mark.gpu
@pytest.mark.parametrize("text", lines(AS_ON_A_CPU))
def test_a_gpu_trains_what_a_cpu_does(pool, text):
    kind, limits = text.split(" | ")
    assert_same(trained(pool, kind), trained(pool, kind, "cpu"), limits)
