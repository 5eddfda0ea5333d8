"""`python -m picotron_min.planner`: which layouts of a model on these GPUs fit, and how fast.

--model Llama-3.1-8B --gpu H100 --gpus 64 --seq_length 8192 --global_batch 512
                                      the best layouts; --write FILE makes the first a config
--config FILE --gpu H100              what is predicted for a config, without a search
--config FILE --metrics FILE          predicted beside measured
--calibrate CONFIG METRICS ...        what your machine reaches, from runs on it
--validate tests/published_runs*.csv  the time model beside published runs
"""

import argparse
import json
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from picotron_min.planner import calibrate, config_files, show, validate
from picotron_min.planner.choices import CHOICES
from picotron_min.planner.search import nothing_fits, search
from picotron_min.runtime.hardware import GPUS
from picotron_min.runtime.json_file import read_json, write_json


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code: 0 done, 2 the user's mistakes, or nothing fits."""
    parser = build_parser()
    try:
        run(parser, parser.parse_args(arguments))
        return 0
    except OSError as error:
        where = f"{error.filename}: {error.strerror}: name another file"
        problems = where if error.filename else str(error)  # of a closed pipe
    except ValueError as error:
        problems = str(error)  # a line for each
    print("error: " + problems.replace("\n", "\nerror: "), file=sys.stderr)
    return 2


def build_parser() -> argparse.ArgumentParser:
    positive = above_zero(int)
    batch = above_zero(int, 2**20, ": it counts sequences, not tokens")
    share = above_zero(float, 1, ": it is a share, such as 0.92")
    parser = argparse.ArgumentParser(
        prog="python -m picotron_min.planner",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--model", metavar="NAME", help="a preset, or a folder in Hugging Face form")
    add("--gpu", metavar="NAME", help=f"{', '.join(GPUS)}, or cpu; default: H100")
    add("--gpus", type=above_zero(int, 2**20), metavar="N", help="how many")
    add("--seq_length", type=positive, metavar="N", help="tokens")
    add("--global_batch", type=batch, metavar="N", help="sequences a step")
    add("--dtype", choices=["bfloat16", "float32", "float64"], help="default: bfloat16 on GPUs")
    add("--precision", choices=["bf16", "fp8"], default="bf16", help="of the layers' linears")
    add("--optimizer", choices=["adamw", "muon", "sgd"], default="adamw")
    add("--compile", action="store_true", help="with model.compile")
    add("--gpus_per_node", type=positive, metavar="N", help="default: 8 of most GPUs")
    add("--network", type=above_zero(float), metavar="GBIT", help="a second and GPU; default: 400")
    add("--cores", type=positive, metavar="N", help="of a CPU, which its ranks share")
    add("--fill", type=share, default=0.92, help="share of the memory that may be planned")
    add("--max_tp", type=positive, metavar="N", help="default: GPUs of a node, at most 8")
    add("--fix", default="", metavar="tp=4,...", help=f"choices to keep: {', '.join(CHOICES)}")
    add("--documents", type=Path, metavar="FILE", help="documents.bin, if attention is inside them")
    add("--top", type=positive, default=10, metavar="N", help="layouts in the table")
    default, found = Path("hardware.json"), "from --calibrate: %(default)s"
    add("--hardware", type=Path, default=default, metavar="FILE", help=found)
    add("--write", type=Path, metavar="FILE", help="write the best layout's config.json")
    add("--config", type=Path, metavar="FILE", help="predict this one")
    add("--metrics", type=Path, metavar="FILE", help="and show what its run measured")
    add("--calibrate", type=Path, nargs="+", metavar="FILE", help="configs, each with its metrics")
    add("--validate", type=Path, nargs="+", metavar="FILE", help="published runs")
    add("--picture", type=Path, metavar="FILE", help="and draw them, as SVG")
    add("--system", type=Path, metavar="FILE", help="properties of another code base, as JSON")
    add("--json", action="store_true", help="print numbers, not text")
    return parser


def above_zero(kind: type, most: float = math.inf, why: str = "") -> Callable[[str], float]:
    """A reader of numbers above 0 and to `most`, for argparse."""

    def read(text: str) -> float:
        if not 0 < (value := kind(text)) < math.inf or value > most:  # argparse adds the text
            limit = f" and at most {most}{why}" * (most < math.inf)
            raise argparse.ArgumentTypeError(f"{text} is not above 0{limit}")
        return value

    read.__name__ = kind.__name__  # in argparse's message for what is no number
    return read


def run(parser: argparse.ArgumentParser, flags: argparse.Namespace) -> None:
    given = {name for name, value in vars(flags).items() if value != parser.get_default(name)}
    kind = next((kind for kind in COMMANDS if getattr(flags, kind)), None)
    command, reads = COMMANDS.get(kind, (run_search, given - {"metrics", "picture"}))
    if unused := given - {kind} - reads:
        names = ", ".join(f"--{name}" for name in sorted(unused))
        where = f"with --{kind}" if kind else "without --config"
        raise ValueError(f"{names}: not used {where}; leave it out")
    if "hardware" in given and kind != "calibrate" and not flags.hardware.is_file():
        why = f"--hardware {flags.hardware} is no file"
        raise ValueError(f"{why}: write it with --calibrate, or leave it out")
    command(flags)


def run_validation(flags: argparse.Namespace) -> None:
    runs = [run for path in flags.validate for run in validate.read_runs(path)]
    if flags.picture:
        flags.picture.write_text(validate.draw(runs), encoding="utf-8")
    print(validate.report(runs))


def run_search(flags: argparse.Namespace) -> None:
    request = config_files.asked_by(flags)
    found = search(request, flags.top)
    if not found:
        raise ValueError(nothing_fits(request))
    if flags.json:
        numbers = [show.as_numbers(request, candidate) for candidate, *_ in found]
        print(json.dumps(numbers, indent=2))
    else:
        print(show.plan_text(request, found))
    if flags.write:
        config_files.write(request, found[0][0], flags.write)
        left = "dataset.name, training.learning_rate and total_train_steps, checkpoint.load_path"
        print(f"\nwrote {flags.write}: yours to add are {left}", file=sys.stderr)


def run_config(flags: argparse.Namespace) -> None:
    request, candidate = config_files.of_config(flags, flags.config)
    measured = flags.metrics and calibrate.read_metrics(flags.metrics, request, candidate)
    if flags.json:
        real = {"measured": measured and measured.model_dump(exclude={"step"})}
        return print(json.dumps(show.as_numbers(request, candidate) | real, indent=2))
    blocks = [show.table(request, [[candidate]]), show.details(request, candidate)]
    blocks += [show.uncertain(request, candidate)]
    blocks += [show.beside(request, candidate, measured)] if measured else []
    print("\n\n".join(blocks))


def run_calibration(flags: argparse.Namespace) -> None:
    files = flags.calibrate
    if len(files) % 2:
        raise ValueError(f"--calibrate has {len(files)} files: give pairs, CONFIG METRICS ...")
    runs = []
    for config, metrics in zip(files[::2], files[1::2], strict=True):
        request, candidate = config_files.of_config(flags, config)
        measured = calibrate.read_metrics(metrics, request, candidate)
        setting = request.setting(candidate.layout, candidate.workload)
        runs.append(calibrate.Observation(setting, measured.step_seconds))
    seen = calibrate.properties(runs) if flags.system else {}
    runs = [run.having(**seen) for run in runs]
    found = calibrate.calibrate(runs)
    gpu = replace(runs[0].setting.gpu, **found)
    for name in calibrate.CALIBRATED:
        how = "found" if name in found else "as it was: these runs do not show it"
        print(f"{name:<16}{getattr(gpu, name):>10.3g}  {how}")
    how = "fitted, as many unknowns as runs" if len(found) == len(runs) else "predicted"
    for config, error in zip(files[::2], calibrate.errors_of(runs, found), strict=True):
        print(f"{config}: {how}, {error:+.1%} from measured")
    reached = {gpu.name: {name: getattr(gpu, name) for name in calibrate.CALIBRATED}}
    write_json(flags.hardware, calibrate.read_found(flags.hardware) | reached)
    print(f"wrote {flags.hardware}")
    if flags.system:  # else it is this project, and a config tells its properties
        unseen = ", ".join(name for name in calibrate.VISIBLE if name not in seen)
        write_json(flags.system, read_json(flags.system) | seen)
        print(f"wrote {flags.system}: {seen or 'nothing new'}; these runs do not show {unseen}")


# Commands by the flag that asks for each, with what else they read; without one it is a search.
OF_MACHINE = {"system", "gpu", "gpus_per_node", "network", "cores", "hardware", "documents"}
COMMANDS = {
    "validate": (run_validation, {"picture"}),
    "calibrate": (run_calibration, OF_MACHINE),
    "config": (run_config, OF_MACHINE | {"fill", "metrics", "json"}),
}

if __name__ == "__main__":
    sys.exit(main())
