"""How fast and how lean, next to what people would use instead:

    python benchmarks/compare.py                         every row
    python benchmarks/compare.py --rows dp2 tp2 --rounds 4
    python benchmarks/compare.py --rows dp2 --profile    where the time of each contender goes

The contenders of a row train the same model from the same weights on the same tokens. They are
alive in the same processes at the same time and take turns step by step, so that whatever else the
machine does hits all of them alike:

    warm-up: ours theirs bound    timed: ours theirs bound  ours theirs bound  ...
                                         `- ratio -'        `- ratio -'

A step starts at a barrier and takes as long as its slowest rank. The result is the median of the
ratios. The first steps of all must give the same losses and gradient norms: a comparison of
different work is worth nothing. Memory is measured with each contender alone in fresh processes,
because the kernel's peak never falls. CPU only, float32, one thread a process. The bound does what
our step cannot do without, and nothing else (ours.py): its share is the last line of a row.
"""

import json
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

from benchmarks.common import Done, check_same_work, facts, profile
from benchmarks.ours import CPU, Build, Place, bound
from benchmarks.rows import ROWS, WORK, Row
from picotron_min.costs import parameter_count
from picotron_min.extensions.schedules.registry import SCHEDULES
from picotron_min.mesh import build_axes
from picotron_min.runtime.config_checks import resolve_model
from picotron_min.runtime.config_file import parse_config
from picotron_min.runtime.launch import Launch, open_process_group, set_environment
from picotron_min.runtime.processes import start_processes
from picotron_min.runtime.speed import memory_gb
from picotron_min.runtime.token_file import TokenFile

WARMUP = 3  # steps of each contender before the clock runs: the first make optimizer state
MEMORY_STEPS = 2  # the second one's backward has the optimizer's state beside it
TOLERANCE = Done(1e-4, 1e-4)  # relative, between losses and between gradient norms
RATIO = "{1:.3f} ({0:.3f}-{2:.3f})"  # quartiles, the median first


class Result(NamedTuple):
    """One contender's numbers."""

    row: str
    contender: str
    step_seconds: list[float]  # in the order of the rounds
    memory_mb: float  # peak of the largest process, above what it held before the model was built
    done: list[Done]  # by all steps, the warm-up included


def main(arguments: list[str] | None = None, work: dict = WORK) -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", metavar="ROW", help="only these")
    parser.add_argument("--rounds", type=int, default=15, help="timed steps of each contender")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers here")
    parser.add_argument("--profile", action="store_true", help="only profile the rows")
    options = parser.parse_args(arguments)
    if unknown := set(options.rows or ()).difference(ROWS):
        parser.error(f"no row {', '.join(sorted(unknown))}: choose of {', '.join(ROWS)}")
    set_environment()
    known = facts_of(work)
    print("\n".join(f"{name:<13} {value}" for name, value in known.items()), flush=True)
    measured = []
    for name in options.rows or ROWS:
        row = ROWS[name]
        if options.profile:
            for who, build in row.contenders.items():
                shown = run_ranks(row, work, lambda place, build=build: profile(build(place)))
                print(f"\n{name}, {who}, rank 0, 2 steps\n{shown[0]}", flush=True)
            continue
        results, limit = measure(name, row, work, options.rounds)
        share = RATIO.format(*ratios(limit, results[0]))
        shown = f"{table(results)}\n{share} of {results[0].contender} is its bound"
        print(f"\n{name}: {row.about}\n{shown}", flush=True)
        everybody = *results, limit
        measured += [r._asdict() | {"time_ratio": ratios(results[0], r)} for r in everybody]
    if options.json:
        options.json.write_text(json.dumps(known | {"results": measured}, indent=2) + "\n")


def facts_of(work: dict) -> dict[str, str]:
    t = (config := parse_config(work)).training
    return facts(CPU) | {
        "load": f"{os.getloadavg()[0]:.1f} before this run, on {os.cpu_count()} cores",
        "model": f"{parameter_count(resolve_model(config)):,} parameters, float32",
        "step": f"{t.gradient_accumulation_steps} micro-batches of {t.micro_batch_size} sequences"
        f" of {t.seq_length} tokens a rank",
    }


def measure(name: str, row: Row, work: dict, rounds: int) -> tuple[list[Result], Result]:
    """Time all contenders of a row and the bound of the first together, the memory of each alone.

    Raises ValueError if they did not do the same work.
    """
    contenders, config = row.contenders, parse_config(row.sections(work))
    timed = contenders | {"bound": partial(bound, of=next(iter(contenders.values())))}
    ranks = run_ranks(row, work, partial(take_turns, timed, WARMUP, rounds))
    seconds = {name: np.max([rank.seconds[name] for rank in ranks], axis=0) for name in timed}
    results = []
    for who in contenders:
        memory = measure_memory(row, who, work)
        results.append(Result(name, who, seconds[who].tolist(), memory, ranks[0].done[who]))
    check_same_work({r.contender: r.done for r in results}, TOLERANCE)
    d, count = config.distributed, config.training.gradient_accumulation_steps
    busy = 1 - SCHEDULES[d.pp_engine].bubble(d.pp_size, count, d.pp_chunks)
    return results, Result(name, "bound", (seconds["bound"] / busy).tolist(), 0, [])


def measure_memory(row: Row, who: str, work: dict) -> float:
    """MB that a contender adds at its peak, on the rank that adds most."""
    alone = {who: row.contenders[who]}
    ranks = run_ranks(row, work, partial(take_turns, alone, MEMORY_STEPS, 0))
    return max(peak - before for before, peak in (rank.memory for rank in ranks))


def run_ranks(row: Row, work: dict, function: Callable[[Place], Any]) -> list[Any]:
    """Call function(place) on every rank of fresh processes; returns their results."""
    sections = row.sections(work)
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


def quartiles(values: list[float]) -> tuple[float, float, float]:
    return tuple(np.quantile(values, [0.25, 0.5, 0.75]).tolist())


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
            time_ratio = RATIO.format(*ratios(ours, result))
            memory_ratio = f"{ours.memory_mb / result.memory_mb:.3f}"
        lines.append(
            f"{result.contender:20}{f'{median:.0f} ({low:.0f}-{high:.0f})':>22}{time_ratio:>26}"
            f"{result.memory_mb:8.0f}{memory_ratio:>16}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
