"""A rank's step of any layout, on this machine: its memory, what it sends and where its host waits.

    python -m picotron_min.dry_run --config config.json --rank 5000 --gpu H100
    python -m picotron_min.dry_run --config config.json --ranks all-kinds

The exit code is 1 if a rank does not fit into its GPU, sends other bytes than planned or waits
where that is not known, or if the messages of the ranks do not fit together.
"""

import argparse
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

from picotron_min.dry_run.messages import kinds_of_ranks, misfit
from picotron_min.dry_run.recorder import Recorder
from picotron_min.dry_run.run import dry_run, shortened
from picotron_min.planner.choices import Request
from picotron_min.planner.memory import LEFT_OUT, gb, memory_of_ranks
from picotron_min.planner.traffic import planned_traffic
from picotron_min.runtime.config import Config
from picotron_min.runtime.config_checks import resolve_model
from picotron_min.runtime.config_file import parse_config
from picotron_min.runtime.hardware import GPUS, Gpu
from picotron_min.runtime.json_file import read_json

TAKEN = "Experts are taken to get equal shares of the tokens, and GPUs to have Hopper's kernels."
KNOWN_WAITS = "train.py", "picotron_min/extensions/experts/"


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code: 0, 1 as above, or 2 for the user's mistakes."""
    parser = argparse.ArgumentParser("python -m picotron_min.dry_run", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--config", type=Path, required=True, metavar="FILE")
    parser.add_argument("--ranks", "--rank", default="all-kinds", metavar="N")
    parser.add_argument("--gpu", choices=GPUS, default="H100", metavar="NAME")
    flags = parser.parse_args(arguments)
    try:
        given = parse_config(read_json(flags.config))
        config = shortened(given)
    except ValueError as error:
        parser.error(str(error))
    ranks = {str(rank): [rank] for rank in range(config.world_size)}
    ranks["all-kinds"] = kinds_of_ranks(config.layout)
    if flags.ranks not in ranks:
        parser.error(f"--rank {flags.ranks}: there are 0 to {config.world_size - 1}, and all-kinds")
    messages, problems = {}, 0
    for rank in ranks[flags.ranks]:
        run = dry_run(config, rank)
        for line in lines_of(config, rank, run, GPUS[flags.gpu]):
            print(line)
            problems += "PROBLEM" in line
        messages[rank] = run.messages
    print(f"Not counted: {LEFT_OUT['cuda']}.\n{TAKEN}")
    if config != given:
        print("Fewer micro-batches are run than given: more repeat them. What is sent is theirs.")
    if why := misfit(messages):
        print(f"PROBLEM: these messages do not fit together:\n{why}")
    elif len(messages) > 1:
        print(f"The messages of these {len(messages)} ranks fit together.")
    return 1 if problems or why else 0


def lines_of(config: Config, rank: int, run: Recorder, gpu: Gpu) -> Iterator[str]:
    """What is printed of a rank's step; what is wrong with it is a PROBLEM."""
    sizes = resolve_model(config), config.layout, config.workload
    place = config.layout.coordinates(rank)
    at = ", ".join(f"{axis} {number}" for axis, number in place._asdict().items())
    number = config.workload.num_micro_batches
    yield f"rank {rank} of {config.world_size}: {at}, micro-batches {number}"
    planned = memory_of_ranks(*sizes)[place.pp].total
    off = f"{run.peak / planned - 1:+.1%}"
    yield f"  memory  {gb(run.peak)} at the fullest; planned {gb(planned)} ({off})"
    yield from (f"{gb(n):>17}  {line}" for line, n in run.at_peak.most_common(3))
    request = Request(sizes[0], gpu, config.world_size, sizes[2], config.global_batch)
    room = f"the {gb(gpu.memory)} of {gpu.name}, of which a plan may use {gb(request.budget)}"
    fits = "fits into" if run.peak <= gpu.memory else "PROBLEM: it does not fit into"
    yield f"  {fits} {room}"
    yield "  sends   " + (", ".join(f"{axis} {gb(n)}" for axis, n in run.sent.items()) or "nothing")
    if run.sent != (planned_bytes := planned_traffic(*sizes, rank)):
        yield f"  PROBLEM: {run.sent} bytes, but planned are {planned_bytes}"
    launches, moved = sum(run.launches.values()), sum(run.moved.values())
    yield f"  moves   {gb(moved)} in {launches} operations"
    yield "  waits   " + ", ".join(f"{n} at {line}" for line, n in run.waits.items())
    if unknown := [line for line in run.waits if not line.startswith(KNOWN_WAITS)]:
        yield f"  PROBLEM: it waits where that is not known: {', '.join(unknown)}"


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` has read enough: end in silence
    sys.exit(main())
