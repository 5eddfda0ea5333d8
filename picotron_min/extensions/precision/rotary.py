"""Rotary: SelfAttention.rotate of bfloat16 tensors, to the same bits, in fewer passes over memory.

Angles are float32, and so are the products. Autograd widens, multiplies, rounds and swaps in a pass
each; here `out` takes a result rounded, as it is written. Compiled layers do so by themselves.
"""

import torch


class Rotate(torch.autograd.Function):
    """x [B, S, heads, D], cos and sin [..., S, D] -> x, turned."""

    @staticmethod
    def forward(ctx, x, *angles):
        cos, sin = (table[..., None, :] for table in angles)
        ctx.save_for_backward(cos, sin)
        return torch.add(x * cos, swap(x) * sin, out=torch.empty_like(x))

    @staticmethod
    def backward(ctx, dy):
        dx, swapped = (torch.mul(dy, t, out=torch.empty_like(dy)) for t in ctx.saved_tensors)
        return dx.add_(swap(swapped)), None, None


def swap(x):
    return x.roll(x.shape[-1] // 2, dims=-1)
