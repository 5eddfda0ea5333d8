"""Precision: linears compute in fewer bits than their weights have, in bfloat16 copies or FP8."""

import torch

from picotron_min.extension import Extension
from picotron_min.extensions.overlap.linear import Linear, apply_copies, linears, take_apart
from picotron_min.extensions.precision.float8_linear import apply_float8
from picotron_min.extensions.precision.rotary import Rotate
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
