"""`python -m picotron_min.planner`: which layouts of a model on these GPUs fit, and how fast.

--model Llama-3.1-8B --gpu H100 --gpus 64 --seq_length 8192 --global_batch 512
                                      the best layouts; --write FILE makes the first a config
--config FILE --gpu H100              what is predicted for a config, without a search
--config FILE --metrics FILE          predicted beside measured
--calibrate CONFIG METRICS ...        what your machine reaches, from runs on it
--validate tests/published_runs.csv   the time model beside published runs
"""

import argparse
import json
import math
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

from picotron_min.planner import calibrate, config_files, machine, show, validate
from picotron_min.planner.choices import CHOICES, Request
from picotron_min.planner.measured import Measured, check_axes, read_metrics
from picotron_min.planner.remedy import nothing_fits
from picotron_min.planner.search import Candidate, search
from picotron_min.planner.traffic import planned_traffic
from picotron_min.runtime.config import ConfigError
from picotron_min.runtime.hardware import GPUS


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code: 0 done, 2 the user's mistakes, or nothing fits."""
    parser = build_parser()
    flags = parser.parse_args(arguments)
    try:
        check_used(parser, flags)
        run(flags)
    except (ConfigError, ValueError, OSError) as error:
        problems = error.problems if isinstance(error, ConfigError) else [error]
        if isinstance(error, OSError) and error.filename:
            problems = [f"{error.filename}: {error.strerror}: name another file"]
        for problem in problems:
            print(f"error: {problem}", file=sys.stderr)
        return 2
    return 0


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m picotron_min.planner",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--model", metavar="NAME", help="a preset, or a folder in Hugging Face form")
    add("--gpu", metavar="NAME", help=f"{', '.join(GPUS)}, or cpu; default: H100")
    add("--gpus", type=positive, metavar="N", help="how many")
    add("--seq_length", type=positive, metavar="N", help="tokens")
    add("--global_batch", type=batch, metavar="N", help="sequences a step")
    add("--dtype", choices=["bfloat16", "float32", "float64"], help="default: bfloat16 on GPUs")
    add("--optimizer", choices=["adamw", "muon", "sgd"], default="adamw")
    add("--compile", action="store_true", help="with model.compile")
    add("--gpus_per_node", type=positive, metavar="N", help="default: 8")
    about = "Gb/s of a GPU to other nodes, default: 400"
    add("--network", type=above_zero, metavar="GBIT", help=about)
    add("--cores", type=positive, metavar="N", help="of a CPU, which its ranks share")
    add("--fill", type=share, default=0.92, help="share of the memory that may be planned")
    add("--max_tp", type=positive, metavar="N", help="default: GPUs of a node")
    add("--fix", default="", metavar="tp=4,...", help=f"choices to keep: {', '.join(CHOICES)}")
    add("--top", type=positive, default=10, metavar="N", help="layouts in the table")
    about = "what --calibrate has found, default: hardware.json"
    add("--hardware", type=Path, metavar="FILE", help=about)
    add("--write", type=Path, metavar="FILE", help="write the best layout's config.json")
    add("--config", type=Path, metavar="FILE", help="predict this one")
    add("--metrics", type=Path, metavar="FILE", help="and show what a run of it measured")
    add("--calibrate", type=Path, nargs="+", metavar="FILE", help="configs, each with its metrics")
    add("--validate", type=Path, metavar="FILE", help="published runs")
    add("--json", action="store_true", help="print numbers, not text")
    return parser


def number(kind: type, what: str, most: float = math.inf, why: str = "") -> Callable[[str], float]:
    """A reader of numbers above 0 and to `most`, for argparse."""

    def read(text: str) -> float:
        with suppress(ValueError):
            if 0 < (value := kind(text)) <= most and value < math.inf:
                return value
            if most < value < math.inf:
                raise argparse.ArgumentTypeError(f"{text} is above {most}: {why}")
        raise argparse.ArgumentTypeError(f"{text} is not {what}")

    return read


WHOLE, ABOVE_ZERO = "a whole number of at least 1", "a number above 0"
positive, above_zero = number(int, WHOLE), number(float, ABOVE_ZERO)
batch = number(int, WHOLE, 2**20, "it counts sequences, not tokens")
share = number(float, ABOVE_ZERO, 1, "it is a share, such as 0.92")


# What each kind of command reads; without --config, --calibrate and --validate it is a search.
OF_MACHINE = {"gpu", "gpus_per_node", "network", "cores", "hardware"}
READS = {
    "validate": set(),
    "calibrate": OF_MACHINE,
    "config": OF_MACHINE | {"fill", "metrics", "json"},
}


def check_used(parser: argparse.ArgumentParser, flags: argparse.Namespace) -> None:
    """ValueError for flags that this kind of command would ignore, and files that cannot be."""
    given = {name for name, value in vars(flags).items() if value != parser.get_default(name)}
    kind = next((kind for kind in READS if getattr(flags, kind)), None)
    unused = given - {kind} - READS[kind] if kind else given & {"metrics"}
    if unused:
        names, where = ", ".join(f"--{name}" for name in sorted(unused)), "without --config"
        raise ValueError(f"{names}: not used {f'with --{kind}' if kind else where}; leave it out")
    if flags.write and flags.write.is_dir():
        example = flags.write / "config.json"
        raise ValueError(f"--write {flags.write} is a folder: name a file, such as {example}")
    if flags.hardware and not flags.hardware.is_file() and not flags.calibrate:
        why = f"--hardware {flags.hardware} is no file"
        raise ValueError(f"{why}: write it with --calibrate, or leave it out")


def run(flags: argparse.Namespace) -> None:
    if flags.validate:
        print(validate.report(validate.read_runs(flags.validate)))
    elif flags.calibrate:
        run_calibration(flags)
    elif flags.config:
        run_config(flags)
    else:
        run_search(flags)


def run_search(flags: argparse.Namespace) -> None:
    request = config_files.request_of(flags)
    found = search(request, flags.top)
    if not found:
        raise ValueError(nothing_fits(request))
    if flags.json:
        print(json.dumps([as_numbers(request, candidate) for candidate in found], indent=2))
    else:
        print(show.plan_text(request, found))
    if flags.write:
        config_files.write(request, found[0], flags.write)
        print(f"\nwrote {flags.write}", file=sys.stderr)


def as_numbers(request: Request, candidate: Candidate) -> dict:
    """A candidate for other programs."""
    layout, work = asdict(candidate.layout), asdict(candidate.workload)
    traffic = {axis: sent for axis, sent, *_ in show.traffic_rows(request, candidate)}
    return {
        "choices": {name: (layout | work)[name] for name in CHOICES},
        "num_micro_batches": candidate.workload.num_micro_batches,
        "step_seconds": candidate.prediction.step,
        "parts": candidate.prediction.parts,
        "bubble": candidate.prediction.bubble,
        "memory": candidate.memory._asdict(),
        "traffic": traffic,
        **show.measures(request, candidate),
    }


def run_config(flags: argparse.Namespace) -> None:
    request, candidate = config_files.of_config(flags, flags.config)
    measured = measured_of(flags.metrics, request, candidate) if flags.metrics else None
    if flags.json:
        numbers = as_numbers(request, candidate)
        print(json.dumps(numbers | {"measured": measured and measured._asdict()}, indent=2))
        return
    print(show.table(request, [candidate]))
    print(f"\n{show.details(request, candidate, width=100)}\n\n{show.uncertain(request)}")
    if measured:
        print(f"\n{show.beside(request, candidate, measured)}")


def measured_of(metrics: Path, request: Request, candidate: Candidate) -> Measured:
    """What a run of this config measured; ValueError if the run was of another."""
    measured = read_metrics(metrics)
    layout, work = candidate.layout, candidate.workload
    check_axes(metrics, measured, planned_traffic(request.model_config, layout, work))
    return measured


def run_calibration(flags: argparse.Namespace) -> None:
    files = flags.calibrate
    if len(files) % 2:
        raise ValueError(f"--calibrate has {len(files)} files: give pairs, CONFIG METRICS ...")
    runs = []
    for config, metrics in zip(files[::2], files[1::2], strict=True):
        request, candidate = config_files.of_config(flags, config)
        setting = request.setting(candidate.layout, candidate.workload)
        measured = measured_of(metrics, request, candidate)
        runs.append(calibrate.Observation(setting, measured.step_seconds))
    result = calibrate.calibrate(runs)
    gpu = replace(runs[0].setting.gpu, **result.found)
    for name in machine.CALIBRATED:
        found = "found" if name in result.found else "as it was: these runs do not show it"
        print(f"{name:<16}{getattr(gpu, name):>10.3g}  {found}")
    for config, error in zip(files[::2], result.errors, strict=True):
        print(f"{config}: predicted {error:+.1%} from measured")
    hardware = flags.hardware or machine.HARDWARE
    machine.write(hardware, gpu)
    print(f"wrote {hardware}")
