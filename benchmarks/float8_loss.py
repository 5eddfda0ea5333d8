"""What training in FP8 costs in loss: pairs of runs that differ in `model.fp8` alone.

    python benchmarks/float8_loss.py                  at least 8 seeds, until the error is small
    python benchmarks/float8_loss.py --seeds 8

Both runs of a pair have the same weights at the start and the same batches. What differs in the end
is what rounding costs, and chance, since two runs part ways after the smallest difference: so many
pairs are needed. The gap is that of the mean loss of the last quarter of the steps, relative to the
run without FP8.

One process on a CPU, bfloat16, on the source code of Python's standard library.
"""

import argparse
import math
import statistics
import time
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from picotron_min.initialise import initialise
from picotron_min.mesh import Axes, build_axes
from picotron_min.parallelize import parallelize
from picotron_min.runtime.config import Config
from picotron_min.runtime.config_checks import resolve_model
from picotron_min.runtime.config_file import parse_config
from picotron_min.runtime.inputs import open_data
from picotron_min.runtime.launch import Launch, open_process_group
from picotron_min.runtime.processes import start_processes
from picotron_min.runtime.token_file import TokenFile, open_text
from train import build_run, train_step

CPU = torch.device("cpu")
MODEL = {"name": "tiny", "hidden_size": 64, "intermediate_size": 192, "dtype": "bfloat16"}
TRAINING = {
    "seq_length": 64,
    "micro_batch_size": 8,
    "learning_rate": 1e-3,  # at a higher one, chance is far larger than the gap
    "min_learning_rate": 1e-4,
    "schedule": "cosine",
    "warmup_steps": 15,
    "eval_batches": 0,
}
ENOUGH = 0.002  # the standard error of the mean gap


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, help="so many, whatever the error")
    parser.add_argument("--steps", type=int, default=150)
    options = parser.parse_args(arguments)
    start_processes(partial(run, options), 1)


def run(options: argparse.Namespace, launch: Launch) -> None:
    torch.set_num_threads(1)
    seconds = timedelta(seconds=60)
    open_process_group(launch, "gloo", CPU, launch.open_store(60.0), seconds)
    first = config_of(options.steps, seed=0)
    axes, text = build_axes(CPU, first.layout), open_text(first, resolve_model(first))
    gaps, losses, began = [], [], time.process_time()
    while not is_enough(gaps, options.seeds):
        seed, loss = len(gaps), partial(final_loss, axes=axes, text=text)
        plain, fp8 = (loss(config_of(options.steps, seed, fp8)) for fp8 in (False, True))
        losses.append(plain)
        gaps.append(fp8 / plain - 1)
        print(f"seed {seed:2}  loss {plain:.4f}  with FP8 {gaps[-1]:+.2%}", flush=True)
    print(f"\n{len(gaps)} seeds, {options.steps} steps, {time.process_time() - began:.0f} CPU s")
    print(f"loss without FP8   {described(losses, '.4f')}")
    print(f"gap with FP8       {described(gaps, '+.2%')}")
    dist.destroy_process_group()


def config_of(steps: int, seed: int, fp8: bool = False) -> Config:
    training = TRAINING | {"seed": seed, "total_train_steps": steps}
    distributed, model = {"use_cpu": True}, MODEL | {"fp8": fp8}
    return parse_config({"distributed": distributed, "model": model, "training": training})


def is_enough(gaps: list[float], seeds: int | None) -> bool:
    return len(gaps) == seeds if seeds else len(gaps) >= 8 and error(gaps) < ENOUGH


def error(values: list[float]) -> float:
    """The standard error of their mean."""
    return statistics.stdev(values) / math.sqrt(len(values))


def described(values: list[float], form: str) -> str:
    mean, each = statistics.fmean(values), statistics.stdev(values)
    form_of_errors = form.lstrip("+")
    return f"{mean:{form}} ± {error(values):{form_of_errors}}, each {each:{form_of_errors}}"


def final_loss(config: Config, axes: Axes, text: TokenFile) -> float:
    """The mean loss of the last quarter of a run."""
    model_config = resolve_model(config)
    model = parallelize(model_config, config.layout, config.workload, axes, CPU)
    initialise(model.parameters, model_config, config.training.seed, model.placements, axes)
    model.weights_changed()
    run = build_run(model, config.recipe, open_data(config, text, dp_rank=0))
    steps = config.training.total_train_steps
    losses = [train_step(run, step).loss for step in range(steps)]
    return statistics.fmean(losses[-(steps // 4) :])


if __name__ == "__main__":
    main()
