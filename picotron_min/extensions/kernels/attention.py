"""Attention kernels: torch's fused ones, for whole sequences and for the blocks of a ring.

They equal the written-out forms of attention.py, and store no [S, S] matrix.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from picotron_min.attention import SOFTMAX, Kernel, SoftmaxAttention
from picotron_min.loss import wide
from picotron_min.model import FlashAttention

aten = torch.ops.aten

LEAST_ROWS = 128  # of a triangle: with smaller ones calls take longer


def _flash_cpu(q, k, v, is_causal):
    # float32 takes a third longer than bfloat16 and avoids rounding each block before merging,
    # which would make the error a tenth larger than in attention in one piece.
    q, k, v = wide(q), wide(k), wide(v)
    return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, is_causal)


def _flash_cpu_backward(gradient, q, k, v, out, lse, is_causal):
    return _backward_in_parts([*(wide(x) for x in (gradient, q, k, v, out)), lse], is_causal)


def _backward_in_parts(tensors, is_causal):
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
    # The kernel also computes most of what the mask hides. So the triangle is cut into n small ones
    # and the squares between: with n 4 first every d at once, then both b, then a.
    #
    #     d            The kernel takes lse and out of a whole row for any part of its keys, so that
    #     b d          the gradients of the parts add up.
    #     a a d
    #     a a b d
    n, (B, _, S, _) = 1, tensors[1].shape
    while S % (2 * n) == 0 and S // (2 * n) >= LEAST_ROWS:
        n *= 2
    if not is_causal or n == 1:
        return backward(*tensors, 0.0, is_causal)
    parts = backward(*(_pieces(x, n) for x in tensors), 0.0, True)
    whole = [part.transpose(1, 2).reshape(B, S, -1, part.shape[-1]) for part in parts]
    while n > 1:
        gradient, q, k, v, out, lse = (_pieces(x, n) for x in tensors)
        rows = [x[1::2] for x in (gradient, q, out, lse)]  # the lower half of each triangle
        keys = k[::2], v[::2]  # left of these rows
        parts = backward(*rows[:2], *keys, *rows[2:], 0.0, False)
        for total, part, half in zip(whole, parts, (1, 0, 0), strict=True):
            total.view(B * n, S // n, *total.shape[2:])[half::2] += part.transpose(1, 2)
        n //= 2
    return tuple(x.transpose(1, 2) for x in whole)


def _pieces(x, n):  # [B, heads, S, ...] -> [B n, heads, S/n, ...]
    return x.transpose(1, 2).unflatten(1, (n, -1)).flatten(0, 1).transpose(1, 2)


def _flash_cuda(q, k, v, is_causal):  # in 16 bits; out is rounded before blocks are merged
    return aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal)[:2]


def _flash_cuda_backward(gradient, q, k, v, out, lse, is_causal):
    tensors = (gradient, q, k, v, out, lse.contiguous())  # the kernel ignores the strides of lse
    lengths = (None, None, q.shape[2], k.shape[2])  # None: all sequences are equally long
    seed = offset = torch.empty(0, dtype=torch.int64, device=q.device)  # there is no dropout
    options = (*lengths, 0.0, is_causal, seed, offset)
    return aten._scaled_dot_product_flash_attention_backward(*tensors, *options)


FLASH_CPU = Kernel(_flash_cpu, _flash_cpu_backward)
FLASH_CUDA = Kernel(_flash_cuda, _flash_cuda_backward)


class CpuAttention(nn.Module):
    """torch's kernel; but for the backward of a whole sequence, which takes less time here."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _CpuAttention.apply(q, k, v)


class _CpuAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v):
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx, gradient):
        return _backward_in_parts([gradient, *ctx.saved_tensors], True)


class RepeatedAttention(nn.Module):
    """Where no flash kernel fits: torch's efficient kernel, which needs equal head counts."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
        with torch.autocast(q.device.type, enabled=False):  # it would cast to bfloat16 again
            out = F.scaled_dot_product_attention(*(t.float() for t in (q, k, v)), is_causal=True)
        return out.to(q.dtype)  # backward keeps K and V, 8 B Q S D bytes, and no [S, S] matrix


def choose_attention(
    device_type: str, capability: tuple[int, int], dtype: torch.dtype, head_dim: int
) -> tuple[type[nn.Module], Kernel]:
    """The fastest that works for q of `dtype`: attention to a whole sequence, and a ring's kernel.

    See README.md for what each stores.
    """
    if device_type == "cpu":
        # bfloat16 has a kernel of its own, where wide tensors would take longer.
        return FlashAttention if dtype.itemsize == 2 else CpuAttention, FLASH_CPU
    if dtype.itemsize == 2 and capability >= (8, 0) and head_dim <= 256:  # Ampere and later
        # torch pads other head dimensions of whole sequences, but not for the operator above
        return FlashAttention, FLASH_CUDA if head_dim % 8 == 0 else SOFTMAX
    if dtype.itemsize <= 4 and (head_dim % 4 == 0 or capability < (8, 0)):
        return RepeatedAttention, SOFTMAX
    return SoftmaxAttention, SOFTMAX
