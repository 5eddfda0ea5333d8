"""Splits, kernels, and the order in the ring; that ranks train as one is in test_layouts.py."""

import itertools
from functools import partial
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from picotron_min import collectives
from picotron_min.attention import SOFTMAX, Kernel, SoftmaxAttention, attend_block, merge_blocks
from picotron_min.context_parallel import POSITIONS, RingAttention
from picotron_min.extensions.kernels.attention import (
    FLASH_CPU,
    FLASH_CUDA,
    CpuAttention,
    RepeatedAttention,
    choose_attention,
)
from picotron_min.extensions.settings import Layout
from picotron_min.mesh import build_axes

KERNELS = {"flash": FLASH_CPU, "softmax": SOFTMAX, "flash on GPUs": FLASH_CUDA}
CPU, HALF = torch.device("cpu"), torch.bfloat16


@pytest.mark.quick
@pytest.mark.parametrize("engine", POSITIONS)
def test_the_parts_of_a_sequence_make_it_whole_again(engine):
    for size, length in ((1, 7), (2, 48), (3, 48), (8, 48)):
        positions = [POSITIONS[engine](rank, size, length).tolist() for rank in range(size)]
        assert {len(part) for part in positions} == {length // size}
        assert sorted(itertools.chain(*positions)) == list(range(length))
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


def with_gradients(attend, q: Tensor, k: Tensor, v: Tensor, gradient: Tensor) -> list[Tensor]:
    """out, dq, dk, dv"""
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    out = attend(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, gradient)]


def assert_near_torchs(found: list[Tensor], inputs: list[Tensor], error: float, is_causal=True):
    attend = partial(F.scaled_dot_product_attention, is_causal=is_causal, enable_gqa=True)
    exact = with_gradients(attend, *(x.double() for x in inputs))
    for ours, expected in zip(found, exact, strict=True):
        assert (ours - expected).norm() < error * expected.norm()


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
    assert_near_torchs(found, inputs, 0.004)


@pytest.mark.parametrize("attention", [CpuAttention, SoftmaxAttention])
@pytest.mark.parametrize("length", [24, 272, 1024])  # backward in 1, 2 and 8 triangles
def test_attention_equals_torchs(attention, length):
    inputs = random_qkv(1, 6, 2, length)
    assert_near_torchs(with_gradients(attention(), *inputs), inputs, 1e-12)


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize(
    "kernel,dtype,device,error",
    [
        ("flash", torch.float64, "cpu", 1e-12),
        ("softmax", torch.float64, "cpu", 1e-12),
        pytest.param("flash on GPUs", HALF, "cuda", 0.01, marks=pytest.mark.gpu),
    ],
)
def test_a_kernel_of_the_ring_equals_torchs(kernel, dtype, device, error, is_causal):
    inputs = [x.to(device) for x in random_qkv(2, 6, 2, 264, dtype)]
    q, k, v, gradient = inputs
    out, lse = KERNELS[kernel].attend(q, k, v, is_causal)
    gradients = KERNELS[kernel].backward(gradient, q, k, v, out, lse, is_causal)
    assert_near_torchs([out, *gradients], inputs, error, is_causal)


def order_of_events() -> list[str]:
    """The messages and the computations of a rank in forward and backward, in order."""
    events, shift = [], collectives.Shift

    def logged(name: str, function):
        return lambda *arguments: (events.append(name), function(*arguments))[1]

    kernel = Kernel(logged("attend", FLASH_CPU.attend), logged("gradients", FLASH_CPU.backward))
    inputs = [x[:, :, :6] for x in random_qkv(1, 2, 2, 18)]
    messages = {"__init__": logged("send", shift.__init__), "wait": logged("wait", shift.wait)}
    with mock.patch.multiple(shift, **messages):
        with_gradients(RingAttention(build_axes(CPU, Layout(cp=3)).cp, kernel), *inputs)
    return events


def test_the_next_block_travels_while_this_one_is_computed(pool):
    forward = ["send", "attend", "wait"] * 2 + ["attend"]
    backward = ["send", "gradients", "wait"]  # its own block, whose gradients stay
    backward += ["send", "gradients", "send", "wait"]  # the first of the travelling gradients
    backward += ["gradients", "wait", "send", "wait"]  # they arrive only after the last block
    for events in pool.run(3, order_of_events):
        assert events == forward + backward
