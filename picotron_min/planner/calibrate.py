"""What your machine reaches of its peaks, from runs that were measured on it.

    metrics.jsonl of runs  ->  unknowns  ->  hardware.json  ->  later plans

    runs that are given                 what is found, and what else stays as it was
    one                                 f, the share of the peak in matmuls (of runs in FP8: f8)
    two with different sequences        f and a, the share in attention
    more, some with tp, cp or dp        also the share of the links' speed, and a message's latency

The unknowns are those that make predicted steps most like the measured ones: the sum of squared
logarithms of their ratios is least.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Annotated, Literal, NamedTuple

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


LIMITS = (1e-3, 1e3)  # times its first value: how far an unknown may be
FINEST = 1 + 1e-7  # factor by which an unknown is changed at last


class Observation(NamedTuple):
    setting: Setting
    seconds: float  # of a measured step


def calibrate(runs: Sequence[Observation]) -> dict[str, float]:
    """The unknowns that runs can show, by the field of Gpu; as many as there are runs at most.

    Coordinate descent: change one unknown at a time while that helps, by less and less.
    """
    values = start = {name: getattr(runs[0].setting.gpu, name) for name in unknowns(runs)}
    best, factor = loss(runs, values), 4.0
    while factor > FINEST:
        improved = False
        for name in values:
            for change in (factor, 1 / factor):
                tried = values | {name: values[name] * change}
                within = LIMITS[0] <= tried[name] / start[name] <= LIMITS[1]
                if within and (now := loss(runs, tried)) < best:
                    values, best, improved = tried, now, True
        if not improved:
            factor = math.sqrt(factor)
    return values


def unknowns(runs: Sequence[Observation]) -> list[str]:
    """What the differences between runs show, the most certain first."""
    in_8_bits = {run.setting.system.precision != "bf16" for run in runs}
    names = ["matmul_share"] * (False in in_8_bits) + ["float8_share"] * (True in in_8_bits)
    if len({run.setting.workload.seq_length for run in runs}) > 1:
        names.append("attention_share")
    if any(run.setting.layout.world_size > run.setting.layout.pp for run in runs):
        names += ["link_share", "latency"]
    return names[: len(runs)]


def loss(runs: Sequence[Observation], values: dict[str, float]) -> float:
    return sum(math.log(1 + error) ** 2 for error in errors_of(runs, values))


def errors_of(runs: Sequence[Observation], values: dict[str, float]) -> list[float]:
    """Predicted / measured - 1 of each run, if a GPU has these values."""
    steps = [predict(replace(s, gpu=replace(s.gpu, **values))).step for s, _ in runs]
    return [step / run.seconds - 1 for step, run in zip(steps, runs, strict=True)]


CALIBRATED = ("matmul_share", "float8_share", "attention_share", "link_share", "latency")
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False, strict=True)]
Found = TypeAdapter(dict[str, dict[Literal[CALIBRATED], Positive]])


def read_found(hardware: Path) -> dict[str, dict[str, float]]:
    """What was found, by device; nothing if there is no file. ValueError if it is damaged."""
    try:
        return Found.validate_json(hardware.read_bytes()) if hardware.exists() else {}
    except ValidationError:
        why = f"{hardware} is not what calibrate writes"
        raise ValueError(f"{why}: delete it, calibrate again") from None
