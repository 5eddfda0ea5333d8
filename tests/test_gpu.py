"""What only a GPU can show, skipped without one; and what can be shown of it on a CPU:
that the host leaves a GPU alone, and that benchmarks/gpu.py does its arithmetic."""

import gc
import json
import math
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import gpu
from benchmarks.common import Done
from benchmarks.gpu import Preset, Result, Work
from picotron_min.attention import SoftmaxAttention, merge_blocks
from picotron_min.extensions.documents.attention import DocumentAttention, VarlenAttention
from picotron_min.extensions.documents.rectangles import Documents
from picotron_min.extensions.kernels import attention
from picotron_min.extensions.kernels.attention import (
    FLASH_CUDA,
    RepeatedAttention,
    choose_attention,
)
from picotron_min.extensions.memory import offload
from picotron_min.extensions.overlap.linear import linears
from picotron_min.extensions.precision import extension as precision
from picotron_min.extensions.settings import Layout
from picotron_min.layout import STRIPE_ROWS
from picotron_min.loss import IGNORE_INDEX, head_loss, stripe_loss
from picotron_min.planner.memory import memory_per_rank
from picotron_min.runtime.failures import RankMonitor
from picotron_min.runtime.launch import Launch, compute_deterministically, set_environment
from picotron_min.runtime.saver import Saver
from tests import fake_cuda
from tests.assembled import MODEL, make_config, make_training
from tests.fake_cuda import waits_of_a_step
from tests.training import with_autograd
from train import Run, train_step

ROOT = Path(__file__).parent.parent
GPU = torch.device("cuda")


def casts_of_a_step(recompute: str) -> Counter[str]:
    config = make_config(micro_batches=4, layers=4, recompute=recompute, dtype="bfloat16")
    training = make_training(config, MODEL)
    copies = [linear.copy for linear in linears(training.chunks[0].model).values()]
    matrices = {copy.shape for copy in copies}
    copies = {copy.data_ptr() for copy in copies}
    head, casts = training.parameters["lm_head.weight"], Counter()

    class Casts(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            is_cast = function.overloadpacket is torch.ops.aten._to_copy
            is_copy = function.overloadpacket is torch.ops.aten._foreach_copy_
            casts["head"] += is_cast and args[0] is head
            casts["weights"] += sum(x.data_ptr() in copies for x in args[0]) if is_copy else 0
            casts["weights or gradients"] += is_cast and args[0].shape in matrices
            return function(*args, **(kwargs or {}))

    with Casts():
        training.step(0)
    return casts


@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
def test_a_step_casts_each_weight_once_and_the_head_once_a_micro_batch(pool, recompute):
    (casts,) = pool.run(1, casts_of_a_step, recompute)
    assert casts == {"head": 4, "weights": 4 * 7, "weights or gradients": 0}


def compare_copies_with_autocast(sizes: dict) -> None:
    config = make_config(micro_batches=2, optimizer="adamw", dtype="bfloat16", **sizes)
    with mock.patch.object(precision, "apply_copies"):
        without = make_training(config, MODEL)
    ours = make_training(config, MODEL)
    for step in range(3):
        assert ours.step(step)[:2] == without.step(step)[:2]
    for name, weight in ours.parameters.items():
        assert torch.equal(weight, without.parameters[name]), name


LAYOUTS = [
    {},
    {"tp": 2, "sequence_parallel": True, "recompute": "selective"},
    {"pp": 2, "engine": "interleaved", "chunks": 2, "recompute": "full"},
]


@pytest.mark.parametrize("sizes", LAYOUTS, ids=str)
def test_copies_of_the_weights_give_what_autocast_would_to_the_last_bit(pool, sizes):
    pool.run(make_config(**sizes).world_size, compare_copies_with_autocast, sizes)


SIZES = {"hidden_size": 64, "intermediate_size": 64, "num_key_value_heads": 4, "vocab_size": 512}
SIZES |= {"use_cpu": False, "dtype": "bfloat16", "optimizer": "adamw"}
EXPERTS = {"num_local_experts": 4, "moe_intermediate_size": 32}
PADDED = EXPERTS | {"moe_expert_capacity_factor": 1.5, "moe_pad_expert_input_to_capacity": True}
LAST_RANK_WAITS_ONCE = [
    {"optimizer": "sgd", "dtype": "float32"},
    {"dp": 4, "optimizer": "muon", "tp": 2},
    {"dp": 2, "sharding": "parameters", "fp8": True, "seq_length": 32},
    {"tp": 2, "sequence_parallel": True, "tp_overlap": True},
    {"cp": 4, "document_mask": True},
    {"cp": 4, "cp_engine": "ulysses", "document_mask": True},
    {"pp": 4, "micro_batches": 4, "recompute": "selective"},
    {"pp": 2, "dp": 2, "engine": "zb_v", "chunks": 2, "micro_batches": 2},
    {"pp": 2, "engine": "interleaved", "chunks": 2, "micro_batches": 2, "sharding": "optimizer"},
    {"dp": 2, "pp": 2, "cp": 2, "tp": 2, "micro_batches": 2, "count_zeros": True},
    {"layers": 4, "offload": 3, "recompute": "full", "moments": "bfloat16"},
    {"dp": 2, "ep": 2} | PADDED,
]


@pytest.mark.parametrize("sizes", LAST_RANK_WAITS_ONCE, ids=str)
def test_a_step_has_one_wait_for_the_gpu(monkeypatch, sizes):
    """On fake tensors of the last rank, which often counts no gradient; below on a GPU itself."""
    monkeypatch.setattr(offload, "LEAST_OFFLOAD", 1)
    config = make_config(**SIZES | sizes)
    waits = waits_of_a_step(config, rank=config.world_size - 1)
    assert [*waits.values()] == [1] and "train.py" in min(waits), waits


@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
def test_experts_that_are_not_padded_add_a_wait_a_layer(monkeypatch, capability):
    """For the numbers of rows. torch would read them again for every product on an A100."""
    patch = (torch.cuda, "get_device_capability", lambda *_: capability)
    monkeypatch.setattr(fake_cuda, "PATCHES", [*fake_cuda.PATCHES, patch])
    config = make_config(dp=2, ep=2, layers=3, **SIZES | EXPERTS)
    waits = waits_of_a_step(config, rank=1)
    assert sorted(waits.values()) == [1, 3], waits


def test_a_checkpoint_is_copied_from_the_gpu_with_one_wait():
    saver = Saver.__new__(Saver)
    saver.copies = {}
    with fake_cuda.as_on_a_gpu() as host, mock.patch("torch.cuda.current_stream") as stream:
        tensors = {name: torch.ones(3, device=fake_cuda.GPU) for name in "abc"}
        for copy in saver._copy(tensors).values():
            assert copy.is_cpu and copy.is_page_locked
    assert not host.waits.total() and stream().synchronize.call_count == 1


def test_no_sum_of_a_stripe_is_rounded_on_a_gpu():
    with fake_cuda.as_on_a_gpu(), mock.patch.object(torch, "addmm", wraps=torch.addmm) as addmm:
        x, weight = (torch.ones(n, 8, device=fake_cuda.GPU) for n in (5000, 16))
        targets = torch.ones(5000, device=fake_cuda.GPU, dtype=torch.int64)
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


TINY = Preset("tiny", 64, tokens=512)
ON_CPU = Work(TINY, torch.device("cpu"))


@pytest.fixture
def clock(monkeypatch) -> list[float]:
    """The benchmark's clock, which only steps of a `contender` advance."""
    now = [0.0]
    monkeypatch.setattr(gpu, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(gpu, "clean_up", lambda device: None)  # seconds, for nothing here
    return now


def contender(seconds: dict[int, float], fits: int, now: list) -> tuple[Callable, list]:
    """One whose steps take so long at each micro-batch, and need memory for `fits` at most."""
    sizes = []

    def make(size):
        sizes.append(size)

        def step(index):
            if size > fits:
                raise torch.OutOfMemoryError
            now[0] += seconds[size]
            return Done(1.0, 2.0)

        return step

    return make, sizes


def test_the_fastest_micro_batch_is_found(clock):
    for seconds, fits, best, tried in (
        ({1: 0.03, 2: 0.02, 4: 0.01, 8: 0.002}, 8, 8, 8),
        ({1: 0.03, 2: 0.01, 4: 0.03}, 8, 2, 4),  # larger is slower
        ({1: 0.02, 2: 0.01}, 2, 2, 4),  # larger does not fit
    ):
        who, sizes = contender(seconds, fits, clock)
        result = gpu.fastest("somebody", ON_CPU, who, [1, 2, 4, 8], 2)
        assert (result.micro_batch, max(sizes)) == (best, tried)
        assert len(result.step_seconds) == 2 and result.done == [(1.0, 2.0)] * 5
        assert result.speed["tokens_per_second"] == pytest.approx(TINY.tokens / seconds[best])


def test_micro_batches_are_whole():
    for preset in gpu.PRESETS.values():
        assert preset.micro_batches[-1] * preset.seq_length == preset.tokens


def test_an_error_at_a_larger_micro_batch_keeps_the_smaller_one_s_numbers(clock, capsys):
    who, _ = contender({1: 0.02, 2: 0.01}, 2, clock)

    def make(size):
        if size == 4:
            raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED\nand a stack")
        return who(size)

    assert gpu.fastest("somebody", ON_CPU, make, [1, 2, 4, 8], 2).micro_batch == 2
    assert capsys.readouterr().err == "somebody at 4: CUDA error: CUBLAS_STATUS_ALLOC_FAILED\n"


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("full"), KeyError("a surprise")])
def test_a_contender_that_fails_leaves_the_others_their_numbers(monkeypatch, capsys, error):
    ours, sizes = contender(dict.fromkeys((1, 2, 4), 0.001), 4, [0.0])
    monkeypatch.setattr(gpu, "picotron_min", lambda work, workload: ours(workload.micro_batch_size))
    monkeypatch.setattr(gpu, "transformers_model", mock.Mock(side_effect=error))
    monkeypatch.setattr(gpu, "clean_up", lambda device: None)  # seconds, for nothing here
    results = list(gpu.measure(ON_CPU, gpu.CONTENDERS, None, 2))
    contenders = [result.contender for result in results]
    assert contenders == ["picotron-min", gpu.ALONE, "picotron-min compiled"]
    assert all(len(result.step_seconds) == 2 for result in results)
    assert type(error).__name__ in capsys.readouterr().err
    sizes.clear()
    (only,) = gpu.measure(ON_CPU, ["picotron-min compiled"], [2], 2)
    assert (only.contender, sizes) == ("picotron-min compiled", [2])


def test_gpu_memory_grows_in_segments_unless_the_user_chose(monkeypatch):
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.setenv(name, "mine")
        set_environment()
        assert os.environ.pop(name) == "mine" and "PYTORCH_ALLOC_CONF" not in os.environ
    set_environment()
    assert os.environ["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"


def test_rows_have_ratios():
    names = "tokens_per_second", "mfu", "hfu", "memory_gb"
    ours, theirs = (
        Result(who, size, seconds, [], dict(zip(names, numbers, strict=True)))
        for who, size, seconds, numbers in (
            ("picotron-min", 4, [0.1, 0.2, 0.9], (2000, 0.5, None, 12.34)),
            ("transformers", 2, [0.4], (1000, 0.25, 0.3, 20)),
        )
    )
    lines = [" ".join(gpu.line(r, [ours, theirs]).split()) for r in (ours, theirs)]
    assert lines[0] == "picotron-min 4 200.0 2000 50.0% n/a 12.3 1.000"
    assert lines[1] == "transformers 2 400.0 1000 25.0% 30.0% 20.0 2.000"


def count_tensors_with_and_after_a_contender() -> None:
    def count() -> int:
        gpu.clean_up(ON_CPU.device)
        return sum(issubclass(type(x), Tensor) for x in gc.get_objects())

    gpu.weights_of(TINY.model)  # stay on the host
    before, step = count(), gpu.picotron_min(ON_CPU, ON_CPU.workload(4))
    step(0)
    with_it = count()
    del step
    assert count() <= before < with_it


def test_nothing_is_left_of_a_contender_in_the_next_one_s_memory(pool):
    pool.run(1, count_tensors_with_and_after_a_contender)


@pytest.mark.slow
def test_the_benchmark_runs_to_its_end_on_a_cpu(tmp_path, monkeypatch, capsys):
    # Which takes 10 seconds here: that our model compiles is shown by test_compile.py.
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    monkeypatch.setattr(Preset, "micro_batches", [1])
    options = ["--presets", "tiny", "--device", "cpu", "--steps", "2"]
    options += ["--json", str(tmp_path / "rows.json")]
    gpu.main([*options, "--profile", str(tmp_path / "traces")])
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [row["contender"] for row in rows] == list(gpu.CONTENDERS)
    assert "traceEvents" in json.loads((tmp_path / "traces" / "tiny.json").read_text())
    shown = capsys.readouterr().out
    assert "Self CPU" in shown
    for who in ("picotron-min", "transformers"):
        assert re.search(rf"^{who} +1 .*%.*^{who} compiled +1 .*%", shown, re.DOTALL | re.MULTILINE)


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
    assert float(run.stdout) == pytest.approx(math.log(257), rel=0.01)


# From here on a GPU is needed. References are in float64, and errors relative to the whole tensor:
# bfloat16 has 8 binary digits.


def assert_near(ours: Tensor, reference: Tensor, error: float) -> None:
    ours = ours.double()
    assert (ours - reference).norm() < error * reference.norm(), (ours - reference).abs().max()


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [(8, 8), (8, 2)], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_ring_s_kernel_equals_attention_in_one_piece(heads, head_dim):
    """One's own keys, and those of a later rank, which only the late rows see."""
    capability = torch.cuda.get_device_capability(GPU)
    assert choose_attention("cuda", capability, torch.bfloat16, head_dim)[1] is FLASH_CUDA
    q_heads, kv_heads, S = *heads, 256
    torch.manual_seed(0)
    q, own_k, own_v, other_k, other_v, gradient = tensors = [
        torch.randn(2, n, S, head_dim, device=GPU, dtype=torch.bfloat16)
        for n in (q_heads, *[kv_heads] * 4, q_heads)
    ]
    late = slice(S // 2, S)
    out, lse = FLASH_CUDA.attend(q, own_k, own_v, True)
    out = out.float()
    block = FLASH_CUDA.attend(q[:, :, late], other_k, other_v, False)
    out[:, :, late], lse[:, :, late] = merge_blocks(out[:, :, late], lse[:, :, late], *block)
    out = out.to(q.dtype)
    dq, *own = FLASH_CUDA.backward(gradient, q, own_k, own_v, out, lse, True)
    of_late = (x[:, :, late] for x in (gradient, q))
    late_dq, *other = FLASH_CUDA.backward(
        *of_late, other_k, other_v, out[:, :, late], lse[:, :, late], False
    )
    dq[:, :, late] += late_dq

    leaves = [x.double().requires_grad_() for x in tensors[:5]]
    sees = torch.ones(S, 2 * S, dtype=torch.bool, device=GPU)
    sees[:, :S] = sees[:, :S].tril()
    sees[: S // 2, S:] = False
    keys, values = torch.cat(leaves[1::2], dim=2), torch.cat(leaves[2::2], dim=2)
    expected = F.scaled_dot_product_attention(
        leaves[0], keys, values, attn_mask=sees, enable_gqa=True
    )
    expected.backward(gradient.double())
    assert_near(out, expected, 0.01)
    for ours, leaf in zip((dq, *own, *other), leaves, strict=True):
        assert ours.shape == leaf.shape
        assert_near(ours, leaf.grad, 0.01)


@pytest.mark.gpu
def test_documents_in_one_kernel_equal_one_after_another():
    documents = Documents(((10, 50, 36), (96,)))
    torch.manual_seed(0)
    *tensors, gradient = (
        torch.randn(2, n, 96, 64, device=GPU, dtype=torch.bfloat16) for n in (4, 2, 2, 4)
    )
    leaves = [x.clone().requires_grad_() for x in tensors]
    out = VarlenAttention()(*leaves, documents)
    out.backward(gradient)
    wide = [x.double().requires_grad_() for x in tensors]
    expected = DocumentAttention(SoftmaxAttention())(*wide, documents)
    expected.backward(gradient.double())
    assert_near(out, expected, 0.01)
    for leaf, reference in zip(leaves, wide, strict=True):
        assert_near(leaf.grad, reference.grad, 0.01)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_repeated_attention_equals_the_written_out_and_stores_no_scores(dtype):
    S = 4096
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, n, S, 64, device=GPU, dtype=dtype) for n in (8, 2, 2))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = RepeatedAttention()(*leaves)
    out.backward(torch.ones_like(out))
    assert torch.cuda.max_memory_allocated() - before < 2 * 4 * S**2, "the scores of 2 heads of 8"
    wide = [x.double().requires_grad_() for x in (q, k, v)]
    expected = SoftmaxAttention()(*wide)
    expected.sum().backward()
    assert_near(out, expected, 0.01)
    for leaf, reference in zip(leaves, wide, strict=True):
        assert_near(leaf.grad, reference.grad, 0.01)


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_the_fused_loss_in_bfloat16_is_near_the_one_in_float64(compiled):
    torch.manual_seed(0)
    x, weight = torch.randn(3000, 64, device=GPU), 0.1 * torch.randn(5000, 64, device=GPU)
    targets = torch.randint(5000, (3000,), device=GPU)
    targets[::7] = IGNORE_INDEX
    leaves = [t.clone().requires_grad_() for t in (x, weight)]
    of_stripe = torch.compile(stripe_loss, dynamic=False) if compiled else stripe_loss
    in_stripes = mock.patch.dict(STRIPE_ROWS, cuda=1024)
    with in_stripes, torch.autocast(GPU.type, torch.bfloat16):
        loss = head_loss(*leaves, targets, of_stripe)
    loss.backward()
    wide = [t.double().requires_grad_() for t in (x, weight)]
    expected = F.cross_entropy(F.linear(*wide), targets, reduction="sum")
    expected.backward()
    assert loss.dtype == torch.float32
    assert_near(loss, expected, 1e-3)
    for ours, reference in zip(leaves, wide, strict=True):
        assert_near(ours.grad, reference.grad, 0.01)


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
    device = run.model.pipeline.device
    work = Work(TINY, device)
    batch = work.data(work.workload(TINY.micro_batches[-1])).batch(0, 0).to(device)
    logits = model(batch.tokens, batch.positions)
    loss = F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten())
    parameters = run.model.parameters
    return dict(zip(parameters, torch.autograd.grad(loss, parameters.values()), strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("compile", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
def test_buckets_gather_the_gradients_of_all_micro_batches(gpu_process, recompute, compile):
    run = run_of(2, gpu_process, dtype="bfloat16", recompute=recompute, compile=compile)
    flat = [b.gradients for some in run.model.gradients for b in some.buckets]
    result = train_step(run, 0)
    reference = gradients_by_the_book(run_of(2, gpu_process, dtype="float64"))
    norm = torch.stack([g.norm() for g in reference.values()]).norm().item()
    assert result.grad_norm == pytest.approx(norm, rel=0.01)
    clip = min(1.0, 1.0 / norm)
    pieces = {name: p.grad for name, p in run.model.parameters.items()}
    assert sum(p.numel() for p in pieces.values()) == sum(f.numel() for f in flat)
    for name, gradient in pieces.items():
        assert any(gradient._is_view() and gradient._base is f for f in flat), name
        assert_near(gradient, clip * reference[name], 0.05)


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
