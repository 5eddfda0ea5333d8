"""The splits, the blocks, the ring and Ulysses; whole training runs are in test_layouts.py."""

import itertools
from functools import partial
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from picotron_min import collectives
from picotron_min.attention import SOFTMAX, Kernel, SoftmaxAttention, attend_block, merge_blocks
from picotron_min.collectives import Axis
from picotron_min.context_parallel import POSITIONS, RingAttention, UlyssesAttention
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

KERNELS = {"flash": FLASH_CPU, "softmax": SOFTMAX, "flash on GPUs": FLASH_CUDA}
CPU, HALF = torch.device("cpu"), torch.bfloat16


def whole_sequence(parts: list[Tensor], positions: list[Tensor], dim: int) -> Tensor:
    """The inverse of the split: the ranks' parts of a sequence, in order."""
    return torch.cat(parts, dim).index_select(dim, torch.cat(positions).argsort())


@pytest.mark.quick
@pytest.mark.parametrize("engine", POSITIONS)
def test_the_parts_of_a_sequence_make_it_whole_again(engine):
    for size, length in ((1, 7), (2, 48), (3, 48), (8, 48)):
        sequence = torch.randn(2, length, 3)
        positions = [POSITIONS[engine](rank, size, length) for rank in range(size)]
        parts = [sequence[:, p] for p in positions]
        assert all(part.shape == (2, length // size, 3) for part in parts)
        assert torch.equal(whole_sequence(parts, positions, dim=1), sequence)
    with pytest.raises(AssertionError, match="positions in"):
        POSITIONS["ring"](0, 2, 10)


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


def cp_axis() -> Axis:
    return build_axes(CPU, Layout(cp=torch.distributed.get_world_size())).cp


def attend_in_parts(
    engine: str, kernel: str, shape: tuple, dtype=torch.float64, device="cpu"
) -> tuple:
    """This rank's part of out, dq, dk, dv; and its positions."""
    axis = cp_axis()
    positions = POSITIONS[engine](axis.rank, axis.size, shape[-1])
    inputs = [x[:, :, positions].to(device) for x in random_qkv(*shape, dtype)]
    if engine == "ring":
        attention = RingAttention(axis, KERNELS[kernel])
    else:
        inner = FlashAttention() if kernel == "flash" else SoftmaxAttention()
        attention = UlyssesAttention(axis, inner)
    return *(x.cpu() for x in with_gradients(attention, *inputs)), positions


def assemble(parts: list[tuple]) -> list[Tensor]:
    *tensors, positions = zip(*parts, strict=True)
    return [whole_sequence(list(x), list(positions), dim=2) for x in tensors]


def with_gradients(attend, q: Tensor, k: Tensor, v: Tensor, gradient: Tensor) -> list[Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    out = attend(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, gradient)]


def full_attention(shape: tuple, dtype=torch.float64, rounded_to=torch.float64) -> list[Tensor]:
    """out, dq, dk, dv on one rank by torch's own, from inputs of some precision."""
    attend = partial(F.scaled_dot_product_attention, is_causal=True, enable_gqa=True)
    return with_gradients(attend, *(x.to(dtype) for x in random_qkv(*shape, rounded_to)))


CHOSEN = """
cpu 0 bfloat16 64 -> FlashAttention, flash
cpu 0 float64 7 -> CpuAttention, flash
cuda 8 bfloat16 64 -> FlashAttention, flash on GPUs
cuda 9 bfloat16 256 -> FlashAttention, flash on GPUs
cuda 9 bfloat16 100 -> FlashAttention, softmax
cuda 9 bfloat16 264 -> RepeatedAttention, softmax
cuda 9 float32 64 -> RepeatedAttention, softmax
cuda 9 float32 6 -> SoftmaxAttention, softmax
cuda 9 float64 64 -> SoftmaxAttention, softmax
cuda 7 bfloat16 64 -> RepeatedAttention, softmax
cuda 7 float32 6 -> RepeatedAttention, softmax
"""


def test_attention_is_chosen_that_works_on_the_device():
    """Only F.sdpa pads heads of 100 to 104; in float32 a multiple of 16 bytes is 4 numbers."""
    for line in CHOSEN.strip().splitlines():
        of, _, expected = line.partition(" -> ")
        device, capability, dtype, head_dim = of.split()
        found, kernel = choose_attention(
            device, (int(capability), 0), getattr(torch, dtype), int(head_dim)
        )
        names = [name for name, of in KERNELS.items() if of is kernel]
        assert f"{found.__name__}, {names[0]}" == expected, line


def test_repeated_attention_is_in_float32_and_needs_no_grouped_queries():
    """torch's efficient kernel takes neither bfloat16 on older cards nor grouped queries."""
    inputs = random_qkv(2, 6, 2, 24, HALF)
    spy = mock.patch.object(F, "scaled_dot_product_attention", wraps=F.scaled_dot_product_attention)
    with spy as calls, torch.autocast("cpu", HALF):
        found = with_gradients(RepeatedAttention(), *inputs)
    (call,) = calls.call_args_list
    assert {(x.dtype, x.shape) for x in call.args} == {(torch.float32, inputs[0].shape)}
    assert call.kwargs == {"is_causal": True} and found[0].dtype == HALF
    for ours, exact in zip(found, full_attention((2, 6, 2, 24), rounded_to=HALF), strict=True):
        assert (ours - exact).norm() < 0.004 * exact.norm()


# Ranks, then batch, query heads, key-value heads and length: one is longer than a kernel's tile.
SHAPES = [(1, (2, 4, 2, 16)), (4, (3, 8, 2, 16)), (3, (2, 9, 3, 12)), (4, (1, 4, 1, 264))]


@pytest.mark.parametrize("engine,kernel", list(itertools.product(POSITIONS, ("flash", "softmax"))))
def test_both_engines_equal_full_attention(pool, engine, kernel):
    for ranks, shape in SHAPES:
        parts = assemble(pool.run(ranks, attend_in_parts, engine, kernel, shape))
        for ours, expected in zip(parts, full_attention(shape), strict=True):
            torch.testing.assert_close(ours, expected, rtol=0, atol=1e-11)


@pytest.mark.parametrize("length", [272, 1024])  # 2 and 8 triangles
def test_a_backward_in_parts_equals_torchs(length):
    inputs = random_qkv(2, 6, 2, length)
    found = (with_gradients(attend, *inputs) for attend in (CpuAttention(), FlashAttention()))
    for ours, expected in zip(*found, strict=True):
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-12)


GPU = pytest.param("ring", "flash on GPUs", "cuda:0", 1.5, marks=pytest.mark.gpu)


@pytest.mark.parametrize(
    "engine,kernel,device,most", [(engine, "flash", "cpu", 1.01) for engine in POSITIONS] + [GPU]
)
def test_bfloat16_errs_no_more_than_torch_does_on_one_rank(pool, engine, kernel, device, most):
    shape = (2, 8, 2, 256)
    exact = full_attention(shape, rounded_to=HALF)
    theirs = full_attention(shape, dtype=HALF, rounded_to=HALF)
    ours = assemble(pool.run(2, attend_in_parts, engine, kernel, shape, HALF, device))
    for ours_of, torchs, exactly in zip(ours, theirs, exact, strict=True):
        error, torch_error = ((x - exactly).norm() / exactly.norm() for x in (ours_of, torchs))
        assert error <= most * torch_error < 0.01


def order_of_events() -> list[str]:
    """The messages and the computations of a rank in forward and backward, in order."""
    events, shift = [], collectives.Shift

    def logged(name: str, function):
        return lambda *arguments: (events.append(name), function(*arguments))[1]

    kernel = Kernel(logged("attend", FLASH_CPU.attend), logged("gradients", FLASH_CPU.backward))
    inputs = [x[:, :, :6] for x in random_qkv(1, 2, 2, 18)]
    messages = {"__init__": logged("send", shift.__init__), "wait": logged("wait", shift.wait)}
    with mock.patch.multiple(shift, **messages):
        with_gradients(RingAttention(cp_axis(), kernel), *inputs)
    return events


def test_the_next_block_travels_while_this_one_is_computed(pool):
    forward = ["send", "attend", "wait"] * 2 + ["attend"]
    backward = ["send", "gradients", "wait"]  # its own block, whose gradients stay
    backward += ["send", "gradients", "send", "wait"]  # the first of the travelling gradients
    backward += ["gradients", "wait", "send", "wait"]  # they arrive only after the last block
    for events in pool.run(3, order_of_events):
        assert events == forward + backward
