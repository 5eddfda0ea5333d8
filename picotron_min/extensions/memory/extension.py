"""Saved memory: what backward needs is computed again, or waits in the host's memory."""

import torch

from picotron_min.extension import Extension
from picotron_min.extensions.memory.offload import apply_offload
from picotron_min.extensions.memory.recompute import Context, apply_compile, apply_recompute
from picotron_min.extensions.settings import Workload
from picotron_min.model import Llama


class SavedMemory(Extension):
    def __init__(self, workload: Workload, device: torch.device, paused: Context | None) -> None:
        self.workload, self.device, self.paused = workload, device, paused

    def wrap(self, model: Llama) -> None:
        compiles = self.workload.compile
        apply_recompute(model, self.workload.recompute, compiles, self.paused)
        if compiles:
            apply_compile(model)
        apply_offload(model, self.workload.offload, self.device.type)
