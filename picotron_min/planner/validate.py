"""Predictions beside published runs: how far off the time model is, and by what.

    python -m picotron_min.planner validate tests/published_runs*.csv

A row of the file has every input of a prediction, in columns with the names of their fields, and
the speed that its source gives. `use` is "counted"; "rank", for runs that differ in the layout
alone, which are to be put in their order; or "shown", with the reason why it is not counted.
Nothing in a prediction depends on a row's name.
"""

import csv
from dataclasses import fields, replace
from pathlib import Path
from statistics import correlation, median
from typing import NamedTuple

from picotron_min.extensions.settings import Layout, ModelConfig, Workload
from picotron_min.planner.step_time import Prediction, predict
from picotron_min.planner.system import Setting, System
from picotron_min.planner.uncertainty import interval
from picotron_min.runtime.hardware import GPUS, Gpu


class Run(NamedTuple):
    """A published run and its prediction; speeds are tokens per second and GPU."""

    name: str
    use: str
    measured: float
    predicted: float
    setting: Setting
    prediction: Prediction

    @property
    def interval(self) -> tuple[float, float]:
        return interval(self.predicted, self.prediction, self.setting)

    @property
    def is_within(self) -> bool:
        low, high = self.interval
        return low <= self.measured <= high

    @property
    def kind(self) -> str:
        """A class of runs, which are as difficult to predict."""
        model = "mixtures" if self.setting.model_config.num_local_experts else "dense"
        return f"{model}, {'bf16' if self.setting.system.precision == 'bf16' else '8 bits'}"

    @property
    def error(self) -> float:
        """Of the speed, and so of MFU: +0.1 is a prediction that is 10% too fast."""
        return self.predicted / self.measured - 1


def read_runs(path: Path) -> list[Run]:
    runs = []
    try:
        for row in csv.DictReader(path.read_text(encoding="utf-8").splitlines()):
            measured = float(row["tokens_per_second_per_gpu"])
            prediction = predict(setting := setting_of(row))
            tokens = int(row["global_batch"]) * setting.workload.seq_length / int(row["gpus"])
            speeds = measured, tokens / prediction.step
            runs.append(Run(row["id"], row["use"], *speeds, setting, prediction))
    except (KeyError, ValueError, TypeError, AttributeError, ZeroDivisionError) as error:
        why = f"row {len(runs) + 1} is not a run as in tests/published_runs.csv"
        raise ValueError(f"{path}: {why} ({type(error).__name__}: {error})") from None
    return runs


def setting_of(row: dict[str, str]) -> Setting:
    """The inputs of a prediction from a row; an empty column has its field's default."""
    row = {key: int(text) if text.isdigit() else text for key, text in row.items() if text}
    row["dtype"] = "bfloat16"
    row["num_micro_batches"] = row["global_batch"] // (row["dp"] * row["micro_batch_size"])
    row["repeats"] = float(row["recompute_matmul"]), float(row["recompute_attention"])
    if "network_gbps" in row:  # else the run is inside one node
        row["network"] = 1e9 / 8 * float(row["network_gbps"])
    if "tp_messages" in row:
        row["tp_messages"] = tuple(map(int, row["tp_messages"].split()))
    if row["sharding"] == "hybrid":
        row |= {"sharding": "parameters", "shares_in_node": True}

    def of(kind: type) -> dict[str, object]:
        return {f.name: row[f.name] for f in fields(kind) if f.name in row}

    gpu, kinds = replace(GPUS[row["gpu"]], **of(Gpu)), (ModelConfig, Layout, Workload, System)
    model_config, *others = (kind(**of(kind)) for kind in kinds)
    return Setting(model_config, gpu, *others)


def sweep(runs: list[Run]) -> list[Run]:
    """The runs to be put in order: all of "rank", and counted ones of the same sweep."""
    sweeps = {run.name.split("-mbs")[0] for run in runs if run.use == "rank"}
    return [run for run in runs if run.name.split("-mbs")[0] in sweeps]


def spearman(a: list[float], b: list[float]) -> float:
    """How well two orders agree, from -1 to 1; without ties."""
    return correlation(*([sorted(values).index(value) for value in values] for values in (a, b)))


def report(runs: list[Run]) -> str:
    """The table, and what it comes to."""
    lines = [f"{'run':43}published  predicted   error  (tokens per second and GPU)"]
    for run in runs:
        note = "" if run.use == "counted" else f"  {run.use}"
        note += "" if run.is_within else "  outside of its interval"
        speeds = f"{run.measured:10,.5g} {run.predicted:10,.5g} {run.error:+8.1%}"
        lines.append(f"{run.name:42.42} {speeds}{note}")
    counted = [run for run in runs if run.use == "counted"]
    kinds = sorted({run.kind for run in counted})
    groups = {"counted runs": counted} if counted else {}
    lines.append("")
    for kind in kinds if len(kinds) > 1 else ():
        groups[kind] = [run for run in counted if run.kind == kind]
    for name, some in groups.items():
        sizes = sorted(abs(run.error) for run in some)
        nine_tenths = sizes[-(-9 * len(sizes) // 10) - 1]  # of the runs are not worse
        within = sum(run.is_within for run in some) / len(some)
        width = median(run.interval[1] / run.predicted - 1 for run in some)
        lines.append(
            f"{len(some):>4} {name:16} error of MFU {median(sizes):.1%} in the median, at most"
            f" {nine_tenths:.1%} in nine of ten, {sizes[-1]:.1%} in all;"
            f" {within:.0%} within their intervals (median width {width:.0%})"
        )
    if ranked := sweep(runs):
        speeds = [r.measured for r in ranked], [r.predicted for r in ranked]
        order = spearman(*speeds)
        chosen = max(ranked, key=lambda run: run.predicted)
        reached = chosen.measured / max(run.measured for run in ranked)
        lines.append(
            f"{len(ranked)} layouts of one sweep: Spearman {order:.2f}; the predicted best one"
            f" reached {reached:.1%} of the best measured speed"
        )
    return "\n".join(lines)
