"""The splits, the blocks, the ring and Ulysses; whole training runs are in test_layouts.py."""

import itertools
import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from picotron_min import collectives, context_parallel
from picotron_min.attention import (
    SOFTMAX,
    Kernel,
    SoftmaxAttention,
    attend_block,
    merge_blocks,
)
from picotron_min.collectives import Axis
from picotron_min.context_parallel import (
    POSITIONS,
    RingAttention,
    UlyssesAttention,
)
from picotron_min.extensions.kernels.attention import (
    FLASH_CPU,
    FLASH_CUDA,
    CpuAttention,
    RepeatedAttention,
    choose_attention,
)
from picotron_min.extensions.settings import Layout
from picotron_min.mesh import build_axes
from picotron_min.model import FlashAttention
from tests.assembled import MODEL, make_config, make_training

KERNELS = {"flash": FLASH_CPU, "softmax": SOFTMAX}
CPU = torch.device("cpu")


def whole_sequence(parts: list[Tensor], positions: list[Tensor], dim: int) -> Tensor:
    """The inverse of the split: the ranks' parts of a sequence, in order."""
    return torch.cat(parts, dim).index_select(dim, torch.cat(positions).argsort())


@pytest.mark.parametrize("engine", POSITIONS)
@pytest.mark.parametrize("size,length", [(1, 7), (2, 48), (3, 48), (8, 48)])
def test_the_parts_of_a_sequence_make_it_whole_again(size, length, engine):
    sequence = torch.randn(2, length, 3)
    positions = [POSITIONS[engine](rank, size, length) for rank in range(size)]
    parts = [sequence[:, p] for p in positions]
    assert all(part.shape == (2, length // size, 3) for part in parts)
    assert torch.equal(whole_sequence(parts, positions, dim=1), sequence)
    with pytest.raises(AssertionError, match="positions in"):
        POSITIONS["ring"](0, 2, 10)


def test_zigzag_gives_every_rank_the_same_work_and_order_does_not():
    def imbalance(engine: str, size: int) -> float:
        positions = [POSITIONS[engine](rank, size, 2**16) for rank in range(size)]
        work = [(p + 1).sum().item() for p in positions]  # the query at p sees p + 1 keys
        assert sum(work) == 2**16 * (2**16 + 1) // 2
        return max(work) * size / sum(work)

    for size, contiguous in {2: 1.5, 4: 1.75, 8: 1.875}.items():
        assert imbalance("ring", size) == 1
        assert imbalance("ulysses", size) == pytest.approx(contiguous, abs=1e-4)


def random_qkv(
    batch: int, q_heads: int, kv_heads: int, length: int, dtype=torch.float64
) -> list[Tensor]:
    """q, k, v and a gradient of the output, the same on all ranks."""
    generator = torch.Generator().manual_seed(1)
    heads = (q_heads, kv_heads, kv_heads, q_heads)
    return [torch.randn(batch, h, length, 8, generator=generator).to(dtype) for h in heads]


def test_merging_does_not_overflow_where_exponents_would():
    q, k, v, _ = (x.abs() for x in random_qkv(1, 1, 1, 4))
    large = attend_block(300 * q, 300 * k, v, False)
    out, lse = merge_blocks(*large, *attend_block(q, k, -v, False))
    assert lse.min() > 1000
    torch.testing.assert_close(out, large[0])


def attention(engine: str, axis: Axis, kernel: str) -> torch.nn.Module:
    if engine == "ring":
        return RingAttention(axis, KERNELS[kernel])
    return UlyssesAttention(axis, FlashAttention() if kernel == "flash" else SoftmaxAttention())


def attend_in_parts(engine: str, kernel: str, shape: tuple, dtype=torch.float64) -> tuple:
    """This rank's part of out, dq, dk, dv; and its positions."""
    axis = build_axes(CPU, Layout(cp=torch.distributed.get_world_size())).cp
    positions = POSITIONS[engine](axis.rank, axis.size, shape[-1])
    q, k, v, gradient = (x[:, :, positions] for x in random_qkv(*shape, dtype))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = attention(engine, axis, kernel)(*leaves)
    out.backward(gradient)
    return *(x.detach() for x in (out, *(leaf.grad for leaf in leaves))), positions


def assemble(parts: list[tuple]) -> list[Tensor]:
    *tensors, positions = zip(*parts, strict=True)
    return [whole_sequence(list(x), list(positions), dim=2) for x in tensors]


def full_attention(shape: tuple, dtype=torch.float64, rounded_to=torch.float64) -> list[Tensor]:
    """out, dq, dk, dv on one rank by torch's own, from inputs of some precision."""
    q, k, v, gradient = (x.to(dtype) for x in random_qkv(*shape, rounded_to))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = F.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True)
    out.backward(gradient)
    return [out.detach(), *(leaf.grad for leaf in leaves)]


BFLOAT16, FLOAT32, FLOAT64 = torch.bfloat16, torch.float32, torch.float64
TURING, AMPERE, HOPPER = (7, 5), (8, 0), (9, 0)


@pytest.mark.parametrize(
    "device,capability,dtype,head_dim,attention,kernel",
    [
        ("cpu", (0, 0), BFLOAT16, 64, FlashAttention, FLASH_CPU),
        ("cpu", (0, 0), FLOAT64, 7, CpuAttention, FLASH_CPU),
        ("cuda", AMPERE, BFLOAT16, 64, FlashAttention, FLASH_CUDA),
        ("cuda", HOPPER, BFLOAT16, 256, FlashAttention, FLASH_CUDA),
        ("cuda", HOPPER, BFLOAT16, 100, FlashAttention, SOFTMAX),  # only F.sdpa pads to 104
        ("cuda", HOPPER, BFLOAT16, 264, RepeatedAttention, SOFTMAX),
        ("cuda", HOPPER, FLOAT32, 64, RepeatedAttention, SOFTMAX),
        ("cuda", HOPPER, FLOAT32, 6, SoftmaxAttention, SOFTMAX),  # 16 bytes are 4 numbers
        ("cuda", HOPPER, FLOAT64, 64, SoftmaxAttention, SOFTMAX),
        ("cuda", TURING, BFLOAT16, 64, RepeatedAttention, SOFTMAX),
        ("cuda", TURING, FLOAT32, 6, RepeatedAttention, SOFTMAX),
        ("cuda", TURING, FLOAT64, 64, SoftmaxAttention, SOFTMAX),
    ],
)
def test_attention_is_chosen_that_works_on_the_device(
    device, capability, dtype, head_dim, attention, kernel
):
    assert choose_attention(device, capability, dtype, head_dim) == (attention, kernel)


@pytest.mark.parametrize("autocast", [False, True])
def test_repeated_attention_is_in_float32_and_needs_no_grouped_queries(autocast, monkeypatch):
    """torch's efficient kernel takes neither bfloat16 on older cards nor grouped queries."""
    q, k, v, gradient = random_qkv(2, 6, 2, 24, BFLOAT16)
    calls, torch_attention = [], F.scaled_dot_product_attention

    def attention(q, k, v, **options):
        calls.append(({x.dtype for x in (q, k, v)}, {x.shape for x in (q, k, v)}, options))
        assert not torch.is_autocast_enabled("cpu"), "it would cast to bfloat16"
        return torch_attention(q, k, v, **options)

    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    with monkeypatch.context() as patch, torch.autocast("cpu", BFLOAT16, enabled=autocast):
        patch.setattr(F, "scaled_dot_product_attention", attention)
        out = RepeatedAttention()(*leaves)
        out.backward(gradient)
    assert calls == [({FLOAT32}, {q.shape}, {"is_causal": True})] and out.dtype == BFLOAT16
    expected = full_attention((2, 6, 2, 24), rounded_to=BFLOAT16)
    for ours, theirs in zip((out, *(x.grad for x in leaves)), expected, strict=True):
        assert (ours - theirs).norm() < 0.004 * theirs.norm()


# ranks, then batch, query heads, key-value heads, length
SHAPES = {
    "one rank": (1, (2, 4, 2, 16)),
    "GQA": (4, (3, 8, 2, 16)),
    "odd heads": (2, (2, 9, 3, 12)),
    "long": (4, (1, 4, 1, 264)),  # longer than a tile of the kernel
}


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("engine", POSITIONS)
@pytest.mark.parametrize("ranks,shape", SHAPES.values(), ids=SHAPES)
def test_both_engines_equal_full_attention(pool, ranks, shape, engine, kernel):
    if engine == "ulysses" and shape[1] % ranks:
        ranks = 3  # 9 heads
    parts = assemble(pool.run(ranks, attend_in_parts, engine, kernel, shape))
    for ours, expected in zip(parts, full_attention(shape), strict=True):
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-11)


@pytest.mark.parametrize("length", [128, 272, 1024])  # 1, 2 and 8 triangles
def test_a_backward_in_parts_equals_torchs(length):
    q, k, v, gradient = random_qkv(2, 6, 2, length)
    leaves = [[x.clone().requires_grad_() for x in (q, k, v)] for _ in range(2)]
    attentions = CpuAttention(), FlashAttention()
    outs = [attention(*inputs) for attention, inputs in zip(attentions, leaves, strict=True)]
    grads = [torch.autograd.grad(o, i, gradient) for o, i in zip(outs, leaves, strict=True)]
    for ours, expected in zip((outs[0], *grads[0]), (outs[1], *grads[1]), strict=True):
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("engine", POSITIONS)
def test_bfloat16_errs_no_more_than_torch_does_on_one_rank(pool, engine):
    shape = (2, 8, 2, 512)
    exact = full_attention(shape, rounded_to=BFLOAT16)
    theirs = full_attention(shape, dtype=BFLOAT16, rounded_to=BFLOAT16)
    ours = assemble(pool.run(4, attend_in_parts, engine, "flash", shape, BFLOAT16))
    for i, name in enumerate(["out", "dq", "dk", "dv"]):
        error, torch_error = ((x[i] - exact[i]).norm() / exact[i].norm() for x in (ours, theirs))
        assert error < 0.007, f"{name} errs by {error:.4f} of its norm"
        assert error <= 1.01 * torch_error, f"{name}: torch errs by {torch_error:.4f}"


def bytes_by_call(engine: str, shape: tuple, recompute: bool) -> list[dict]:
    """What this rank sent in the forward and in the backward pass of one attention."""
    axis = build_axes(CPU, Layout(cp=torch.distributed.get_world_size())).cp
    length = shape[-1] // axis.size
    *leaves, gradient = (x[:, :, :length] for x in random_qkv(*shape, torch.bfloat16))
    leaves = [x.clone().requires_grad_() for x in leaves]
    attend = attention(engine, axis, "flash")
    sent = []
    if recompute:
        attend = partial(checkpoint, attend, use_reentrant=False)
    out = attend(*leaves)
    sent.append(dict(axis.ledger.bytes))
    axis.ledger.take_bytes()
    out.backward(gradient)
    return [*sent, dict(axis.ledger.bytes)]


@pytest.mark.parametrize("ranks,recompute", [(2, False), (4, True)])
def test_the_ring_carries_key_value_heads_and_as_many_bytes_as_its_docstring_states(
    pool, ranks, recompute
):
    B, Q, K, S, D = 2, 8, 2, 32, 8
    sent = 2 * (ranks - 1) * 2 * B * K * S // ranks * D
    for forward, backward in pool.run(ranks, bytes_by_call, "ring", (B, Q, K, S), recompute):
        assert forward == {"shift": sent}
        assert backward == {"shift": (1 + recompute) * sent + 2 * sent}


@pytest.mark.parametrize("ranks,heads", [(4, (8, 2)), (3, (6, 2))], ids=str)
def test_ulysses_sends_as_many_bytes_as_its_docstring_states(pool, ranks, heads):
    (Q, K), B, S, D = heads, 2, 24, 8
    q, k = (2 * B * n * S // ranks * D for n in (Q, math.lcm(K, ranks)))
    for sent in pool.run(ranks, bytes_by_call, "ulysses", (B, Q, K, S), False):
        assert sent == 2 * [{"all_to_all": (ranks - 1) / ranks * (2 * q + 2 * k)}]


def order_of_events() -> list[str]:
    """The messages and the computations of a rank in forward and backward, in order."""
    events = []

    class LoggedShift(collectives.Shift):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            events.append("send")

        def wait(self):
            events.append("wait")
            return super().wait()

    axis = build_axes(CPU, Layout(cp=torch.distributed.get_world_size())).cp
    kernel = Kernel(
        lambda *arguments: events.append("attend") or FLASH_CPU.attend(*arguments),
        lambda *arguments: events.append("gradients") or FLASH_CPU.backward(*arguments),
    )
    leaves = [x[:, :, :6].clone().requires_grad_() for x in random_qkv(1, 2, 2, 18)]
    with pytest.MonkeyPatch.context() as patch:
        for module in (collectives, context_parallel):
            patch.setattr(module, "Shift", LoggedShift)
        RingAttention(axis, kernel)(*leaves[:3]).backward(leaves[3])
    return events


def test_the_next_block_travels_while_this_one_is_computed(pool):
    forward = ["send", "attend", "wait"] * 2 + ["attend"]
    backward = ["send", "gradients", "wait"]  # its own block, whose gradients stay
    backward += ["send", "gradients", "send", "wait"]  # the first of the travelling gradients
    backward += ["gradients", "wait", "send", "wait"]  # they arrive only after the last block
    for events in pool.run(3, order_of_events):
        assert events == forward + backward


def peak_bytes_of_a_step(cp: int, cp_engine: str) -> int:
    """Allocated at the worst moment of a train step, above what there was before it."""
    sizes = {"cp": cp, "layers": 8, "seq_length": 64 * cp}
    config = make_config(**sizes, cp_engine=cp_engine, optimizer="adamw")
    training = make_training(config, MODEL.override(max_position_embeddings=1024))
    training.step(0)  # makes the optimizer's state
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profiler:
        training.step(1)
    events = profiler.profiler.kineto_results.events()
    memory = [event for event in events if event.name() == "[memory]"]
    memory.sort(key=lambda event: event.start_ns())
    return max(itertools.accumulate(event.nbytes() for event in memory))


# The ring has two blocks on their way, if not at the worst moment; Ulysses keeps the output twice.
@pytest.mark.turns(1, 3)
@pytest.mark.parametrize("engine,more", [("ring", 1.05), ("ulysses", 1.3)])
def test_memory_does_not_grow_with_the_ranks_at_fixed_tokens_a_rank(pool, engine, more):
    one, four = (max(pool.run(cp, peak_bytes_of_a_step, cp, engine)) for cp in (1, 4))
    assert one <= four < 1.1 * more * one
