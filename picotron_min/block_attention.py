"""Attention to a part of the keys, in pieces that can be put together exactly.

A row of attention is a weighted mean of values: out = sum_j exp(s_j) v_j / sum_j exp(s_j), with
scores s_j = q k_j / sqrt(D). Cut the keys in two, and each half gives a mean of its own; all that
is missing to weigh the halves is how large their sums were. So a block returns two things:

    out [B, Q, S, D]    its mean
    lse [B, Q, S]       log sum_j exp(s_j), "log-sum-exp": its weight

and two blocks merge as the mean of their means: with total = log(exp(lse_1) + exp(lse_2)),

    out = exp(lse_1 - total) out_1 + exp(lse_2 - total) out_2

Backward needs no such chain. Given the lse of the *whole* row, the probabilities of any block are
p = exp(s - lse), so each block computes its share of the gradients alone, and shares add up:

    dv = p^T dout    dp = dout v^T    ds = p (dp - sum(dout out))    dq = ds k / sqrt(D)
                                                                     dk = ds^T q / sqrt(D)

Flash attention does this within a GPU, block by block; ring attention does it across ranks.

Shapes: q [B, Q, S, D]; k and v [B, K, S', D], before head repetition: Q/K query heads share one.
Source: Milakov and Gimelshein 2018, "Online normalizer calculation for softmax"; Dao et al. 2022,
"FlashAttention", section 3.1 and appendix B.4.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

aten = torch.ops.aten


class Kernel(NamedTuple):
    """A way to compute a block."""

    # q, k, v, is_causal -> out in the dtype of q or a wider one, lse in float32 or float64
    attend: Callable[[Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor]]
    # gradient of out, q, k, v, out and lse of the whole row, is_causal -> gradients of q, k, v
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]


def merge_blocks(
    out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor
) -> tuple[Tensor, Tensor]:
    """Two blocks of the same queries and different keys -> out and lse of both together.

    out should be float32 or better: it is merged again and again.
    """
    total = torch.logaddexp(lse, other_lse)
    weight, other_weight = (lse - total).exp(), (other_lse - total).exp()
    return weight[..., None] * out + other_weight[..., None] * other_out, total


def attend_block(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
    """The block written out: to read, to test the others with, and where no kernel fits.

    Stores the scores, [B, Q, S, S']. is_causal: row i sees columns 0..i only.
    """
    scores = _scores(q, k, is_causal)
    lse = scores.logsumexp(-1)
    p = (scores - lse[..., None]).exp().to(v.dtype)
    return (p @ v[:, :, None]).flatten(1, 2), lse.flatten(1, 2)


def attend_block_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, is_causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    heads = k.shape[1]
    p = (_scores(q, k, is_causal) - lse.unflatten(1, (heads, -1))[..., None]).exp()
    q, gradient, out = (x.unflatten(1, (heads, -1)) for x in (q, gradient, out))
    dv = (p.to(v.dtype).mT @ gradient).sum(2)
    dp = gradient @ v[:, :, None].mT
    ds = p * (dp - (gradient * out).sum(-1, keepdim=True)) / math.sqrt(q.shape[-1])
    ds = ds.to(q.dtype)
    return (ds @ k[:, :, None]).flatten(1, 2), (ds.mT @ q).sum(2), dv


def _scores(q: Tensor, k: Tensor, is_causal: bool) -> Tensor:
    """-> [B, K, Q/K, S, S'], float32 or better"""
    q = q.unflatten(1, (k.shape[1], -1))
    scores = wide(q @ k[:, :, None].mT) / math.sqrt(q.shape[-1])
    if is_causal:
        scores = scores.masked_fill(torch.ones_like(scores[0, 0, 0]).triu(1).bool(), -math.inf)
    return scores


def wide(x: Tensor) -> Tensor:
    """x in what sums over blocks are kept in: float32, or float64 if it was."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


# On a CPU blocks are computed in float32 at least, which costs a third more time in bfloat16 and
# saves a rounding: if each block is rounded before it is merged, the result errs by a tenth more
# than attention in one piece. On a GPU that is how it is, its kernel knows nothing but 16 bits.


def _flash_cpu(q, k, v, is_causal):
    q, k, v = wide(q), wide(k), wide(v)
    return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, is_causal)


def _flash_cpu_backward(gradient, q, k, v, out, lse, is_causal):
    tensors = (wide(x) for x in (gradient, q, k, v, out))
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(*tensors, lse, 0.0, is_causal)


def _flash_cuda(q, k, v, is_causal):
    return aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal)[:2]


def _flash_cuda_backward(gradient, q, k, v, out, lse, is_causal):
    seed = offset = torch.empty(0, dtype=torch.int64, device=q.device)  # of dropout: none
    return aten._scaled_dot_product_flash_attention_backward(
        gradient,
        q,
        k,
        v,
        out,
        lse.contiguous(),  # the kernel does not look at its strides
        None,  # where sequences of different lengths begin: there are none
        None,
        q.shape[2],
        k.shape[2],
        0.0,
        is_causal,
        seed,
        offset,
    )


SOFTMAX = Kernel(attend_block, attend_block_backward)
FLASH_CPU = Kernel(_flash_cpu, _flash_cpu_backward)
FLASH_CUDA = Kernel(_flash_cuda, _flash_cuda_backward)


def choose_kernel(device: torch.device, dtype: torch.dtype, head_dim: int) -> Kernel:
    """The fastest kernel that can do it; `dtype` is that of q, k and v.

    On a GPU flash attention wants 16 bits and a head_dim that is a multiple of 8 up to 256.
    """
    if device.type == "cpu":
        return FLASH_CPU
    fits = dtype.itemsize == 2 and head_dim % 8 == 0 and head_dim <= 256
    return FLASH_CUDA if fits else SOFTMAX
