"""Energy: the joules of each step, read from counters of the hardware, and never estimated.

    GPUs   NVML: mJ since the driver was loaded   every rank reads its own GPU
    CPUs   RAPL: uJ of each processor package     the first rank of a node, for the whole machine

A Meter is an extension: its two numbers join the sum over all ranks that every step has, so there
is no message more, and no rank can miss one. After Megatron-LM's --log-energy. In production: zeus
(ml.energy), which also reads AMD's GPUs and Apple's processors.
"""

import importlib.util
import math
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from picotron_min.extension import Extension

Read = Callable[[], int]  # uJ since any moment; OSError if the counter cannot be read


class Meter(Extension):
    """Counts while a step runs, from `begin` to `measures`, so not in evaluations and saves.

    A step reads before its sum. What it uses later, by the update and, as the host of a GPU is
    ahead, perhaps by most of backward, is in the next step's number; the last step's is in none.
    """

    def __init__(self, device: torch.device, read: Read | None, ranks: int, tokens: int) -> None:
        """`read` None: another rank reads for this one; `tokens` of a step."""
        self.device, self.read, self.ranks, self.tokens = device, read, ranks, tokens
        self.is_gpu = device.type == "cuda"
        self.last, self.rest, self.problem = math.nan, 0.0, ""
        self.steps, self.joules, self.seconds = 0, 0.0, 0.0  # all steps

    @property
    def source(self) -> str:
        return "of the GPUs alone, by NVML" if self.is_gpu else "of the whole machine, by RAPL"

    def begin(self) -> None:
        self.take()  # of an evaluation, a save or nothing
        self.mine, self.began = None, time.perf_counter()

    def take(self) -> float:
        """Joules since the last call; NaN if the counter cannot be read."""
        try:
            now = self.read() if self.read else 0
        except OSError as error:
            self.problem, now = str(error), math.nan
        before, self.last = self.last, now
        return (now - before) / 1e6

    def counts(self) -> Tensor:
        """Joules, and 1 if this rank has read them, [2]. A step asks several times."""
        if self.mine is None:
            self.mine = torch.zeros(2, dtype=torch.float64, device=self.device)
            joules = self.rest + self.take()
            self.mine[:1].fill_(joules)  # a copy to a GPU would make the host wait
            self.mine[1:].fill_(bool(self.read) and not math.isnan(joules))
        return self.mine

    def measures(self, totals: Tensor) -> dict[str, object]:
        """All are None if a reader failed; watts: the mean of a GPU, or of a machine."""
        self.rest, (joules, self.readers) = self.take(), totals.tolist()
        self.steps, self.joules = self.steps + 1, self.joules + joules
        self.seconds += (seconds := time.perf_counter() - self.began)
        if math.isnan(joules):
            of = f"of {self.ranks} GPUs" if self.is_gpu else "node(s), not by all"
            self.problem = self.problem or f"reported by {self.readers:.0f} {of}"
            return dict.fromkeys(("joules", "joules_per_token", "watts"))
        watts = joules / seconds / self.readers
        return {"joules": joules, "joules_per_token": joules / self.tokens, "watts": watts}

    def summary(self) -> str:
        if not self.steps or math.isnan(self.joules):
            return f"not measured: {self.problem or 'there was no step'}"
        one = "GPU" if self.is_gpu else "machine, with all that ran on it"
        each = f"{self.joules / self.tokens / self.steps:.3g} J a token"
        watts = self.joules / self.seconds / self.readers
        return f"{self.joules / 1e3:,.2f} kJ, {each}, {watts:.3g} W a {one}"


def open_meter(device: torch.device, local_rank: int, num_ranks: int, tokens: int) -> Meter:
    """Of one rank, for steps of `tokens` tokens; ValueError if a package is missing."""
    if device.type == "cuda":
        return Meter(device, nvml_reader(device), num_ranks, tokens)
    return Meter(device, None if local_rank else rapl_reader(), num_ranks, tokens)


def nvml_reader(device: torch.device) -> Read:
    if importlib.util.find_spec("pynvml") is None:
        remedy = 'run  pip install -e ".[energy]"  or set it to false'
        raise ValueError(f"log_energy=true needs nvidia-ml-py on GPUs: {remedy}")
    import pynvml

    # Not by index: NVML counts all GPUs of a node, torch only CUDA_VISIBLE_DEVICES.
    uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"

    def read() -> int:
        try:
            pynvml.nvmlInit()  # counts its calls; the first one does the work
            handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
            return 1000 * pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
        except pynvml.NVMLError as error:  # AMD's, older than Volta, or a part of one (MIG)
            raise OSError(f"NVML has no energy of {uuid}: {error}") from None

    return read


def rapl_reader(folder: Path = Path("/sys/class/powercap")) -> Read:
    """All packages of this machine. They wrap: at 250 W within a quarter of an hour."""
    # Not intel-rapl-mmio:0, which is a package again; and by their names not intel-rapl:0:0, a part
    # of a package, nor psys, a zone which has the packages in it.
    zones = folder.glob("intel-rapl:*")
    packages = [zone for zone in zones if (zone / "name").read_text().startswith("package")]
    before, total = {}, 0

    def read() -> int:
        nonlocal total
        if not packages:
            raise OSError(f"there is no {folder}/intel-rapl:0, as in most virtual machines")
        for package in packages:
            now = int((package / "energy_uj").read_text())  # by root only on most machines
            wraps_at = int((package / "max_energy_range_uj").read_text())
            total += (now - before.get(package, now)) % wraps_at
            before[package] = now
        return total

    return read
