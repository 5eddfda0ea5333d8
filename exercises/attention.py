"""Attention the slow way, as a reference for exercises 19 and 20: each query head by itself."""

from collections.abc import Sequence

import torch
from torch import Tensor


def full_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of q [B, Q, S, D] to k and v [B, K, S, D] -> [B, Q, S, D]"""
    # Query heads that use the same key head lie side by side.
    each, heads = q.shape[1] // k.shape[1], []
    for h in range(q.shape[1]):
        scores = q[:, h] @ k[:, h // each].mT / q.shape[-1] ** 0.5
        future = torch.ones_like(scores[0], dtype=torch.bool).triu(1)
        p = scores.masked_fill(future, -torch.inf).softmax(-1)
        heads.append(p @ v[:, h // each])
    return torch.stack(heads, 1)


def with_gradients(out: Tensor, qkv: Sequence[Tensor], d_out: Tensor) -> dict[str, Tensor]:
    # Where a wrong result does not depend on an input, its gradient is None: no error.
    gradients = torch.autograd.grad(out, qkv, d_out, allow_unused=True)
    return {"out": out.detach()} | dict(zip(("dq", "dk", "dv"), gradients, strict=True))
