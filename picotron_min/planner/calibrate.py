"""What your machine reaches of its peaks, from runs that were measured on it.

    runs that are given                 what is found, and what else stays as it was
    one                                 f, the share of the peak in matmuls
    two with different sequences        f and a, the share in attention
    more, some with tp, cp or dp        also the share of the links' speed, and a message's latency

The unknowns are those that make predicted steps most like the measured ones: the sum of squared
logarithms of their ratios is least. A run of its own finds f exactly, by bisection: the step falls
as f rises.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from picotron_min.planner.step_time import predict
from picotron_min.planner.system import Setting
from picotron_min.runtime.hardware import Gpu

LIMITS = (1e-3, 1e3)  # times its first value: how far an unknown may be
ROUNDS = 60


class Observation(NamedTuple):
    setting: Setting
    seconds: float  # of a measured step


class Calibration(NamedTuple):
    found: dict[str, float]  # by the field of Gpu
    errors: list[float]  # of each run: predicted / measured - 1


def calibrate(runs: Sequence[Observation]) -> Calibration:
    """The unknowns that runs can show, as many as there are runs at most."""
    values = {name: getattr(runs[0].setting.gpu, name) for name in unknowns(runs)}
    if len(values) == 1:
        values["matmul_share"] = bisect(runs[0], values["matmul_share"])
    else:
        values = descend(runs, values)
    errors = [predicted(run, values) / run.seconds - 1 for run in runs]
    return Calibration(values, errors)


def unknowns(runs: Sequence[Observation]) -> list[str]:
    """What the differences between runs show, the most certain first."""
    names = ["matmul_share"]
    if len({run.setting.workload.seq_length for run in runs}) > 1:
        names.append("attention_share")
    if any(run.setting.layout.world_size > run.setting.layout.pp for run in runs):
        names += ["link_share", "latency"]
    return names[: len(runs)]


def predicted(run: Observation, values: dict[str, float]) -> float:
    gpu: Gpu = replace(run.setting.gpu, **values)
    return predict(replace(run.setting, gpu=gpu)).step


def bisect(run: Observation, share: float) -> float:
    """The matmul share with which a run takes as long as it did; at the limit if none does."""
    low, high = (share * limit for limit in LIMITS)
    for _ in range(ROUNDS):
        middle = math.sqrt(low * high)
        is_slow = predicted(run, {"matmul_share": middle}) > run.seconds
        low, high = (middle, high) if is_slow else (low, middle)
    return middle


def descend(runs: Sequence[Observation], values: dict[str, float]) -> dict[str, float]:
    """Coordinate descent: change one unknown at a time while that helps, by less and less."""

    def loss(values: dict[str, float]) -> float:
        return sum(math.log(predicted(run, values) / run.seconds) ** 2 for run in runs)

    start, best, factor = dict(values), loss(values), 4.0
    while factor > 1.0001:
        improved = False
        for name in values:
            for change in (factor, 1 / factor):
                tried = values | {name: values[name] * change}
                within = LIMITS[0] <= tried[name] / start[name] <= LIMITS[1]
                if within and (now := loss(tried)) < best:
                    values, best, improved = tried, now, True
        if not improved:
            factor = math.sqrt(factor)
    return values
