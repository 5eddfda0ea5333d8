"""Refits the planner's constants without each shape of a source: how wide must intervals be?

    python -m tests.planner.refit

prints the factors that a fit of all runs would put on the constants, the errors of runs whose shape
(or whose source) was left out of the fit, and the width for uncertainty.py. Fits are linear in the
logarithms of the constants, with Huber's loss (knee at 10%), and a prior that keeps them near the
committed ones.
"""

import csv
import math
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np

from picotron_min.planner import layer_time
from picotron_min.planner.step_time import predict
from picotron_min.planner.uncertainty import sigma
from picotron_min.planner.validate import setting_of

FILES = [Path("tests", name) for name in ("published_runs.csv", "published_runs_2.csv")]
HOPPER, BLACKWELL = {"H100", "H200", "GH200"}, {"B200", "GB200"}
SHARES = [({"A100-80GB", "A100-40GB"}, "matmul_share"), ({"A100-80GB"}, "attention_share")]
SHARES += [({gpu}, "matmul_share") for gpu in ("H100", "H200", "H100-500W", "GH200")]
SHARES += [(BLACKWELL | {"GB300"}, name) for name in ("matmul_share", "float8_share")]
SHARES += [(HOPPER, name) for name in ("float8_share", "attention_share", "cudnn_share")]
SHARES += [({"H100-500W"}, n) for n in ("float8_share", "attention_share", "cudnn_share")]
SHARES += [(BLACKWELL, "cudnn_share"), ({"GB300"}, "cudnn_share")]
NUMBERS = ["FUSED", "UNFUSED", "GROUPED", "CASTS_INSIDE", "TP_EXPOSED", "EP_EXPOSED", "DIRECT"]
KNEE, PRIOR, CHANGE = 0.1, 0.02, 1.02


def logarithms(settings: list) -> np.ndarray:
    return np.log([predict(setting).step for setting in settings])


def jacobian(settings: list) -> np.ndarray:
    """How the logarithm of each predicted step changes with that of each constant."""
    base, columns = logarithms(settings), []
    for gpus, name in SHARES:
        changed = [
            replace(s, gpu=replace(s.gpu, **{name: CHANGE * getattr(s.gpu, name)}))
            if s.gpu.name in gpus
            else s
            for s in settings
        ]
        columns.append(logarithms(changed) - base)
    for name in NUMBERS:
        value = getattr(layer_time, name)
        scaled = tuple(CHANGE * v for v in value) if isinstance(value, tuple) else CHANGE * value
        setattr(layer_time, name, scaled)
        columns.append(logarithms(settings) - base)
        setattr(layer_time, name, value)
    return np.stack(columns, 1) / math.log(CHANGE)


def fit(errors: np.ndarray, slopes: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """The changes of constants that make the errors of the runs that count smallest."""
    change = np.zeros(slopes.shape[1])
    for _ in range(30):
        left = np.abs(errors + slopes @ change)
        weighted = slopes * (counts * np.minimum(1, KNEE / np.maximum(left, 1e-9)))[:, None]
        normal = weighted.T @ slopes + PRIOR * np.eye(len(change))
        change = np.linalg.solve(normal, -weighted.T @ errors)
    return change


def main() -> None:
    rows = [row for path in FILES for row in csv.DictReader(path.open(newline=""))]
    rows = [row for row in rows if row["use"] == "counted"]
    settings = [setting_of(row) for row in rows]
    tokens = [int(r["global_batch"]) * int(r["seq"]) / int(r["gpus"]) for r in rows]
    real = np.array(
        [n / float(r["tokens_per_second_per_gpu"]) for n, r in zip(tokens, rows, strict=True)]
    )
    errors, slopes = logarithms(settings) - np.log(real), jacobian(settings)
    names = [*(f"{name} of {', '.join(sorted(gpus))}" for gpus, name in SHARES), *NUMBERS]
    for name, change in zip(names, fit(errors, slopes, np.ones(len(rows))), strict=True):
        print(f"x {math.exp(change):.2f}  {name}")
    keys = {"as committed": None, "refitted": None}
    keys["without its source"] = lambda r: r["source"].split()[0]
    keys["without its shape"] = lambda r: (r["source"].split(",")[0], r["layers"], r["hidden"])
    for what, key in keys.items():
        left = errors.copy()
        groups = defaultdict(list)
        for i, row in enumerate(rows):
            groups[key(row) if key else what].append(i)
        for group in groups.values() if what != "as committed" else ():
            counts = np.ones(len(rows))
            counts[group if key else []] = 0
            left[group] += slopes[group] @ fit(errors, slopes, counts)
        sizes = np.sort(np.abs(np.expm1(left)))
        print(
            f"{what:20} median {np.median(sizes):.1%}, nine tenths {sizes[-len(sizes) // 10]:.1%}"
        )
        sigmas = [sigma(predict(s), bool(s.model_config.num_local_experts)) for s in settings]
        width = np.sort(np.abs(left) / sigmas)[math.ceil(0.9 * (len(left) + 1)) - 1]
        print(f"{'':20} 90% are within {width:.2f} sigma")


if __name__ == "__main__":
    main()
