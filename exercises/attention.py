"""Attention the slow way, as a reference for exercises 20 and 21: each query head by itself."""

import torch
from torch import Tensor


def full_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of q [B, Q, S, D] to k and v [B, K, S, D] -> [B, Q, S, D]"""
    each, heads = q.shape[1] // k.shape[1], []
    for h in range(q.shape[1]):
        scores = q[:, h] @ k[:, h // each].mT / q.shape[-1] ** 0.5
        heads.append(_causal_softmax(scores) @ v[:, h // each])
    return torch.stack(heads, 1)


def _causal_softmax(scores: Tensor) -> Tensor:
    sees = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    return scores.masked_fill(~sees, -torch.inf).softmax(-1)


def merge_of_rounded(q: Tensor, k: Tensor, v: Tensor, blocks: list[list[int]]) -> Tensor:
    """What means of blocks of keys, each rounded to bfloat16, merge to without rounding."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    weights, total = _causal_softmax(q @ k.mT / q.shape[-1] ** 0.5), torch.zeros_like(q)
    for positions in blocks:
        inside = torch.zeros(q.shape[2], dtype=torch.bool)
        inside[positions] = True
        share = (weights * inside).sum(-1, keepdim=True)
        mean = (weights * inside) @ v / share.clamp(min=1e-300)
        total += share * mean.to(torch.bfloat16).double()
    return total
