"""Speed and memory of a run: MFU, HFU, the device's peak.

MFU is the share of the device's peak FLOPs that goes into the model's own arithmetic; HFU also
counts what recomputation repeats (Chowdhery et al. 2022, "PaLM", appendix B; formulas: costs.py).
"""

import platform
import re
import resource
import sys
import time
from functools import partial
from operator import matmul
from pathlib import Path

import torch

from picotron_min.costs import model_flops_per_token
from picotron_min.extensions.settings import ModelConfig, Workload
from picotron_min.runtime.hardware import (
    common_flops_per_token,
    gpu_of_device,
    hardware_flops_per_token,
)


def speeds(
    c: ModelConfig,
    work: Workload,
    device: torch.device,
    peak: float | None,
    tokens_per_second: float,
    devices: int = 1,
    attended: float | None = None,
) -> dict[str, float | None]:
    """Fields of StepRecord: speeds, their shares of one device's peak, memory.

    `attended`: the length of rows whose attention costs as much, if it is not seq_length.
    """
    speed, attended = tokens_per_second / devices, attended or work.seq_length
    flops = {
        "mfu": model_flops_per_token(c, attended),
        "mfu_common": common_flops_per_token(c, work.seq_length),
        "hfu": hardware_flops_per_token(c, attended, work.recompute),
    }
    shares = {name: peak and n * speed / peak for name, n in flops.items()}
    both = {"tokens_per_second": tokens_per_second, "tokens_per_second_per_device": speed}
    return both | shares | {"memory_gb": memory_gb(device)}


def device_name(device: torch.device) -> str:
    """The name of the GPU, or of the processor."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpu_info = Path("/proc/cpuinfo")  # of Linux, where platform.processor() is often empty
    named = cpu_info.exists() and re.search("model name.*: (.+)", cpu_info.read_text())
    return named[1] if named else platform.processor() or platform.machine()


def memory_gb(device: torch.device) -> float:
    """This process's peak in 10^9 bytes: torch's allocations on a GPU, all its memory on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, Linux kilobytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9


def peak_flops(device: torch.device, dtype: str) -> float | None:
    """Peak FLOPs per second: a CPU's is measured; None for a GPU or dtype not in the table."""
    if device.type == "cpu":
        return measure_peak_flops(getattr(torch, dtype))
    gpu = gpu_of_device(device_name(device))
    return gpu and gpu.peaks.get(dtype)


def measure_peak_flops(dtype: torch.dtype) -> float:
    """FLOPs per second of this process's threads: of the best of several matmuls on each of them.

    It is measured on one thread, small ones first: where a CPU has no instructions for a dtype, a
    large one takes seconds.
    """
    threads, best, size = torch.get_num_threads(), 0.0, 128
    torch.set_num_threads(1)  # others wait busily, and their time would count
    deadline = time.perf_counter() + 0.2
    while time.perf_counter() < deadline:
        a = torch.randn(size, size).to(dtype)
        # A linear's forward, and its weight's gradient: where a CPU has no instructions for
        # bfloat16, a @ a takes ten times as long.
        products = [partial(matmul, a, a.T), partial(matmul, a.T, a)]
        if dtype == torch.float32 and torch.backends.mkldnn.is_available():  # kernels/products.py
            pointwise = torch.ops.mkldnn._linear_pointwise
            products.append(partial(pointwise, a, a, None, "none", [], ""))
        for product in products * 2:  # the first ones set a library up
            began = time.process_time()  # in which other work does not count
            product()
            best = max(best, 2 * size**3 / (time.process_time() - began))
        size = min(2 * size, 1024)
    torch.set_num_threads(threads)
    return best * threads
