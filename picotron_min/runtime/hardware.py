"""What GPUs can do: the one table of peaks, memory and links, for plans and for MFU.

    peak      TFLOP/s of matmuls, by dtype       nvlink    GB/s between GPUs of a node, one way
    hbm       GB/s of a GPU's own memory         network   Gb/s of a GPU to other nodes
    memory    its size in GB

These are from the vendors' data sheets. Four numbers a GPU are not: the shares of the peak that
large matmuls, those in 8 bits, and two kernels of attention reach. They were fitted, for the GPUs
and dtypes that are `validated`, to published runs (docs/planner.md); others are taken from the
nearest GPU. Standard library only.
"""

import re
from dataclasses import dataclass, field

from picotron_min.costs import flops_of_layers, model_flops_per_token, parameter_count
from picotron_min.model_config import ModelConfig


@dataclass(frozen=True)
class Gpu:
    """One device, and how it reaches the others."""

    name: str
    peaks: dict[str, float] = field(hash=False)  # FLOP/s of dense matmuls, by dtype
    memory: float  # bytes
    hbm: float  # bytes/s, as all below
    nvlink: float  # one way; of PCIe where there is no NVLink
    matmul_share: float  # of the peak
    attention_share: float  # FlashAttention-2's
    cudnn_share: float = 0.0  # cuDNN's and FlashAttention-3's
    float8_share: float = 0.67  # of the peak in 8 bits, by matmuls
    gpus_per_node: int = 8  # that NVLink connects
    network: float = 50e9  # one way; 400 Gb/s
    validated: tuple[str, ...] = ()  # dtypes of published runs on it: see docs/planner.md
    is_calibrated: bool = False
    # One set for all GPUs.
    hbm_share: float = 0.9  # of its memory's speed that a pass over a large tensor reaches
    link_share: float = 0.6  # of NVLink's speed that a collective reaches
    network_share: float = 0.46
    latency: float = 55e-6  # seconds until the first byte of a message arrives
    hop: float = 4e-6  # and more for each further rank of a ring


# Dense peaks in TFLOP/s: bfloat16 and float64 on matrix units with full accumulation, float32
# without TF32, which torch leaves off, and 8 bits. 0: there is none, or too little to train with.
# GPUs of a node: of the 72 of GB200 and GB300 that are connected, jobs take 64.
PEAK_DTYPES = ("bfloat16", "float32", "float64", "float8")
_TABLE = r"""
GPU         bf16  fp32  fp64  fp8  GB  hbm link node shares torch's name of the device
A100-80GB    312  19.5  19.5    0  80 2000  300    8 ampere A100-(SXM4?|PCIE)-80GB|A100 80GB PCIe
A100-40GB    312  19.5  19.5    0  40 1555  300    8 ampere A100-(SXM4?|PCIE)-40GB
H100       989.4  66.9  66.9 1979  80 3350  450    8 h100   H100 80GB HBM3
H100-500W  989.4  66.9  66.9 1979  96 2400  450    8 500w   -
H100-PCIe    756  51.2  51.2 1513  80 2039   64    8 h100   H100 PCIe
H100-NVL   835.5    60    60 1671  94 3938   64    8 h100   H100 NVL
H200       989.4  66.9  66.9 1979 141 4800  450    8 h200   H200
H200-NVL   835.5    60    60 1671 141 4800  450    8 h200   H200 NVL
GH200      989.4  66.9  66.9 1979  96 4000  450    4 gh200  GH200 (480GB|96GB HBM3)
B200        2250    75    37 4500 180 8000  900    8 b200   B200
GB200       2500    80    40 5000 186 8000  900   64 b200   GB200
GB300       2500    80    40 5000 279 8000  900   64 gb300  GB300
L4           121  30.3     0  242  24  300   32    8 ampere L4
L40S         362  91.6     0  733  48  864   32    8 ampere L40S
RTX-4090   165.2  82.6     0  330  24 1008   32    8 ampere GeForce RTX 4090
RTX-3090      71  35.6     0    0  24  936   32    8 ampere GeForce RTX 3090
MI300X    1307.4 163.4 163.4 2615 192 5300  448    8 h100   Instinct MI300X( OAM)?
"""
_ROWS = [line.split(maxsplit=10) for line in _TABLE.strip().splitlines()[1:]]
# Shares of the peak: matmuls, fa2, cuDNN, matmuls in 8 bits. GPUs of one kind differ in their limit
# of power. Only since Hopper is cuDNN's attention the faster one; GB300's exponentials are, too.
SHARES = {
    "ampere": (0.82, 0.50, 0.50, 0.67),
    "h100": (0.70, 0.30, 0.47, 0.67),
    "h200": (0.74, 0.30, 0.47, 0.67),
    "500w": (0.60, 0.26, 0.41, 0.60),
    "gh200": (0.55, 0.30, 0.47, 0.67),
    "b200": (0.75, 0.30, 0.43, 0.61),
    "gb300": (0.75, 0.30, 0.70, 0.61),
}
BOTH = ("bfloat16", "float8")
VALIDATED = dict.fromkeys(("H100", "H100-500W", "H200", "B200", "GB200", "GB300"), BOTH)
VALIDATED |= dict.fromkeys(("A100-80GB", "A100-40GB", "GH200"), ("bfloat16",))


def _gpu(name: str, *columns: str) -> Gpu:
    *numbers, shares, _ = columns
    *peaks, memory, hbm, nvlink, node = map(float, numbers)
    return Gpu(
        name,
        {dtype: 1e12 * peak for dtype, peak in zip(PEAK_DTYPES, peaks, strict=True) if peak},
        *(1e9 * memory, 1e9 * hbm, 1e9 * nvlink, *SHARES[shares]),
        gpus_per_node=int(node),
        validated=VALIDATED.get(name, ()),
    )


GPUS = {name: _gpu(name, *columns) for name, *columns in _ROWS}


def gpu_of_device(device_name: str) -> Gpu | None:
    """The GPU that torch names so; None if it is not in the table."""
    for name, *_, pattern in _ROWS:
        # All of the name must match: a laptop's RTX 4090 or a slice of an H100 (MIG) is another.
        if re.fullmatch(rf"(NVIDIA|AMD) ({pattern})", device_name):
            return GPUS[name]
    return None


def hardware_flops_per_token(model_config: ModelConfig, seq_length: int, recompute: str) -> int:
    """model_flops_per_token plus what `recompute` makes backward run again: the H of HFU."""
    # torch's checkpoint stops as soon as the last tensor that backward needs exists. A linear needs
    # its input, not its output, so the last linear of the part is not run again. What fused
    # attention repeats inside its own backward is not counted, as is usual. Experts count as if one
    # product computed all: one by one, all of them but the last repeat their last linear, too.
    again = {
        "none": lambda parts: 0,
        "selective": lambda parts: parts["q, k, v"] + parts["attention"],
        "full": lambda parts: sum(parts.values()) - parts["down"],
    }[recompute]
    repeated = sum(map(again, flops_of_layers(model_config, seq_length)))
    return model_flops_per_token(model_config, seq_length) + repeated


def common_flops_per_token(model_config: ModelConfig, seq_length: int) -> int:
    """6 N + 12 L Q D S of most projects: the embedding and all pairs count (PaLM, appendix B)."""
    pairs = 2 * sum(parts["attention"] for parts in flops_of_layers(model_config, seq_length))
    return 6 * active_parameter_count(model_config) + 3 * pairs


def active_parameter_count(model_config: ModelConfig) -> int:
    """The parameters that a token uses."""
    layers = range(model_config.num_layers)
    return parameter_count(model_config) - sum(map(model_config.idle_parameters, layers))
