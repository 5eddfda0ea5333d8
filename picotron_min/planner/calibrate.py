"""What your machine reaches of its peak in matmuls, from a run that was measured on it.

    config.json, metrics.jsonl  ->  f, the share of the peak  ->  hardware.json  ->  later plans

f, of a run in FP8 the share in 8 bits, makes the predicted step as long as the measured one. What a
step spends on anything else stays as predicted, so f makes up for errors there, too.
"""

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Annotated, Literal

from pydantic import BaseModel, Field, NonNegativeInt, TypeAdapter, ValidationError

from picotron_min.planner.choices import Candidate, Request
from picotron_min.planner.step_time import predict
from picotron_min.planner.system import Setting
from picotron_min.planner.traffic import planned_traffic
from picotron_min.runtime.metrics import RUN_LOG

WARM_UP = 5  # steps that are slower than those to come


class Measured(BaseModel, allow_inf_nan=False, strict=True):
    """Of a step; of a run the median after the warm-up, and the rest of its last step."""

    step: NonNegativeInt
    step_seconds: float = Field(gt=0)
    comm_bytes: dict[str, NonNegativeInt]  # by axis


class Event(BaseModel):
    """A line of run.jsonl that is about a start."""

    start: dict[str, object]


def read_metrics(path: Path, request: Request, candidate: Candidate) -> float:
    """Seconds of a step of a run of this config; ValueError if it was of another, or too short."""
    log = path.parent / RUN_LOG  # a start for each time that the run resumed
    starts = [*_records(log, Event)] if log.is_file() else []
    begin = starts[-1].start.get("after_step", 0) if starts else 0
    # Of a step that was repeated, the later record counts.
    steps = {record.step: record for record in _records(path, Measured)}
    after = [record for step, record in steps.items() if step > begin]
    if len(after) <= WARM_UP:
        since = f" after step {begin}, where the run resumed" if begin else ""
        why = f"{path} has {len(after)} steps{since}"
        raise ValueError(f"{why}, and the first {WARM_UP} warm up: train at least {WARM_UP + 1}")
    planned = planned_traffic(request.model_config, candidate.layout, candidate.workload)
    theirs = {axis for axis, sent in after[-1].comm_bytes.items() if sent}
    if theirs != planned.keys():
        used, ours = (" ".join(sorted(axes)) or "none" for axes in (theirs, planned))
        why = f"{path} is of a run that sent over the axes {used}; the config's are {ours}"
        raise ValueError(f"{why}: name the metrics of a run of this config")
    return median(record.step_seconds for record in after[WARM_UP:])


def _records(path: Path, kind: type[BaseModel]) -> Iterator:
    """The lines of a file that are of this kind; a kill may leave a part of one."""
    for line in path.read_bytes().splitlines():
        with suppress(ValueError):
            yield kind.model_validate_json(line)


LEAST = 1e-3  # of the peak: no step that computes is slower


def calibrate(setting: Setting, seconds: float) -> dict[str, float]:
    """The share of the peak with which a step takes so long, by the field of Gpu."""
    name = "matmul_share" if setting.system.precision == "bf16" else "float8_share"
    low, high = LEAST, 1.0  # a step is longer with a lower share
    for _ in range(60):
        share = math.sqrt(low * high)
        gpu = replace(setting.gpu, **{name: share})
        if predict(replace(setting, gpu=gpu)).step > seconds:
            low = share
        else:
            high = share
    if high == 1 or low == LEAST:
        needs = "more even at its peak" if high == 1 else f"less even at {LEAST:.1%} of its peak"
        why = f"a step took {seconds:.3g} s, and a {setting.gpu.name} needs {needs}"
        raise ValueError(
            f"{why}: name the GPU of the run with --gpu, and metrics of undisturbed steps"
        )
    return {name: high}


Positive = Annotated[float, Field(gt=0, allow_inf_nan=False, strict=True)]
Found = TypeAdapter(dict[str, dict[Literal["matmul_share", "float8_share"], Positive]])


def read_found(hardware: Path) -> dict[str, dict[str, float]]:
    """What was found, by device; nothing if there is no file. ValueError if it is damaged."""
    try:
        return Found.validate_json(hardware.read_bytes()) if hardware.exists() else {}
    except ValidationError:
        why = f"{hardware} is not what this version's calibrate writes"
        raise ValueError(f"{why}: delete it, calibrate again") from None
