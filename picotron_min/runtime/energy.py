"""Energy: the joules of each step, as NVML counts them on NVIDIA's GPUs, and never estimated.

Every rank reads its own GPU: mJ since the driver was loaded. A Meter is an extension: its two
numbers join the sum over all ranks that every step has, so there is no message more. A run whose
counters cannot be read is refused at its start. After Megatron-LM's --log-energy. In production:
zeus (ml.energy), which also reads processors and AMD's GPUs.
"""

import importlib.util
import time
from collections.abc import Callable

import torch
from torch import Tensor

from picotron_min.extension import Extension

Read = Callable[[], int]  # mJ since any moment


class Meter(Extension):
    """Counts while a step runs, from `begin` to `measures`, so not in evaluations and saves.

    A step reads before its sum. What it uses later, by the update and, as the host of a GPU is
    ahead, perhaps by most of backward, is in the next step's number; the last step's is in none.
    """

    source = "of the GPUs alone, by NVML"

    def __init__(self, device: torch.device, read: Read | None, tokens: int) -> None:
        """`read` None: another rank of this GPU reads for this one; `tokens` of a step."""
        self.device, self.read, self.tokens = device, read, tokens
        self.last, self.rest = 0, 0.0

    def begin(self) -> None:
        self.take()  # of an evaluation, a save or nothing
        self.mine, self.began = None, time.perf_counter()

    def take(self) -> float:
        """Joules since the last call."""
        before, self.last = self.last, self.read() if self.read else 0
        return (self.last - before) / 1e3

    def counts(self) -> Tensor:
        """Joules, and 1 if this rank has read them, [2]. A step asks several times."""
        if self.mine is None:
            self.mine = torch.zeros(2, dtype=torch.float64, device=self.device)
            self.mine[:1].fill_(self.rest + self.take())  # a copy would make the host wait
            self.mine[1:].fill_(self.read is not None)
        return self.mine

    def measures(self, totals: Tensor) -> dict[str, object]:
        """Watts: the mean of a GPU."""
        self.rest, (joules, gpus) = self.take(), totals.tolist()
        watts = joules / (time.perf_counter() - self.began) / gpus
        return {"joules": joules, "joules_per_token": joules / self.tokens, "watts": watts}


def open_meter(device: torch.device, local_rank: int, tokens: int) -> Meter:
    """Of one rank, for steps of `tokens` tokens; ValueError if its counter cannot be read."""
    read = nvml_reader(device)
    return Meter(device, read if local_rank == device.index else None, tokens)


def nvml_reader(device: torch.device) -> Read:
    if device.type == "cpu":
        problem = "log_energy=true reads NVIDIA's GPUs by NVML, and this run is on a CPU"
        raise ValueError(f"{problem}: set it to false; zeus (ml.energy) reads processors")
    if importlib.util.find_spec("pynvml") is None:
        remedy = 'run  pip install -e ".[energy]"  or set it to false'
        raise ValueError(f"log_energy=true needs nvidia-ml-py: {remedy}")
    import pynvml

    # Not by index: NVML counts all GPUs of a node, torch only CUDA_VISIBLE_DEVICES.
    uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    except pynvml.NVMLError as error:  # AMD's, older than Volta, or a part of one (MIG)
        problem = f"log_energy=true: NVML has no energy of {uuid} ({error})"
        raise ValueError(f"{problem}: set it to false") from None
    return lambda: pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
