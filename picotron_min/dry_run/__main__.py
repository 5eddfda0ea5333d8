"""A rank's step of any layout, on this machine: its memory, what it sends and where its host waits.

    python -m picotron_min.dry_run --config config.json --rank 5000 --gpu H100
    python -m picotron_min.dry_run --config config.json --all-kinds

The exit code is 1 if a rank does not fit into its GPU, sends other bytes than planned or waits
where that is not known, or if the messages of the ranks do not fit together.
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from picotron_min.dry_run.fit import kinds_of_ranks, misfit
from picotron_min.dry_run.run import DryRun, dry_run
from picotron_min.extensions.settings import Layout, ModelConfig, Workload
from picotron_min.planner.memory import gb, memory_of_ranks
from picotron_min.planner.traffic import by_axis, planned_traffic
from picotron_min.runtime.config import Config
from picotron_min.runtime.config_checks import resolve_model
from picotron_min.runtime.config_file import parse_config
from picotron_min.runtime.hardware import GPUS, Gpu
from picotron_min.runtime.json_file import read_json

NOT_COUNTED = """\
Not counted: CUDA's context, NCCL's buffers, workspaces of kernels, gaps between tensors.
Experts are taken to get equal shares of the tokens."""
KNOWN_WAITS = "train.py", "picotron_min/extensions/experts/"
OLDER = {("A100", "RTX-3090"): (8, 0), ("L4", "RTX-4090"): (8, 9)}  # their compute capability


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code: 0, 1 as above, or 2 for the user's mistakes."""
    parser = argparse.ArgumentParser(prog="python -m picotron_min.dry_run", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--config", type=Path, required=True, metavar="FILE")
    parser.add_argument("--rank", type=int, metavar="N", help="default: the last one")
    parser.add_argument("--all-kinds", action="store_true", help="a rank of each kind instead")
    parser.add_argument("--gpu", choices=GPUS, default="H100", metavar="NAME")
    parser.add_argument("--explain", action="store_true", help="the lines that fill the memory")
    flags = parser.parse_args(arguments)
    try:
        config = parse_config(read_json(flags.config))
        ranks = ranks_asked_for(flags, config)
    except ValueError as error:
        parser.error(str(error))
    runs, problems = {}, []
    for rank in ranks:
        run = dry_run(config, rank, capability_of(flags.gpu))
        found = list(problems_of(config, run, GPUS[flags.gpu]))
        print(*lines_of(config, run), *(f"  PROBLEM {problem}" for problem in found), sep="\n")
        for line, number in run.at_peak.most_common(12 * flags.explain):
            print(f"    {gb(number):>10}  {line}")
        runs[rank], problems = run.messages, problems + found
    print(NOT_COUNTED)
    if why := misfit(runs):
        print(f"PROBLEM these messages do not fit together:\n{why}")
    elif len(runs) > 1:
        print(f"The messages of these {len(runs)} ranks fit together.")
    return 1 if problems or why else 0


def ranks_asked_for(flags: argparse.Namespace, config: Config) -> list[int]:
    last = config.world_size - 1
    if flags.all_kinds:
        return kinds_of_ranks(config.layout)
    if flags.rank is not None and not 0 <= flags.rank <= last:
        raise ValueError(f"--rank {flags.rank}: this config has ranks 0 to {last}")
    return [last if flags.rank is None else flags.rank]


def capability_of(gpu: str) -> tuple[int, int]:
    return next((of for names, of in OLDER.items() if gpu.startswith(names)), (9, 0))


def lines_of(config: Config, run: DryRun) -> Iterator[str]:
    place = config.layout.coordinates(run.rank)
    planned = memory_of_ranks(*sizes_of(config))[place.pp].total
    at = ", ".join(f"{axis} {number}" for axis, number in place._asdict().items())
    yield f"rank {run.rank} of {config.world_size}: {at}"
    off = f"{run.peak / planned - 1:+.1%}"
    yield f"  memory  {gb(run.peak)} at the fullest; planned {gb(planned)} ({off})"
    sent = ", ".join(f"{axis} {gb(number)}" for axis, number in by_axis(run.sent).items())
    yield f"  sends   {sent}, in {len(run.messages)} messages" if sent else "  sends   nothing"
    yield "  waits   " + ", ".join(f"{n} at {line}" for line, n in run.waits.items())


def problems_of(config: Config, run: DryRun, gpu: Gpu) -> Iterator[str]:
    if run.peak > gpu.memory:
        yield f"does not fit into the {gb(gpu.memory)} of {gpu.name}"
    sent = {axis: round(number) for axis, number in by_axis(run.sent).items()}
    if sent != (planned := planned_traffic(*sizes_of(config), run.rank)):
        yield f"sends other bytes than planned: {sent}, not {planned}"
    if unknown := [line for line in run.waits if not line.startswith(KNOWN_WAITS)]:
        yield f"waits where that is not known: {', '.join(unknown)}"


def sizes_of(config: Config) -> tuple[ModelConfig, Layout, Workload]:
    return resolve_model(config), config.layout, config.workload


if __name__ == "__main__":
    sys.exit(main())
