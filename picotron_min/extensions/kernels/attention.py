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


def _flash_cpu(q, k, v, is_causal):
    # float32 takes a third longer than bfloat16 and avoids rounding each block before merging,
    # which would make the error a tenth larger than in attention in one piece.
    q, k, v = wide(q), wide(k), wide(v)
    return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, is_causal)


def _flash_cpu_backward(gradient, q, k, v, out, lse, is_causal):
    tensors = (*(wide(x) for x in (gradient, q, k, v, out)), lse)
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(*tensors, 0.0, is_causal)


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
        return FlashAttention, FLASH_CPU
    if dtype.itemsize == 2 and capability >= (8, 0) and head_dim <= 256:  # Ampere and later
        # torch pads other head dimensions of whole sequences, but not for the operator above
        return FlashAttention, FLASH_CUDA if head_dim % 8 == 0 else SOFTMAX
    if dtype.itemsize <= 4 and (head_dim % 4 == 0 or capability < (8, 0)):
        return RepeatedAttention, SOFTMAX
    return SoftmaxAttention, SOFTMAX
