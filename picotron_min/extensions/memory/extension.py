"""Saved memory: what backward needs is computed again, or waits in the host's memory.

    saved for backward     none         all inputs of products
                           selective    all but those inside attention
                           full         the input of each layer, [B, S, E]

Selective is coarser than Korthikanti et al. 2022, section 5, who keep q, k and v: fused attention
has little to recompute but them. torch.compile fuses what lies between products, and saves less.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from picotron_min.extension import Extension
from picotron_min.extensions.memory.offload import apply_offload
from picotron_min.extensions.settings import Workload
from picotron_min.model import Head, Llama

Context = Callable[[], AbstractContextManager]


@dataclass(eq=False)
class SavedMemory(Extension):
    workload: Workload
    device: torch.device
    paused: Context | None

    def wrap(self, model: Llama) -> None:
        compiles = self.workload.compile
        apply_recompute(model, self.workload.recompute, compiles, self.paused)
        if compiles:
            apply_compile(model)
        apply_offload(model, self.workload.offload, self.device.type)


def apply_recompute(
    model: Llama, recompute: str, compiles: bool = False, context: Context | None = None
) -> None:
    """Run parts of the forward again in backward, within `context()`, instead of saving them."""
    layers = list(model.model.layers.values())
    parts = {"none": [], "selective": [layer.self_attn for layer in layers], "full": layers}
    for module in parts[recompute]:
        # torch.compile runs a recomputed part as it is unless it is a single graph, and messages
        # break graphs. So the part is compiled by itself; in one process that changes nothing.
        forward = torch.compile(module.forward, dynamic=False) if compiles else module.forward
        module.forward = _recomputed(forward, context)


def _recomputed(forward: Callable[..., Tensor], context: Context | None) -> Callable[..., Tensor]:
    options = {"use_reentrant": False, "preserve_rng_state": False}  # nothing in it is random
    if context:
        options["context_fn"] = lambda: (nullcontext(), context())  # for the first run, the repeat
    return lambda *args: checkpoint(forward, *args, **options)  # torch.compile breaks at a partial


def apply_compile(model: Llama) -> None:
    """Fuse what lies between the matmuls of each layer, and the loss, with torch.compile."""
    for layer in model.model.layers.values():  # all share the graph of one
        # Shapes never change in a run: kernels are made for them.
        layer.forward = torch.compile(layer.forward, dynamic=False)
    if isinstance(model.lm_head, Head):
        model.lm_head.stripe_loss = torch.compile(model.lm_head.stripe_loss, dynamic=False)
