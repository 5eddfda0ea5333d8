"""`python -m picotron_min.planner COMMAND`: which layouts of a model on these GPUs fit, how fast.

search --model Llama-3.1-8B --gpu H100 --gpus 64 --seq_length 8192 --global_batch 512
                                      the best layouts; --write FILE makes the first a config
config FILE --gpu H100                what is predicted for a config, without a search
calibrate CONFIG METRICS              what your machine reaches, from a run on it
validate tests/published_runs*.csv    the time model beside published runs
"""

import signal
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable
from pathlib import Path

from picotron_min.planner import calibrate, config_files, show, validate
from picotron_min.planner.choices import CHOICES, POWERS
from picotron_min.planner.config_files import HARDWARE
from picotron_min.planner.search import nothing_fits, search
from picotron_min.runtime.config_file import parse_config
from picotron_min.runtime.hardware import GPUS
from picotron_min.runtime.json_file import read_json, write_json


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code: 0 done, 2 the user's mistakes, or nothing fits."""
    flags = build_parser().parse_args(arguments)
    try:
        flags.run(flags)
        return 0
    except OSError as error:
        problems = f"{error}: name another file"
    except ValueError as error:
        problems = str(error)  # a line for each
    print("error: " + problems.replace("\n", "\nerror: "), file=sys.stderr)
    return 2


def build_parser() -> ArgumentParser:
    """Each command has only the flags that it reads."""
    layout = {"description": __doc__, "formatter_class": RawDescriptionHelpFormatter}
    parser = ArgumentParser(prog="python -m picotron_min.planner", **layout)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: Callable, *flags: Callable) -> Callable:
        add = commands.add_parser(name, allow_abbrev=False, help=run.__doc__).add_argument
        for add_flags in flags:
            add_flags(add)
        commands.choices[name].set_defaults(run=run)
        return add

    command("search", run_search, add_search, add_machine)
    add = command("config", run_config, add_machine)
    add("file", type=Path, metavar="FILE")
    add = command("calibrate", run_calibration, add_machine)
    add("config", type=Path, metavar="CONFIG", help="of a run on GPUs")
    add("metrics", type=Path, metavar="METRICS", help="its metrics.jsonl")
    add = command("validate", run_validation)
    add("files", type=Path, nargs="+", metavar="FILE", help="tables of runs")
    return parser


def add_search(add: Callable) -> None:
    add("--model", required=True, help="a preset, or a folder in Hugging Face form")
    add("--gpus", type=number, required=True, metavar="N", help="how many")
    add("--seq_length", type=number, required=True, metavar="N", help="tokens")
    add("--global_batch", type=number, required=True, metavar="N", help="sequences, not tokens")
    add("--dtype", choices=["bfloat16", "float32", "float64"], default="bfloat16")
    add("--precision", choices=["bf16", "fp8"], default="bf16", help="of the layers' linears")
    add("--optimizer", choices=["adamw", "muon", "sgd"], default="adamw")
    add("--compile", action="store_true", help="with model.compile")
    add("--fix", default="", metavar="tp=4,...", help=f"choices to keep: {', '.join(CHOICES)}")
    add("--top", type=number, default=10, metavar="N", help="layouts in the table")
    add("--write", type=Path, metavar="FILE", help="write the best layout's config.json")


def add_machine(add: Callable) -> None:
    add("--gpu", choices=GPUS, default="H100", metavar="NAME", help=", ".join(GPUS))
    add("--gpus_per_node", type=number, metavar="N", help="default: 8 of most GPUs")
    add("--network", type=number, metavar="GBIT", help="a second and GPU; default: 400")


def number(text: str) -> int:
    if not (text.isdecimal() and 0 < int(text) <= POWERS[-1]):
        raise ArgumentTypeError(f"{text}: use a number above 0 and at most {POWERS[-1]}")
    return int(text)


def run_search(flags: Namespace) -> None:
    """the best layouts of a model"""
    request = config_files.asked_by(flags)
    found = search(request, flags.top)
    if not found:
        raise ValueError(nothing_fits(request))
    print(show.plan_text(request, found))
    if flags.write:
        config_files.write(request, found[0], flags.write)
        left = "dataset.name, training.learning_rate and total_train_steps, checkpoint.load_path"
        print(f"\nwrote {flags.write}: yours to add are {left}", file=sys.stderr)


def run_config(flags: Namespace) -> None:
    """what is predicted for a config"""
    config = parse_config(read_json(flags.file))
    request, candidate = config_files.predicted(config, config_files.gpu_of(flags))
    print(show.blocks(request, [candidate]))


def run_calibration(flags: Namespace) -> None:
    """what a machine reaches, from a run on it"""
    config, gpu = parse_config(read_json(flags.config)), config_files.gpu_of(flags)
    if config.distributed.use_cpu:
        raise ValueError(f"{flags.config} has use_cpu true: name a run on GPUs")
    request, candidate = config_files.predicted(config, gpu)
    seconds = calibrate.read_metrics(flags.metrics, request, candidate)
    setting = request.setting(candidate.layout, candidate.workload)
    found, known = calibrate.calibrate(setting, seconds), calibrate.read_found(HARDWARE)
    write_json(HARDWARE, known | {gpu.name: known.get(gpu.name, {}) | found})
    for name, value in found.items():
        print(f"wrote {HARDWARE}: {name} {value:.3g} of {gpu.name}")


def run_validation(flags: Namespace) -> None:
    """the time model beside published runs"""
    print(validate.report([run for path in flags.files for run in validate.read_runs(path)]))


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` has read enough: end in silence
    sys.exit(main())
