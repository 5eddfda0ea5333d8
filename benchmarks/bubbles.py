"""How large the bubble of each pipeline schedule is, on paper and measured:

    python benchmarks/bubbles.py                                  2 processes, 8 micro-batches
    python benchmarks/bubbles.py --ranks 4 --micro_batches 16     for at least 4 cores
    python benchmarks/bubbles.py --hidden_size 512                messages are a smaller part

The engines train the same model, in the same processes, and take turns step by step, so that
whatever else the machine does hits all of them alike. A rank is in the bubble while it runs no F, B
or W; its share of the step is the mean over the ranks. Three of them, each the median over steps:

    textbook   F, B and W take equally long, messages no time
    planned    the same plan with the mean times of F, B and W of the step; all ranks equally fast
    measured   the step itself: messages, unequal stages and other work on the machine add to it

CPU only, float32, one thread a process. A small vocabulary, since lm_head belongs to one stage.
"""

import argparse
import contextlib
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from picotron_min.extensions.schedules.registry import SCHEDULES
from picotron_min.extensions.schedules.simulator import Span, Timeline, simulate
from picotron_min.initialise import initialise
from picotron_min.mesh import Axes, build_axes
from picotron_min.parallelize import parallelize
from picotron_min.pipeline_schedule import Action
from picotron_min.runtime.config import Config
from picotron_min.runtime.config_checks import resolve_model
from picotron_min.runtime.config_file import parse_config
from picotron_min.runtime.draw import mean_times
from picotron_min.runtime.inputs import open_data
from picotron_min.runtime.launch import Launch, open_process_group
from picotron_min.runtime.processes import start_processes
from picotron_min.runtime.token_file import TokenFile
from train import build_run, train_step

CPU = torch.device("cpu")
ENGINES = ("1f1b", "interleaved", "zb_h1", "zb_v")
WARM_UP = 2  # steps
MODEL = {  # about 6M parameters
    "name": "tiny",
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
TRAINING = {"seq_length": 128, "micro_batch_size": 2, "learning_rate": 1e-3, "eval_batches": 0}


def main(arguments: list[str] | None = None, model: dict = MODEL, training: dict = TRAINING):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--micro_batches", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=15, help="timed steps of each engine")
    parser.add_argument("--hidden_size", type=int, default=model["hidden_size"])
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers here")
    options = parser.parse_args(arguments)
    times = options.hidden_size / model["hidden_size"]
    wide = model.keys() & {"hidden_size", "intermediate_size"}
    model = model | {name: round(times * model[name]) for name in wide}
    work = model, training | {"gradient_accumulation_steps": options.micro_batches}
    configs = {engine: config_of(engine, options.ranks, *work) for engine in ENGINES}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "rows.json")
        start_processes(partial(run_rank, configs, options.rounds, file), options.ranks)
        rows = json.loads(file.read_text())
    load = f"load {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores, torch {torch.__version__}"
    print(f"{options.ranks} ranks, {options.micro_batches} micro-batches; {load}\n")
    print(f"{'':14}{'ms a step':>10}{'/ 1f1b':>8}{'textbook':>11}{'planned':>9}{'measured':>10}")
    for row in rows:
        ratio = statistics.median(np.divide(row["ms"], rows[0]["ms"]))
        print(
            f"{row['engine']:14}{statistics.median(row['ms']):10.0f}{ratio:8.3f}"
            f"{row['textbook']:11.1%}{row['planned']:9.1%}{statistics.median(row['measured']):10.1%}"
        )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")


def config_of(engine: str, ranks: int, model: dict, training: dict) -> Config:
    chunks = SCHEDULES[engine].chunks
    distributed = {"pp_size": ranks, "pp_engine": engine, "pp_chunks": chunks, "use_cpu": True}
    stages = ranks * chunks  # all equal: the bubble is to be that of the schedule
    distributed["pp_layers"] = [model["num_hidden_layers"] // stages] * stages
    return parse_config({"distributed": distributed, "model": model, "training": training})


def run_rank(configs: dict[str, Config], rounds: int, file: Path, launch: Launch) -> None:
    """Let the engines step in turn; rank 0 writes a row for each of them."""
    torch.set_num_threads(1)
    first, store = next(iter(configs.values())), launch.open_store(60.0)
    open_process_group(launch, "gloo", CPU, store, timedelta(seconds=60))
    axes = build_axes(CPU, first.layout)  # the sizes are those of all engines
    steps = {engine: build(config, axes) for engine, config in configs.items()}
    timelines = {engine: [] for engine in configs}
    for index in range(WARM_UP + rounds):
        for engine, step in steps.items():
            dist.barrier()
            spans, gathered = step(index), [None] * launch.world_size
            dist.all_gather_object(gathered, spans)
            if index >= WARM_UP:
                of_all = [span for spans in gathered for span in spans]
                timelines[engine].append(Timeline(launch.world_size, of_all))
    if launch.rank == 0:
        rows = [row_of(engine, configs[engine], steps) for engine, steps in timelines.items()]
        file.write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def build(config: Config, axes: Axes) -> Callable[[int], list[Span]]:
    """The step of an engine: it returns what this rank computed when."""
    model_config, num_tokens = resolve_model(config), 20 * config.tokens_per_step
    tokens = np.random.default_rng(0).integers(model_config.vocab_size, size=num_tokens + 1)
    text = TokenFile(tokens.astype(np.uint16), num_bytes=num_tokens, num_documents=1)
    model = parallelize(model_config, config.layout, config.workload, axes, CPU)
    initialise(model.parameters, model_config, config.training.seed, model.placements, axes)
    model.weights_changed()
    run = build_run(model, config.recipe, open_data(config, text, dp_rank=0))

    def step(index: int) -> list[Span]:
        spans = []

        @contextlib.contextmanager
        def watch(action: Action) -> Iterator[None]:
            began = time.perf_counter()  # the same clock in all processes of a machine
            yield
            spans.append(Span(axes.pp.rank, action, began, time.perf_counter()))

        train_step(run, index, watch)
        return spans

    return step


def row_of(engine: str, config: Config, steps: list[Timeline]) -> dict:
    schedule, d = SCHEDULES[engine], config.distributed
    sizes = d.pp_size, config.training.gradient_accumulation_steps, d.pp_chunks
    plans = [schedule.plan(rank, *sizes) for rank in range(d.pp_size)]
    planned = [
        simulate(plans, mean_times(step, same=1), place=schedule.place).bubble(0) for step in steps
    ]
    measured = [statistics.fmean(step.bubble(rank) for rank in range(d.pp_size)) for step in steps]
    return {
        "engine": engine,
        "ms": [1000 * step.makespan for step in steps],
        "textbook": schedule.bubble(*sizes),
        "planned": statistics.median(planned),
        "measured": measured,
    }


if __name__ == "__main__":
    main()
