"""Energy: the joules of each step, read from counters of the hardware, and never estimated.

    GPUs   NVML: mJ since the driver was loaded   every rank reads its own GPU
    CPUs   RAPL: uJ of each processor package     the first rank of a node, for the whole machine

A Meter is an extension: its two numbers join the sum over all ranks that every step has, so there
is no message more, and no rank can miss one. After Megatron-LM's --log-energy. In production: zeus
(ml.energy), which also reads AMD's GPUs and Apple's processors.
"""

import math
from collections.abc import Callable
from functools import cache
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

    def __init__(self, device: torch.device, read: Read | None, num_ranks: int) -> None:
        """`read` None: another rank reads for this one."""
        self.device, self.read, self.num_ranks = device, read, num_ranks
        self.is_gpu = device.type == "cuda"
        self.rest, self.mine, self.problem = 0.0, None, ""
        self.joules = self.seconds = self.tokens = 0.0  # of all steps

    @property
    def source(self) -> str:
        return "of the GPUs alone, by NVML" if self.is_gpu else "of the whole machine, by RAPL"

    def begin(self) -> None:
        self.last, self.mine = self.counter(), None

    def counter(self) -> int | None:
        try:
            return self.read() if self.read else 0
        except OSError as error:
            self.problem = str(error)
        return None

    def take(self) -> float:
        """Joules since the counter was last read; infinite if it could not be read."""
        before, self.last = self.last, self.counter()
        return math.inf if None in (before, self.last) else (self.last - before) / 1e6

    def counts(self) -> Tensor:
        """Joules, and 1 if this rank has read them, [2]. A step asks several times."""
        if self.mine is None:
            self.mine = torch.zeros(2, dtype=torch.float64, device=self.device)
            joules = self.rest + self.take()
            self.mine[:1].fill_(joules)  # a copy to a GPU would make the host wait
            self.mine[1:].fill_(bool(self.read) and joules < math.inf)
        return self.mine

    def measures(self, totals: Tensor) -> dict[str, object]:
        self.rest, (self.of_all, self.readers) = self.take(), totals.tolist()
        if self.of_all == math.inf and not self.problem:
            of = f"of {self.num_ranks} GPUs" if self.is_gpu else "node(s), not by all"
            self.problem = f"reported by {self.readers:.0f} {of}"
        return {}

    def fields(self, seconds: float, tokens: int) -> dict[str, float]:
        """Fields of the StepRecord: none unless all that should have read have done so."""
        self.joules, self.seconds = self.joules + self.of_all, self.seconds + seconds
        self.tokens += tokens
        if self.of_all == math.inf:
            return {}
        watts = self.of_all / seconds / self.readers
        return {"joules": self.of_all, "joules_per_token": self.of_all / tokens, "watts": watts}

    def summary(self) -> str:
        if not self.seconds or self.joules == math.inf:
            return f"not measured: {self.problem or 'there was no step'}"
        one = "GPU" if self.is_gpu else "machine, with all that ran on it"
        each = f"{self.joules / self.tokens:.3g} J a token"
        watts = self.joules / self.seconds / self.readers
        return f"{self.joules / 1e3:,.2f} kJ, {each}, {watts:.3g} W a {one}"


def open_meter(device: torch.device, local_rank: int, num_ranks: int) -> Meter:
    """Of one rank; ValueError if a package is missing."""
    if device.type == "cuda":
        return Meter(device, nvml_reader(device), num_ranks)
    return Meter(device, None if local_rank else rapl_reader(), num_ranks)


def nvml_reader(device: torch.device) -> Read:
    try:
        import pynvml
    except ModuleNotFoundError:
        remedy = 'run  pip install -e ".[energy]"  or set it to false'
        raise ValueError(f"log_energy=true needs nvidia-ml-py on GPUs: {remedy}") from None
    # Not by index: NVML counts all GPUs of a node, and torch those of CUDA_VISIBLE_DEVICES.
    uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"

    @cache
    def handle():
        pynvml.nvmlInit()
        return pynvml.nvmlDeviceGetHandleByUUID(uuid)

    def read() -> int:
        try:
            return 1000 * pynvml.nvmlDeviceGetTotalEnergyConsumption(handle())
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
            try:
                now = int((package / "energy_uj").read_text())
            except PermissionError:
                raise OSError(f"{package}/energy_uj is readable by root only") from None
            wraps_at = int((package / "max_energy_range_uj").read_text())
            total += (now - before.get(package, now)) % wraps_at
            before[package] = now
        return total

    return read
