"""How fast and how lean, next to what people would use instead:

    python benchmarks/compare.py            every row: half an hour on two cores
    python benchmarks/compare.py --quick    the same steps, a third of them
    python benchmarks/compare.py --profile one-process    where the time of each contender goes

The contenders of a row train the same model from the same weights on the same tokens. They are
alive in the same processes at the same time and take turns step by step, so that whatever else the
machine does hits all of them alike:

    warm-up: ours theirs    timed: ours theirs  ours theirs  ours theirs  ...
                                   `- ratio -'  `- ratio -'  `- ratio -'

A step starts at a barrier and takes as long as its slowest rank. The result is the median of the
ratios. The first steps of all must give the same losses and gradient norms: a comparison of
different work is worth nothing. Memory is measured with each contender alone in fresh processes,
because the kernel's peak never falls. CPU only, float32, one thread a process.

The rows are in rows.py. A new one is an entry there, and a function for each new contender.
"""

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))  # measure this copy, installed or not

from benchmarks.ours import CPU, Build, Done, Place
from benchmarks.rows import ROWS, SCALING, WORK
from picotron_min.costs import parameter_count
from picotron_min.extensions.schedules.registry import SCHEDULES
from picotron_min.mesh import build_axes
from picotron_min.runtime.config import Config
from picotron_min.runtime.config_checks import resolve_model
from picotron_min.runtime.config_file import parse_config
from picotron_min.runtime.launch import Launch, open_process_group
from picotron_min.runtime.processes import start_processes
from picotron_min.runtime.speed import device_name, memory_gb
from picotron_min.runtime.token_file import TokenFile

CHECKED_STEPS = 3  # before rounding errors have grown: float32 differs after a hundred
TOLERANCE = 1e-4  # relative, between the contenders' losses and gradient norms in those steps


class Effort(NamedTuple):
    warmup: int  # steps of each contender before the clock runs: the first make optimizer state
    rounds: int  # timed steps of each contender
    memory_steps: int  # at least 2, for a backward with the optimizer's state already there


FULL = Effort(warmup=3, rounds=15, memory_steps=3)
QUICK = Effort(warmup=1, rounds=4, memory_steps=2)


@dataclass(frozen=True)
class Result:
    """One contender's numbers."""

    row: str
    contender: str
    step_seconds: list[float]  # in the order of the rounds
    memory_mb: float  # peak of the largest process, above what it held before the model was built
    total_memory_mb: float  # the same with what imports hold
    done: list[Done]  # by all steps, the warm-up included


def main(arguments: list[str] | None = None, work: dict = WORK) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS), metavar="ROW")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers here")
    parser.add_argument("--profile", choices=ROWS, metavar="ROW", help="only profile this row")
    options = parser.parse_args(arguments)
    facts = describe_run(work)
    print("\n".join(f"{name:<13} {value}" for name, value in facts.items()), flush=True)
    if options.profile:
        return profile(options.profile, work)
    measured = []
    for row in options.rows:
        results = measure(row, work, QUICK if options.quick else FULL)
        print(f"\n{row}: {ROWS[row].about}\n{table(results)}", flush=True)
        if ROWS[row].contenders is SCALING:
            print(scaling(results, parse_config(ROWS[row].sections(work))))
        measured += [as_json(results[0], result) for result in results]
    if options.json:
        options.json.write_text(json.dumps(facts | {"results": measured}, indent=2) + "\n")


def describe_run(work: dict) -> dict[str, str]:
    """What one must know to read the numbers."""
    config = parse_config(work)
    t = config.training
    return {
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "cpu": device_name(CPU),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "threads": "1 a process",
        # Ranks wait for the slowest: with more to do than there are cores, times are only noise.
        "load": f"{os.getloadavg()[0]:.1f} before this run, on {os.cpu_count()} cores",
        "model": f"{parameter_count(resolve_model(config)):,} parameters, float32",
        "step": f"{t.gradient_accumulation_steps} micro-batches of {t.micro_batch_size} sequences"
        f" of {t.seq_length} tokens a rank",
    }


def measure(row: str, work: dict, effort: Effort) -> list[Result]:
    """Time all contenders of a row together, then the memory of each alone.

    Raises ValueError if they did not do the same work.
    """
    contenders, results = ROWS[row].contenders, []
    ranks = run_ranks(row, work, partial(take_turns, contenders, effort.warmup, effort.rounds))
    for name in contenders:
        seconds = np.max([rank.seconds[name] for rank in ranks], axis=0).tolist()
        before, peak = measure_memory(row, name, work, effort.memory_steps)
        results.append(Result(row, name, seconds, peak - before, peak, ranks[0].done[name]))
    check_same_work(results)
    return results


def measure_memory(row: str, name: str, work: dict, steps: int) -> tuple[float, float]:
    """MB of a contender before and at the peak, on the rank that has added most."""
    alone = {name: ROWS[row].contenders[name]}
    ranks = run_ranks(row, work, partial(take_turns, alone, steps, 0))
    return max((rank.memory for rank in ranks), key=lambda mb: mb[1] - mb[0])


def run_ranks(row: str, work: dict, function: Callable[[Place], Any]) -> list[Any]:
    """Call function(place) on every rank of fresh processes; returns their results."""
    sections = ROWS[row].sections(work)
    config, results = parse_config(sections), multiprocessing.get_context("fork").SimpleQueue()
    size = 50 * config.tokens_per_step + 1
    tokens = np.random.default_rng(0).integers(resolve_model(config).vocab_size, size=size)
    text = TokenFile(tokens.astype(np.uint16), num_bytes=size, num_documents=1)

    def run_rank(launch: Launch) -> None:
        torch.set_num_threads(1)
        seconds = config.distributed.timeout_seconds
        store = launch.open_store(seconds)
        open_process_group(launch, "gloo", store, timedelta(seconds=seconds))
        place = Place(sections, build_axes(CPU, config.layout), text)
        results.put((launch.rank, function(place)))
        dist.barrier()
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
            dist.barrier()
            began = time.perf_counter()
            done[name].append(step(index))
            seconds[name].append(time.perf_counter() - began)
    timed = {name: of_steps[warmup:] for name, of_steps in seconds.items()}
    return Turns(done, timed, (1000 * before, 1000 * memory_gb(CPU)))


def check_same_work(results: list[Result]) -> None:
    """ValueError if contenders of a row differ in the loss or gradient norm of an early step."""
    ours, *others = results
    for other in others:
        for index in range(CHECKED_STEPS):
            a, b = ours.done[index], other.done[index]
            if not np.allclose(a, b, rtol=TOLERANCE, atol=0):
                both = f"step {index} of {ours.contender} came to {a}, of {other.contender} to {b}"
                why = "they do not do the same work, so their times cannot be compared"
                raise ValueError(f"{ours.row}: {both}: {why}")


def quartiles(values: list[float]) -> tuple[float, float, float]:
    return tuple(statistics.quantiles(values, n=4, method="inclusive"))


def ratios(ours: Result, other: Result) -> tuple[float, float, float]:
    """Quartiles of our time over theirs, pair by pair: below 1 is faster."""
    return quartiles([a / b for a, b in zip(ours.step_seconds, other.step_seconds, strict=True)])


def table(results: list[Result]) -> str:
    """The contenders of a row, ours first; quartiles in brackets."""
    ours = results[0]
    lines = [f"{'':20}{'ms a step':>22}{'ours / theirs':>26}{'MB':>8}{'ours / theirs':>16}"]
    for result in results:
        low, median, high = (1000 * x for x in quartiles(result.step_seconds))
        time_ratio = memory_ratio = ""
        if result is not ours:
            time_ratio = "{1:.3f} ({0:.3f}-{2:.3f})".format(*ratios(ours, result))
            memory_ratio = f"{ours.memory_mb / result.memory_mb:.3f}"
        lines.append(
            f"{result.contender:20}{f'{median:.0f} ({low:.0f}-{high:.0f})':>22}{time_ratio:>26}"
            f"{result.memory_mb:8.0f}{memory_ratio:>16}"
        )
    return "\n".join(lines)


def scaling(results: list[Result], config: Config) -> str:
    """How much of two cores the ranks make, and where the rest is."""
    ours, alone, crowded = results
    d, num_micro_batches = config.distributed, config.training.gradient_accumulation_steps
    busy = 1 - SCHEDULES[d.pp_engine].bubble(d.pp_size, num_micro_batches, d.pp_chunks)
    shared = ratios(alone, crowded)[1]
    reached = 1 / (config.world_size * ratios(ours, alone)[1])
    return (
        f"{reached:.3f} of {config.world_size} times one process. The bubble leaves {busy:.3f}, and"
        f" processes that share nothing but the machine {shared:.3f}: this is"
        f" {reached / busy / shared:.3f} of both"
    )


def as_json(ours: Result, result: Result) -> dict[str, Any]:
    """A contender's numbers, with what the table says of them."""
    ratio = dict(zip(("low", "median", "high"), ratios(ours, result), strict=True))
    seconds, memory = statistics.median(result.step_seconds), ours.memory_mb / result.memory_mb
    more = {"median_seconds": seconds, "time_ratio": ratio, "memory_ratio": memory}
    return asdict(result) | more


def profile(row: str, work: dict) -> None:
    """Print, for each contender alone, the operations of rank 0 that take most time."""
    for name, build in ROWS[row].contenders.items():
        tables = run_ranks(row, work, partial(profile_steps, build))
        print(f"\n{row}, {name}, 2 steps\n{tables[0]}", flush=True)


def profile_steps(build: Build, place: Place) -> str:
    step = build(place)
    step(0)  # makes the optimizer's state
    with torch.profiler.profile() as profiler:
        step(1)
        step(2)
    return profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=25)


if __name__ == "__main__":
    main()
