"""Precision: linears compute in fewer bits than their weights have, in bfloat16 copies or FP8.

In bfloat16 queries and keys are also rotated in fewer passes over memory.
"""

import torch

from picotron_min.extension import Extension
from picotron_min.extensions.overlap.linear import Linear, apply_copies, linears, take_apart
from picotron_min.extensions.precision.float8_linear import apply_float8
from picotron_min.extensions.settings import Workload
from picotron_min.model import Llama
from picotron_min.placement import Table


class Precision(Extension):
    def __init__(self, workload: Workload, device: torch.device) -> None:
        self.workload, self.device = workload, device
        self.dtype = getattr(torch, workload.dtype)
        self.linears: list[Linear] = []  # those whose weight is not sharded

    def connect(self, model: Llama, table: Table) -> None:
        take_apart(model)  # while the weights are in the modules
        if self.workload.fp8:
            apply_float8(model, self.workload, self.device.type)

    def wrap(self, model: Llama) -> None:
        if self.dtype == torch.bfloat16:  # sharded weights are gathered in it
            apply_copies(model, self.dtype)  # to compute with; the optimizer updates float32
            for layer in model.model.layers.values() if not self.workload.compile else ():
                layer.self_attn.rotate = Rotate.apply
        self.linears += [m for m in linears(model).values() if m.weight is not None]

    @torch.no_grad()
    def weights_changed(self) -> None:
        copies = [(x.copy, x.weight) for x in self.linears if x.copy is not None]
        if copies:  # a GPU gets many at a time
            torch._foreach_copy_(*zip(*copies, strict=True))
        for linear in self.linears:
            if linear.copy is None:
                linear.refresh()  # bytes of the weight


class Rotate(torch.autograd.Function):
    """x [B, S, heads, D], cos and sin [..., S, D] -> x, turned, as SelfAttention.rotate does it.

    To the same bits, in fewer passes over memory. Angles are float32, and so are the products.
    Autograd widens, multiplies, rounds and swaps in a pass each; here `out` takes a result rounded,
    as it is written. Compiled layers do so by themselves.
    """

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
