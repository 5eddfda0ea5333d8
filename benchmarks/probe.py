"""What one wants to know of a GPU before the first run: versions, settings, ceilings.

    python benchmarks/probe.py

With DEVICE=cpu in the environment: tiny sizes on a CPU, only to see that it runs.
"""

import os
import sys
from importlib.metadata import PackageNotFoundError, version

import torch
import torch.nn.functional as F
from torch.utils.benchmark import Timer

ON_CPU = os.environ.get("DEVICE") == "cpu"
DEVICE = torch.device("cpu" if ON_CPU else "cuda")
PACKAGES = "transformers safetensors pydantic filelock datasets wandb pytest triton"


def main() -> None:
    for name in PACKAGES.split():
        try:
            print(f"{name} {version(name)}", end="; ")
        except PackageNotFoundError:
            print(f"{name} MISSING", end="; ")
    print(f"torch {torch.__version__}, Python {sys.version.split()[0]}, {os.cpu_count()} CPUs")
    for probe in (gpu, attention, ceilings):
        try:
            print(f"{probe.__name__}: {probe()}", flush=True)
        except Exception as error:  # the other probes still say something
            print(f"{probe.__name__}: FAILED, {type(error).__name__}: {error}", flush=True)


def gpu() -> str:
    if ON_CPU:
        return "none"
    cudnn, nccl = torch.backends.cudnn.version(), torch.cuda.nccl.version()
    return f"{torch.cuda.get_device_properties(0)}, cuDNN {cudnn}, NCCL {nccl}"


def seconds(statement: str, **names) -> float:
    return Timer(statement, globals={"torch": torch, "F": F, **names}).blocked_autorange().median


def attention() -> str:
    """The kernel that torch chooses for causal attention, and its TFLOP/s in forward."""
    rows = []
    for B, Q, K, S in ((1, 2, 1, 64),) if ON_CPU else ((8, 32, 32, 2048), (2, 32, 8, 8192)):
        q, k, v = (torch.randn(B, n, S, 64, device=DEVICE, dtype=torch.bfloat16) for n in (Q, K, K))
        options = {"is_causal": True, "enable_gqa": True}
        kind = torch.nn.attention.SDPBackend(torch._fused_sdp_choice(q, k, v, **options)).name
        call = "F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)"
        speed = 2 * B * Q * S * S * 64 / seconds(call, q=q, k=k, v=v) / 1e12
        rows.append(f"{Q} heads, {S} tokens: {kind}, forward {speed:.1f} TFLOP/s")
    return "; ".join(rows)


def ceilings() -> str:
    n = 128 if ON_CPU else 8192
    a, b = torch.randn(2, n, n, device=DEVICE, dtype=torch.bfloat16).unbind()
    rows = [f"product in bfloat16 {2 * n**3 / seconds('a @ b', a=a, b=b) / 1e12:.1f} TFLOP/s"]
    big = torch.empty(2**20 if ON_CPU else 2**30, dtype=torch.uint8, device=DEVICE)
    rows.append(f"copy {2 * len(big) / seconds('x.clone()', x=big) / 1e12:.2f} TB/s")
    host = torch.empty(len(big) // 8, dtype=torch.uint8, pin_memory=not ON_CPU)
    speed = len(host) / seconds("h.copy_(x)", h=host, x=big[: len(host)]) / 1e9
    rows.append(f"to the host {speed:.1f} GB/s")  # what offload has to hide
    return ", ".join(rows)


if __name__ == "__main__":
    main()
