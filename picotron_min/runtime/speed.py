"""How fast a run is: MFU, HFU, the device's peak, memory.

MFU is the share of the device's peak FLOPs that goes into the model's own arithmetic; HFU also
counts what recomputation repeats. The formulas are in costs.py, the peaks here.
Source: Chowdhery et al. 2022, "PaLM", appendix B.
"""

import re
import resource
import sys
import time

import torch

from picotron_min import costs
from picotron_min.model_config import ModelConfig


class Speedometer:
    """Turns tokens per second into a step record's measures of speed."""

    def __init__(
        self,
        model_config: ModelConfig,
        seq_length: int,
        recompute: str,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self._device = device
        self._peak = peak_flops(device, dtype)
        self._flops_per_token = {
            "mfu": costs.model_flops_per_token(model_config, seq_length),
            "mfu_common": costs.common_flops_per_token(model_config, seq_length),
            "hfu": costs.hardware_flops_per_token(model_config, seq_length, recompute),
        }

    def measure(self, tokens_per_second: float, devices: int) -> dict[str, float | None]:
        """Fields of StepRecord: speeds, their shares of the peak, memory."""
        speed = tokens_per_second / devices
        shares = {
            name: self._peak and flops * speed / self._peak
            for name, flops in self._flops_per_token.items()
        }
        return shares | {
            "tokens_per_second": tokens_per_second,
            "tokens_per_second_per_device": speed,
            "memory_gb": memory_gb(self._device),
        }


def memory_gb(device: torch.device) -> float:
    """This process's peak in 10^9 bytes: torch's allocations on a GPU, all its memory on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, Linux kilobytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """The device's peak FLOPs per second in that dtype: measured on a CPU, or from the table.

    None for a GPU that is not in the table: then MFU is unknown.
    """
    if device.type != "cuda":
        return measure_peak_flops(dtype)
    return table_peak_flops(torch.cuda.get_device_name(device), dtype)


def table_peak_flops(device_name: str, dtype: torch.dtype) -> float | None:
    """Peak FLOPs per second by the driver's name for the device, None if it is not in the table.

    The whole name must match: a laptop's RTX 4090 or a slice of an H100 (MIG) is another device.
    """
    for pattern, teraflops in PEAK_TERAFLOPS.items():
        if re.fullmatch(pattern, device_name):
            peak = teraflops[dtype]
            return peak and peak * 1e12
    return None


def _peaks(bfloat16: float, float32: float, float64: float | None = None) -> dict:
    return {torch.bfloat16: bfloat16, torch.float32: float32, torch.float64: float64}


# Dense peaks (no sparsity) from the vendors' data sheets and architecture whitepapers. bfloat16 and
# float64 on matrix units with full accumulation; float32 without TF32, which torch leaves off.
# Consumer cards hardly have float64; it is left out.
PEAK_TERAFLOPS = {
    r"NVIDIA A100-(SXM4?|PCIE)-[48]0GB|NVIDIA A100 80GB PCIe": _peaks(312, 19.5, 19.5),
    r"NVIDIA H100 80GB HBM3": _peaks(989.4, 66.9, 66.9),  # the SXM form
    r"NVIDIA H100 PCIe": _peaks(756, 51.2, 51.2),
    r"NVIDIA H100 NVL": _peaks(835.5, 60, 60),
    r"NVIDIA H200": _peaks(989.4, 66.9, 66.9),
    r"NVIDIA H200 NVL": _peaks(835.5, 60, 60),
    r"NVIDIA B200": _peaks(2250, 75, 37),
    r"NVIDIA L4": _peaks(121, 30.3),
    r"NVIDIA L40S": _peaks(362, 91.6),
    r"NVIDIA GeForce RTX 4090": _peaks(165.2, 82.6),
    r"NVIDIA GeForce RTX 3090": _peaks(71, 35.6),
    r"AMD Instinct MI300X( OAM)?": _peaks(1307.4, 163.4, 163.4),
}


def measure_peak_flops(dtype: torch.dtype, size: int = 1024, seconds: float = 0.2) -> float:
    """The best of several [size, size] matmuls on this process's CPU threads, in FLOPs per second.

    Timed by the CPU time of this process, so that other work does not lower the peak.
    """
    a = torch.randn(size, size).to(dtype)
    a @ a  # the first one allocates, and sets the library up
    times, deadline = [], time.perf_counter() + seconds
    while not times or time.perf_counter() < deadline:
        began = time.process_time()
        a @ a
        times.append(time.process_time() - began)
    return 2 * size**3 / min(times) * torch.get_num_threads()
