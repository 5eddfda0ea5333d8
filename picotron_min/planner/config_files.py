"""Between flags, config files and plans: what is asked for, and how a plan is written."""

import argparse
import json
import os
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from pydantic import ValidationError

from picotron_min.planner.calibrate import read_found
from picotron_min.planner.choices import CHOICES, Candidate, Request
from picotron_min.runtime.config import Config, ConfigError
from picotron_min.runtime.config_checks import is_known_here, resolve_model
from picotron_min.runtime.config_file import parse_config
from picotron_min.runtime.hardware import GPUS, Gpu
from picotron_min.runtime.json_file import parse_json, read_json
from picotron_min.runtime.wording import choice, mistake

NUMBERS = ("gpus", "seq_length", "global_batch", "top", "gpus_per_node", "network", "cores")
MOST = 2**20  # of each: above it a search takes hours


def refuse_out_of_bounds(flags: argparse.Namespace) -> None:
    """ValueError for a flag's number that is not above 0, or far too large."""
    for name, value in vars(flags).items():
        if name in NUMBERS and value is not None and not 0 < value <= MOST:
            raise ValueError(f"--{name} {value}: use a number above 0 and at most {MOST}")


def asked_by(flags: argparse.Namespace) -> Request:
    """What the flags ask for; ValueError for what does not fit."""
    gpu = gpu_of(flags, flags.gpu or "H100", flags.gpus)
    dtype = flags.dtype or ("float32" if gpu.name == "cpu" else "bfloat16")
    asked = {"model": {"name": flags.model, "dtype": dtype, "compile": flags.compile}}
    asked["model"]["fp8"] = flags.precision == "fp8"
    asked["training"] = {"seq_length": flags.seq_length, "optimizer": flags.optimizer}
    config = parse_config(asked)
    options = {"gpus": flags.gpus, "global_batch": flags.global_batch}
    return request_of(config, gpu, **options, fixed=fixed_choices(flags.fix))


def of_config(flags: argparse.Namespace, path: Path) -> tuple[Request, Candidate]:
    """A config file as it is, with what is predicted for it."""
    config = parse_config(read_json(path))
    name = flags.gpu or ("cpu" if config.distributed.use_cpu else "H100")
    if config.distributed.use_cpu and name != "cpu":
        raise ValueError(f"--gpu {name}: not used for {path}, which has use_cpu true; leave it out")
    return predicted(config, gpu_of(flags, name, config.world_size))


def predicted(config: Config, gpu: Gpu) -> tuple[Request, Candidate]:
    request = request_of(config, gpu)
    return request, request.candidate(config.layout, config.workload)


def request_of(config: Config, gpu: Gpu, **options) -> Request:
    """ValueError if the model is not known without the network, or the GPU has no such peak."""
    if not is_known_here(config.model.name):
        raise ConfigError(f"model.name={config.model.name}: download it and name its folder")
    work = config.workload
    kind = "float8" if work.fp8 or work.fp8_experts else work.dtype
    if kind not in gpu.peaks:
        others = choice(name for name, other in GPUS.items() if kind in other.peaks)
        raise ValueError(f"--gpu {gpu.name} has no peak for {kind}: use {others}, or another dtype")
    of_config = {"gpus": config.world_size, "global_batch": config.global_batch}
    of_config |= {"work": work, "model_name": config.model.name}
    return Request(resolve_model(config), gpu, **of_config | options)


def gpu_of(flags: argparse.Namespace, name: str, ranks: int) -> Gpu:
    """The device of a name, as flags and calibrate change it; ValueError for a flag of another."""
    if name != "cpu" and name not in GPUS:
        raise ValueError(f"--gpu {name} is not known: use {', '.join(GPUS)}, or cpu")
    unused = ("network", "gpus_per_node") if name == "cpu" else ("cores",)
    if given := [f"--{flag}" for flag in unused if getattr(flags, flag)]:
        kind = "a CPU" if name == "cpu" else name
        raise ValueError(f"{', '.join(given)}: not used for {kind}; leave it out")
    gpu = cpu(flags.cores or os.cpu_count(), ranks) if name == "cpu" else GPUS[name]
    network = 1e9 / 8 * flags.network if flags.network else gpu.network
    gpu = replace(gpu, gpus_per_node=flags.gpus_per_node or gpu.gpus_per_node, network=network)
    found = read_found(flags.hardware).get(name)
    if found:
        print(f"{flags.hardware} is used: what calibrate found of {name}", file=sys.stderr)
    return replace(gpu, **found, is_calibrated=True) if found else gpu


# Of a core, before any run was measured: FLOP/s; bytes/s of the memory that all cores share, and of
# a message between two processes.
CORE_PEAKS = {"float32": 80e9, "bfloat16": 80e9, "float64": 40e9}
CPU_MEMORY_SPEED, CPU_LINK = 20e9, 4e9


def cpu(cores: int, ranks: int) -> Gpu:
    """This machine's, whose cores and memory the ranks share."""
    share = min(1.0, cores / ranks)  # of a core that a rank has
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / ranks
    peaks = {dtype: share * peak for dtype, peak in CORE_PEAKS.items()}
    speeds = CPU_MEMORY_SPEED / ranks, CPU_LINK / ranks
    shares = {"gpus_per_node": max(64, ranks), "core_share": share}
    return Gpu("cpu", peaks, memory, *speeds, 0.8, 0.4, **shares)


def fixed_choices(text: str) -> dict[str, object]:
    """`tp=4,recompute=none` as a dict; ValueError for an unknown choice or value."""
    fixed = {}
    for pair in filter(None, text.split(",")):
        name, _, value = (part.strip() for part in pair.partition("="))
        if name not in CHOICES or name in fixed:
            why = f"{pair} is not known or there twice"
            raise ValueError(f"--fix {text}: {why}: use {choice(CHOICES)} once")
        section, key = CHOICES[name].split(".")
        with suppress(ValueError):  # else it is text
            value = parse_json(value)
        try:
            keys = Config.model_fields[section].annotation(**{key: value})
        except ValidationError as error:
            raise ValueError(f"--fix {mistake(error.errors()[0])}") from None
        fixed[name] = getattr(keys, key)
    return fixed


def config_of(request: Request, candidate: Candidate) -> dict:
    """config.json of a plan: what it chose, and what was asked for."""
    chosen, work = candidate.chosen, candidate.workload
    raw = {"distributed": {}, "model": {"name": request.model_name, "dtype": work.dtype}}
    raw["training"] = {"seq_length": work.seq_length, "optimizer": work.optimizer}
    raw["training"]["gradient_accumulation_steps"] = work.num_micro_batches
    for name, key in CHOICES.items():
        section, key = key.split(".")
        raw[section][key] = chosen[name]
    if work.document_mask:
        raw["dataset"] = {"document_mask": True}
    raw["model"] |= {key: True for key in ("compile", "fp8") if chosen[key]}
    if request.device == "cpu":
        raw["distributed"]["use_cpu"] = True
    return raw


def write(request: Request, candidate: Candidate, path: Path) -> None:
    """Write a plan's config.json, checked; ValueError if another file is in the way."""
    raw = config_of(request, candidate)
    raw["checkpoint"] = {"save_dir": str(path.parent / "checkpoints")}
    parse_config(raw)
    text = json.dumps(raw, indent=4) + "\n"
    if path.exists() and path.read_text(encoding="utf-8") != text:
        raise ValueError(f"{path} is already there and differs: name another --write file")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
