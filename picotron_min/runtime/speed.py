"""How fast a run is: MFU, HFU, the device's peak, memory.

MFU is the share of the device's peak FLOPs that goes into the model's own arithmetic; HFU also
counts what recomputation repeats (Chowdhery et al. 2022, "PaLM", appendix B; formulas: costs.py).
"""

import re
import resource
import sys
import time

import torch

from picotron_min import costs
from picotron_min.layout import Workload
from picotron_min.model_config import ModelConfig


class Speedometer:
    """Turns tokens per second into a step record's measures of speed."""

    def __init__(self, model_config: ModelConfig, work: Workload, device: torch.device) -> None:
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
        self._device, self._peak = device, peak_flops(name, getattr(torch, work.dtype))
        sizes = model_config, work.seq_length
        self._flops_per_token = {
            "mfu": costs.model_flops_per_token(*sizes),
            "mfu_common": costs.common_flops_per_token(*sizes),
            "hfu": costs.hardware_flops_per_token(*sizes, work.recompute),
        }

    def measure(self, tokens_per_second: float, devices: int) -> dict[str, float | None]:
        """Fields of StepRecord: speeds, their shares of the peak, memory."""
        speed, peak = tokens_per_second / devices, self._peak
        return {
            "tokens_per_second": tokens_per_second,
            "tokens_per_second_per_device": speed,
            "memory_gb": memory_gb(self._device),
        } | {name: peak and flops * speed / peak for name, flops in self._flops_per_token.items()}


def memory_gb(device: torch.device) -> float:
    """This process's peak in 10^9 bytes: torch's allocations on a GPU, all its memory on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, Linux kilobytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9


def peak_flops(device_name: str, dtype: torch.dtype) -> float | None:
    """Peak FLOPs per second: "cpu" is measured; None for a GPU or dtype not in the table."""
    if device_name == "cpu":
        return measure_peak_flops(dtype)
    # All of the name must match: a laptop's RTX 4090 or a slice of an H100 (MIG) is another device.
    found = (peaks for name, peaks in PEAK_TERAFLOPS.items() if re.fullmatch(name, device_name))
    peak = dict(zip(PEAK_DTYPES, next(found, ()), strict=False)).get(dtype)
    return peak and peak * 1e12


PEAK_DTYPES = (torch.bfloat16, torch.float32, torch.float64)
# Dense peaks in TFLOP/s, from the vendors' data sheets: bfloat16 and float64 on matrix units with
# full accumulation, float32 without TF32, which torch leaves off. No float64 for consumer cards.
PEAK_TERAFLOPS = {
    r"NVIDIA A100-(SXM4?|PCIE)-[48]0GB|NVIDIA A100 80GB PCIe": (312, 19.5, 19.5),
    r"NVIDIA H100 80GB HBM3": (989.4, 66.9, 66.9),  # the SXM form
    r"NVIDIA H100 PCIe": (756, 51.2, 51.2),
    r"NVIDIA H100 NVL": (835.5, 60, 60),
    r"NVIDIA H200": (989.4, 66.9, 66.9),
    r"NVIDIA H200 NVL": (835.5, 60, 60),
    r"NVIDIA B200": (2250, 75, 37),
    r"NVIDIA L4": (121, 30.3),
    r"NVIDIA L40S": (362, 91.6),
    r"NVIDIA GeForce RTX 4090": (165.2, 82.6),
    r"NVIDIA GeForce RTX 3090": (71, 35.6),
    r"AMD Instinct MI300X( OAM)?": (1307.4, 163.4, 163.4),
}


def measure_peak_flops(dtype: torch.dtype) -> float:
    """The best of several matmuls on this process's CPU threads, in FLOPs per second."""
    size, times, deadline = 1024, [], time.perf_counter() + 0.2
    a = torch.randn(size, size).to(dtype)
    while len(times) < 2 or time.perf_counter() < deadline:  # the first one sets the library up
        began = time.process_time()  # of this process: other work does not lower the peak
        a @ a
        times.append(time.process_time() - began)
    return 2 * size**3 / min(times) * torch.get_num_threads()
