"""What your machine reaches of its peaks, from runs that were measured on it.

    runs that are given                 what is found, and what else stays as it was
    one                                 f, the share of the peak in matmuls (of runs in FP8: f8)
    two with different sequences        f and a, the share in attention
    more, some with tp, cp or dp        also the share of the links' speed, and a message's latency

The unknowns are those that make predicted steps most like the measured ones: the sum of squared
logarithms of their ratios is least.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from picotron_min.planner.step_time import predict
from picotron_min.planner.system import Setting

LIMITS = (1e-3, 1e3)  # times its first value: how far an unknown may be
FINEST = 1 + 1e-7  # factor by which an unknown is changed at last


class Observation(NamedTuple):
    setting: Setting
    seconds: float  # of a measured step


def calibrate(runs: Sequence[Observation]) -> dict[str, float]:
    """The unknowns that runs can show, by the field of Gpu; as many as there are runs at most.

    Coordinate descent: change one unknown at a time while that helps, by less and less.
    """

    def loss(values: dict[str, float]) -> float:
        return sum(math.log(1 + error) ** 2 for error in errors_of(runs, values))

    values = start = {name: getattr(runs[0].setting.gpu, name) for name in unknowns(runs)}
    best, factor = loss(values), 4.0
    while factor > FINEST:
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


def unknowns(runs: Sequence[Observation]) -> list[str]:
    """What the differences between runs show, the most certain first."""
    in_8_bits = {run.setting.system.precision != "bf16" for run in runs}
    names = ["matmul_share"] * (False in in_8_bits) + ["float8_share"] * (True in in_8_bits)
    if len({run.setting.workload.seq_length for run in runs}) > 1:
        names.append("attention_share")
    if any(run.setting.layout.world_size > run.setting.layout.pp for run in runs):
        names += ["link_share", "latency"]
    return names[: len(runs)]


def errors_of(runs: Sequence[Observation], values: dict[str, float]) -> list[float]:
    """Predicted / measured - 1 of each run, if a GPU has these values."""
    steps = [predict(replace(s, gpu=replace(s.gpu, **values))).step for s, _ in runs]
    return [step / run.seconds - 1 for step, run in zip(steps, runs, strict=True)]
