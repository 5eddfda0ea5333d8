"""How fast and how lean, next to what people would use instead, and how far from the machine:

    python benchmarks/compare.py                         every row
    python benchmarks/compare.py --rows dp2 tp2 --rounds 4

The contenders of a row train the same model from the same weights on the same tokens. They are
alive in the same processes at the same time and take turns step by step, so that whatever else the
machine does hits all of them alike:

    warm-up: ours theirs bound    timed: ours theirs bound  ours theirs bound  ...
                                         `- ratio -'        `- ratio -'

A step starts at a barrier and takes as long as its slowest rank. The result is the median of the
ratios. The first steps must give the same losses and gradient norms: a comparison of different
work is worth nothing. Memory is measured with each contender alone in fresh processes, because the
kernel's peak never falls. CPU only, float32, one thread a process. The bound does the products of
our step, and nothing else (products.py): its share is the last line of a row.
"""

import multiprocessing
import os
import sys
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))  # measure this copy, installed or not

from benchmarks import peers
from benchmarks.common import Done, check_same_work, facts
from benchmarks.ours import CPU, Build, Place, bound, picotron_min
from picotron_min.costs import parameter_count
from picotron_min.mesh import build_axes
from picotron_min.runtime.config_checks import resolve_model
from picotron_min.runtime.config_file import parse_config
from picotron_min.runtime.launch import Launch, open_process_group, set_environment
from picotron_min.runtime.processes import start_processes
from picotron_min.runtime.speed import memory_gb
from picotron_min.runtime.token_file import TokenFile

# The step of all rows. About 8M parameters.
MODEL = {"name": "tiny", "vocab_size": 4096, "hidden_size": 256, "intermediate_size": 688}
MODEL |= {"num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 4}
STEP = {"seq_length": 256, "micro_batch_size": 4, "gradient_accumulation_steps": 4}
WORK = {"model": MODEL, "training": STEP | {"learning_rate": 1e-3, "eval_batches": 0}}


class Row(NamedTuple):
    peer: str
    build: Build
    distributed: dict[str, Any]

    def sections(self, work: dict[str, dict]) -> dict[str, dict]:
        """A config.json, for a CPU."""
        return work | {"distributed": self.distributed | {"use_cpu": True, "backend": "gloo"}}


# A new row is an entry here, and a function in peers.py.
ONE_F_ONE_B = {"pp_size": 2, "pp_engine": "1f1b"}
ZERO_3 = {"dp_size": 2, "sharding": "parameters"}
ROWS = {
    "one-process": Row("transformers", peers.transformers_model, {}),
    "dp2": Row("DDP", peers.torch_ddp, {"dp_size": 2}),
    "tp2": Row("parallelize_module", peers.torch_tensor_parallel, {"tp_size": 2}),
    "pp2-1f1b": Row("Schedule1F1B", peers.torch_pipeline, ONE_F_ONE_B),
    "sharding-parameters": Row("FSDP2", peers.torch_fsdp, ZERO_3),
}
OURS, BOUND = "picotron-min", "bound"
WARMUP = 3  # steps of each contender before the clock runs: the first make optimizer state
MEMORY_STEPS = 2  # the second one's backward has the optimizer's state beside it
TOLERANCE = Done(1e-4, 1e-4)  # relative, between losses and between gradient norms


def main(arguments: list[str] | None = None, work: dict = WORK) -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=[*ROWS], metavar="ROW")
    parser.add_argument("--rounds", type=int, default=15, help="timed steps of each contender")
    options = parser.parse_args(arguments)
    set_environment()
    print("\n".join(f"{name:<13} {value}" for name, value in facts_of(work).items()), flush=True)
    for name in options.rows:
        result = measure(ROWS[name], work, options.rounds)
        print(f"\n{name}\n{table(result)}", flush=True)


def facts_of(work: dict) -> dict[str, str]:
    t = (config := parse_config(work)).training
    return facts(CPU) | {
        "load": f"{os.getloadavg()[0]:.1f} before this run, on {os.cpu_count()} cores",
        "model": f"{parameter_count(resolve_model(config)):,} parameters, float32",
        "step": f"{t.gradient_accumulation_steps} micro-batches of {t.micro_batch_size} sequences"
        f" of {t.seq_length} tokens a rank",
    }


class Result(NamedTuple):
    """A row's numbers, by contender."""

    seconds: dict[str, np.ndarray]  # of the steps of the slowest rank, in the order of the rounds
    memory: dict[str, float]  # MB at the peak of the largest process, above what it held before


def measure(row: Row, work: dict, rounds: int) -> Result:
    """ValueError if ours and the peer did not do the same work."""
    contenders = {OURS: picotron_min, row.peer: row.build}
    timed = contenders | {BOUND: bound}
    ranks = run_ranks(row, work, partial(take_turns, timed, WARMUP, rounds))
    check_same_work({who: ranks[0].done[who] for who in contenders}, TOLERANCE)
    seconds = {who: np.max([rank.seconds[who] for rank in ranks], axis=0) for who in timed}
    # The bound waits in the pipeline's bubble, as our step does.
    config = parse_config(row.sections(work))
    layout, count = config.layout, config.training.gradient_accumulation_steps
    seconds[BOUND] /= 1 - layout.schedule.bubble(layout.pp, count, layout.pp_chunks)
    memory = {who: measure_memory(row, {who: build}, work) for who, build in contenders.items()}
    return Result(seconds, memory)


def measure_memory(row: Row, alone: dict[str, Build], work: dict) -> float:
    """MB that a contender adds at its peak, on the rank that adds most."""
    ranks = run_ranks(row, work, partial(take_turns, alone, MEMORY_STEPS, 0))
    return max(peak - before for before, peak in (rank.memory for rank in ranks))


def run_ranks(row: Row, work: dict, function: Callable[[Place], Any]) -> list[Any]:
    """Call function(place) on every rank of fresh processes; returns their results."""
    sections = row.sections(work)
    config, results = parse_config(sections), multiprocessing.get_context("fork").SimpleQueue()
    # Random tokens: what a step costs does not depend on the text.
    size = 50 * config.tokens_per_step + 1
    tokens = np.random.default_rng(0).integers(resolve_model(config).vocab_size, size=size)
    text = TokenFile(tokens.astype(np.uint16), num_bytes=size, num_documents=1)

    def run_rank(launch: Launch) -> None:
        torch.set_num_threads(1)  # or the ranks would compete for the cores
        seconds = config.distributed.timeout_seconds
        store = launch.open_store(seconds)
        open_process_group(launch, "gloo", store, timedelta(seconds=seconds))
        place = Place(sections, build_axes(CPU, config.layout), text)
        results.put((launch.rank, function(place)))
        dist.barrier()  # a rank that leaves early would break messages of the others
        dist.destroy_process_group()

    start_processes(run_rank, config.world_size)
    return [result for _, result in sorted(results.get() for _ in range(config.world_size))]


class Turns(NamedTuple):
    """What contenders did on one rank, by their names."""

    done: dict[str, list[Done]]  # by all steps
    seconds: dict[str, list[float]]  # of the timed ones
    memory: tuple[float, float]  # resident MB before they were built, and at the worst moment


def take_turns(contenders: dict[str, Build], warmup: int, rounds: int, place: Place) -> Turns:
    """Build contenders, and let them step in turn."""
    before = memory_gb(CPU)
    steps = {name: build(place) for name, build in contenders.items()}
    done, seconds = {name: [] for name in steps}, {name: [] for name in steps}
    for index in range(warmup + rounds):
        for name, step in steps.items():
            dist.barrier()  # so that nobody's step begins with waiting
            began = time.perf_counter()
            done[name].append(step(index))
            seconds[name].append(time.perf_counter() - began)
    timed = {name: of_steps[warmup:] for name, of_steps in seconds.items()}
    return Turns(done, timed, (1000 * before, 1000 * memory_gb(CPU)))


def table(result: Result) -> str:
    """A line for each contender, ours first, with the ratios of neighbours; then the bound."""
    seconds, memory = result
    lines = [f"{'':20}{'ms a step':>12}{'ours / theirs':>24}{'MB':>8}{'ours / theirs':>16}"]
    for who, megabytes in memory.items():
        ratio = f"{ratios(seconds[OURS], seconds[who]):>24}" if who != OURS else ""
        more = f"{memory[OURS] / megabytes:16.3f}" if who != OURS else ""
        lines.append(
            f"{who:20}{1000 * np.median(seconds[who]):12.0f}{ratio:24}{megabytes:8.0f}{more}"
        )
    return "\n".join([*lines, f"{ratios(seconds[BOUND], seconds[OURS])} of it is its bound"])


def ratios(these: np.ndarray, those: np.ndarray) -> str:
    """The median and quartiles, pair by pair, so that a slow phase of the machine cancels."""
    low, median, high = np.quantile(these / those, [0.25, 0.5, 0.75])
    return f"{median:.3f} ({low:.3f}-{high:.3f})"


if __name__ == "__main__":
    main()
