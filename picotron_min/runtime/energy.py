"""Energy: the joules of each step, read from counters of the hardware, and never estimated.

    GPUs   NVML: mJ since the driver was loaded   every rank reads its own GPU
    CPUs   RAPL: uJ of each processor package     the first rank of a node, for the whole machine

A Meter is an extension: its two numbers join the sum over all ranks that every step has, so there
is no message more. A run whose counters cannot be read is refused at its start. After Megatron-LM's
--log-energy. In production: zeus (ml.energy), which also reads AMD's GPUs and Apple's processors.
"""

import importlib.util
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from picotron_min.extension import Extension

Read = Callable[[], int]  # uJ since any moment


class Meter(Extension):
    """Counts while a step runs, from `begin` to `measures`, so not in evaluations and saves.

    A step reads before its sum. What it uses later, by the update and, as the host of a GPU is
    ahead, perhaps by most of backward, is in the next step's number; the last step's is in none.
    """

    def __init__(self, device: torch.device, read: Read | None, tokens: int) -> None:
        """`read` None: another rank reads for this one; `tokens` of a step."""
        self.device, self.read, self.tokens = device, read, tokens
        self.is_gpu = device.type == "cuda"
        self.last, self.rest = 0, 0.0
        self.steps, self.joules, self.seconds = 0, 0.0, 0.0  # all steps

    @property
    def source(self) -> str:
        return "of the GPUs alone, by NVML" if self.is_gpu else "of the whole machine, by RAPL"

    def begin(self) -> None:
        self.take()  # of an evaluation, a save or nothing
        self.mine, self.began = None, time.perf_counter()

    def take(self) -> float:
        """Joules since the last call."""
        before, self.last = self.last, self.read() if self.read else 0
        return (self.last - before) / 1e6

    def counts(self) -> Tensor:
        """Joules, and 1 if this rank has read them, [2]. A step asks several times."""
        if self.mine is None:
            self.mine = torch.zeros(2, dtype=torch.float64, device=self.device)
            self.mine[:1].fill_(self.rest + self.take())  # a copy would make the host wait
            self.mine[1:].fill_(self.read is not None)
        return self.mine

    def measures(self, totals: Tensor) -> dict[str, object]:
        """Watts: the mean of a GPU, or of a machine."""
        self.rest, (joules, self.readers) = self.take(), totals.tolist()
        self.steps, self.joules = self.steps + 1, self.joules + joules
        self.seconds += (seconds := time.perf_counter() - self.began)
        watts = joules / seconds / self.readers
        return {"joules": joules, "joules_per_token": joules / self.tokens, "watts": watts}

    def summary(self) -> str:
        if not self.steps:
            return "not measured: there was no step"
        one = "GPU" if self.is_gpu else "machine, with all that ran on it"
        each = f"{self.joules / self.tokens / self.steps:.3g} J a token"
        watts = self.joules / self.seconds / self.readers
        return f"{self.joules / 1e3:,.2f} kJ, {each}, {watts:.3g} W a {one}"


def open_meter(device: torch.device, local_rank: int, tokens: int) -> Meter:
    """Of one rank, for steps of `tokens` tokens; ValueError if its counter cannot be read."""
    if device.type == "cuda":
        return Meter(device, nvml_reader(device), tokens)
    return Meter(device, None if local_rank else rapl_reader(), tokens)


def nvml_reader(device: torch.device) -> Read:
    if importlib.util.find_spec("pynvml") is None:
        remedy = 'run  pip install -e ".[energy]"  or set it to false'
        raise ValueError(f"log_energy=true needs nvidia-ml-py on GPUs: {remedy}")
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
    return lambda: 1000 * pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)


def rapl_reader(folder: Path = Path("/sys/class/powercap")) -> Read:
    """All packages of this machine. They wrap: at 250 W within a quarter of an hour."""
    # Not intel-rapl-mmio:0, which is a package again; and by their names not intel-rapl:0:0, a part
    # of a package, nor psys, a zone which has the packages in it.
    zones = folder.glob("intel-rapl:*")
    packages = [zone for zone in zones if (zone / "name").read_text().startswith("package")]
    if not packages or not all(os.access(zone / "energy_uj", os.R_OK) for zone in packages):
        problem = f"log_energy=true: {folder}/intel-rapl:0/energy_uj"
        causes = "is missing, as in most virtual machines, or for root alone"
        raise ValueError(f"{problem} {causes}: chmod a+r it as root, or set log_energy to false")
    before, total = {}, 0

    def read() -> int:
        nonlocal total
        for package in packages:
            now = int((package / "energy_uj").read_text())
            wraps_at = int((package / "max_energy_range_uj").read_text())
            total += (now - before.get(package, now)) % wraps_at
            before[package] = now
        return total

    return read
