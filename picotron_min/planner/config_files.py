"""Between flags, config files and plans: what is asked for, and how a plan is written."""

import argparse
import json
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
from picotron_min.runtime.json_file import parse_json
from picotron_min.runtime.wording import choice, mistake

HARDWARE = Path("hardware.json")  # what calibrate found


def asked_by(flags: argparse.Namespace) -> Request:
    """What the flags ask for; ValueError for what does not fit."""
    asked = {"model": {"name": flags.model, "dtype": flags.dtype, "compile": flags.compile}}
    asked["model"]["fp8"] = flags.precision == "fp8"
    asked["training"] = {"seq_length": flags.seq_length, "optimizer": flags.optimizer}
    config = parse_config(asked)
    options = {"gpus": flags.gpus, "global_batch": flags.global_batch}
    return request_of(config, gpu_of(flags), **options, fixed=fixed_choices(flags.fix))


def predicted(config: Config, gpu: Gpu) -> tuple[Request, Candidate]:
    """A config as it is, with what is predicted for it on GPUs, also where it has use_cpu."""
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


def gpu_of(flags: argparse.Namespace) -> Gpu:
    """The GPU of a name, as flags and calibrate change it."""
    gpu = GPUS[flags.gpu]
    network = 1e9 / 8 * flags.network if flags.network else gpu.network
    gpu = replace(gpu, gpus_per_node=flags.gpus_per_node or gpu.gpus_per_node, network=network)
    found = read_found(HARDWARE).get(gpu.name)
    if found:
        print(f"{HARDWARE} is used: what calibrate found of {gpu.name}", file=sys.stderr)
    return replace(gpu, **found, is_calibrated=True) if found else gpu


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
    raw["model"] |= {key: True for key in ("compile", "fp8") if chosen[key]}
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
