"""The machine that a plan is for: a GPU of the table, or this one's CPU, with what runs have shown.

`--calibrate` writes what it has found to hardware.json; plans read it from there.
"""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter, ValidationError

from picotron_min.planner.system import System
from picotron_min.runtime.hardware import GPUS, Gpu
from picotron_min.runtime.json_file import read_json

# Of a core, before any run was measured: FLOP/s; bytes/s of the memory that all cores share, and of
# a message between two processes.
CORE_PEAKS = {"float32": 80e9, "bfloat16": 80e9, "float64": 40e9}
CPU_MEMORY_SPEED, CPU_LINK = 20e9, 4e9
HARDWARE = Path("hardware.json")
CALIBRATED = ("matmul_share", "float8_share", "attention_share", "link_share", "latency")


def machine(name: str, hardware: Path, gpus: int, cores: int | None = None) -> Gpu:
    """The device of a name; ValueError if it is not known. A CPU's ranks share its cores."""
    if name == "cpu":
        gpu = _cpu(cores or os.cpu_count(), gpus)
    elif name in GPUS:
        gpu = GPUS[name]
    else:
        raise ValueError(f"--gpu {name} is not known: use {', '.join(GPUS)}, or cpu")
    found = read(hardware).get(name, {})
    found = {key: found[key] for key in CALIBRATED if key in found}
    return replace(gpu, **found, is_calibrated=bool(found))


def _cpu(cores: int, ranks: int) -> Gpu:
    share = min(1.0, cores / ranks)  # of a core that a rank has
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / ranks
    peaks = {dtype: share * peak for dtype, peak in CORE_PEAKS.items()}
    speeds = CPU_MEMORY_SPEED / ranks, CPU_LINK / ranks
    shares = {"gpus_per_node": max(64, ranks), "core_share": share}
    return Gpu("cpu", peaks, memory, *speeds, 0.8, 0.4, **shares)


Found = TypeAdapter(
    dict[str, dict[str, Annotated[float, Field(gt=0, allow_inf_nan=False, strict=True)]]]
)


def read(hardware: Path) -> dict[str, dict[str, float]]:
    """What was found, by device; nothing if there is no file. ValueError if it is damaged."""
    try:
        return Found.validate_json(hardware.read_bytes()) if hardware.exists() else {}
    except ValidationError:
        why = f"{hardware} is not what --calibrate writes"
        raise ValueError(f"{why}: delete it, calibrate again") from None


def read_system(path: Path) -> System:
    """The properties of a code base, by the fields of System; ValueError if there is another."""
    raw = read_json(path)
    if not raw.keys() <= System.__dataclass_fields__.keys():
        why = f"{path} has other keys than {', '.join(System.__dataclass_fields__)}"
        raise ValueError(f"{why}: see picotron_min/planner/system.py")
    try:
        return TypeAdapter(System).validate_python(raw)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ValueError(f"{path}: {where}: {first['msg'][0].lower()}{first['msg'][1:]}") from None


def write_system(path: Path, seen: dict[str, object]) -> None:
    """Add what runs have shown to the properties of a code base."""
    path.write_text(json.dumps(read_json(path) | seen, indent=4) + "\n", encoding="utf-8")


def write(hardware: Path, gpu: Gpu) -> None:
    found = read(hardware) | {gpu.name: {key: getattr(gpu, key) for key in CALIBRATED}}
    hardware.write_text(json.dumps(found, indent=4) + "\n", encoding="utf-8")
