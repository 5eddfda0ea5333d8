"""Attention: keys that are not all there at once are attended to in blocks, which merge exactly.

A row of attention is a weighted mean of values, out = sum_j exp(s_j) v_j / sum_j exp(s_j), with
scores s_j = q k_j / sqrt(D). Each block of keys gives its own mean, and the weight of that mean:

    keys   [ 0 1 2 3 | 4 5 6 7 ]     out [B, Q, S, D]   the mean of the block's values
             block 1   block 2       lse [B, Q, S]      log sum_j exp(s_j), "log-sum-exp"

Backward merges nothing. Given the lse of the *whole* row, p = exp(s - lse) in any block, so each
block computes its share of the gradients alone, and the shares are added.

Flash attention does this within a GPU, ring attention across ranks. Source: Milakov and Gimelshein
2018, "Online normalizer calculation for softmax"; Dao et al. 2022, "FlashAttention", section 3.1.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from picotron_min.loss import wide


class Kernel(NamedTuple):
    """A way to compute a block: q [B, Q, S, D], k and v [B, K, S', D], with K heads for Q."""

    # q, k, v, is_causal -> out in the dtype of q or a wide one, lse in a wide one
    attend: Callable[[Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor]]
    # gradient of out, q, k, v, out and lse of the whole row, is_causal -> gradients of q, k, v
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]


def merge_blocks(out_1, lse_1, out_2, lse_2) -> tuple[Tensor, Tensor]:
    """Two blocks of the same queries and different keys -> out and lse of both together."""
    lse = torch.logaddexp(lse_1, lse_2)  # log(exp(lse_1) + exp(lse_2)), but does not overflow
    return (lse_1 - lse).exp()[..., None] * out_1 + (lse_2 - lse).exp()[..., None] * out_2, lse


def attend_block(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
    """A block step by step; row i sees columns 0..i if causal. The other kernels equal it."""
    scores = attention_scores(q, k, is_causal)
    lse = scores.logsumexp(-1)  # [B, K, Q/K, S]
    p = (scores - lse[..., None]).exp().to(v.dtype)
    return (p @ v[:, :, None]).flatten(1, 2), lse.flatten(1, 2)


def attention_scores(q: Tensor, k: Tensor, is_causal: bool) -> Tensor:
    """q k^T / sqrt(D), [B, K, Q/K, S, S']: a key head and the query heads that share it."""
    q = q.unflatten(1, (k.shape[1], -1))
    scores = wide(q @ k[:, :, None].mT) / math.sqrt(q.shape[-1])
    future = torch.ones_like(scores[0, 0, 0], dtype=torch.bool).triu(1)
    return scores.masked_fill(future, -math.inf) if is_causal else scores


def attend_block_backward(gradient, q, k, v, out, lse, is_causal) -> tuple[Tensor, Tensor, Tensor]:
    # dv = p^T dout    dp = dout v^T    ds_j = p_j (dp_j - sum_k p_k dp_k), softmax's backward. That
    # sum, over a whole row, is dout . out: so out is the whole row's. Through s = q k / sqrt(D):
    # dq = ds k / sqrt(D)               dk = ds^T q / sqrt(D)
    scores = attention_scores(q, k, is_causal)
    q, gradient, out, lse = (x.unflatten(1, (k.shape[1], -1)) for x in (q, gradient, out, lse))
    p = (scores - lse[..., None]).exp()
    dv = (p.to(v.dtype).mT @ gradient).sum(2)  # over the query heads that share v
    dp = gradient @ v[:, :, None].mT
    ds = p * (dp - (gradient * out).sum(-1, keepdim=True))
    ds = (ds / math.sqrt(q.shape[-1])).to(q.dtype)
    return (ds @ k[:, :, None]).flatten(1, 2), (ds.mT @ q).sum(2), dv


SOFTMAX = Kernel(attend_block, attend_block_backward)


class SoftmaxAttention(nn.Module):
    """Attention written out: for `use_flash_attention: false`, and to test the others with."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        p = attention_scores(q, k, is_causal=True).softmax(-1).to(v.dtype)
        return (p @ v[:, :, None]).flatten(1, 2)
