"""Between flags, config files and plans: what is asked for, and how a plan is written."""

import argparse
import json
import sys
from array import array
from contextlib import suppress
from dataclasses import replace
from difflib import get_close_matches
from itertools import pairwise
from pathlib import Path

from picotron_min.extensions.settings import ModelConfig
from picotron_min.planner import machine
from picotron_min.planner.choices import CHOICES, Candidate, Request
from picotron_min.runtime.config import KEYS, Config, ConfigError
from picotron_min.runtime.config_checks import is_known_here, resolve_model
from picotron_min.runtime.config_file import parse_config
from picotron_min.runtime.hardware import GPUS, Gpu
from picotron_min.runtime.json_file import parse_json, read_json
from picotron_min.runtime.wording import choice

ALIASES = {"sp": "sequence_parallel", "engine": "pp_engine", "chunks": "pp_chunks"}
ALIASES |= {"mbs": "micro_batch_size"}
MOST_TP = 8  # by default, also where more GPUs are in a node


def request_of(flags: argparse.Namespace) -> Request:
    """What the flags ask for; ValueError for what is missing or does not fit."""
    needed = ("model", "gpus", "seq_length", "global_batch")
    if missing := [f"--{name}" for name in needed if getattr(flags, name) is None]:
        raise ValueError(f"{' '.join(missing)} missing: see --help")
    gpu = gpu_of(flags, flags.gpu or "H100", flags.gpus)
    dtype = flags.dtype or ("float32" if gpu.name == "cpu" else "bfloat16")
    asked = {"model": {"name": flags.model, "dtype": dtype, "compile": flags.compile}}
    asked["model"]["fp8"] = flags.precision == "fp8"
    asked["dataset"] = {"document_mask": bool(flags.documents)}
    asked["training"] = {"seq_length": flags.seq_length, "optimizer": flags.optimizer}
    config = parse_config(asked)
    max_tp = flags.max_tp or min(MOST_TP, gpu.gpus_per_node)
    options = options_of(flags, config) | {"max_tp": max_tp, "fixed": fixed_choices(flags.fix)}
    return _request(config, model_of(config), gpu, flags.gpus, flags.global_batch, **options)


def _request(
    config: Config, model_config: ModelConfig, gpu: Gpu, gpus: int, global_batch: int, **options
) -> Request:
    work = config.workload
    if work.fp8 and "float8" not in gpu.peaks:
        with_8_bits = choice(name for name, other in GPUS.items() if "float8" in other.peaks)
        raise ValueError(f"{gpu.name} does not multiply in 8 bits: use {with_8_bits}, or bfloat16")
    if work.dtype not in gpu.peaks:
        why = f"--gpu {gpu.name} has no peak for {work.dtype}"
        raise ValueError(f"{why}: use {choice(gpu.peaks)}")
    return Request(model_config, gpu, gpus, work, global_batch, config.model.name, **options)


def attended_length(path: Path, config: Config) -> float:
    """The length of rows whose attention costs as much as the documents of a token file.

    The mean of (document's length)^2 over tokens, where rows cut documents. `path` is
    documents.bin, where each document ends in the stream, or its folder. ValueError if it is
    damaged, or if the config lets attention reach across documents.
    """
    if not config.dataset.document_mask:
        raise ValueError(f"--documents {path}: not used without dataset.document_mask")
    seq_length = config.training.seq_length
    path = path / "documents.bin" if path.is_dir() else path
    ends, data = array("q"), path.read_bytes()
    if data and len(data) % ends.itemsize == 0:
        ends.frombytes(data)
    if not ends or ends[0] < 1 or any(a >= b for a, b in pairwise(ends)):
        raise ValueError(f"{path} is no documents.bin: name one in a folder of dataset.cache_dir")
    squares = begin = 0
    for end in ends:
        first = min(end, begin - begin % seq_length + seq_length) - begin  # up to its row's end
        rows, last = divmod(end - begin - first, seq_length)
        squares += first**2 + rows * seq_length**2 + last**2
        begin = end
    return squares / begin


def gpu_of(flags: argparse.Namespace, name: str, ranks: int) -> Gpu:
    """The device of a name, with what the flags state; ValueError for those of another kind."""
    gpu = machine.machine(name, flags.hardware, ranks, flags.cores)
    unused = ("network", "gpus_per_node") if name == "cpu" else ("cores",)
    if given := [f"--{flag}" for flag in unused if getattr(flags, flag)]:
        kind = "a CPU" if name == "cpu" else name
        raise ValueError(f"{', '.join(given)}: not used for {kind}; leave it out")
    if gpu.is_calibrated and not flags.calibrate:
        print(f"{flags.hardware} is used: what --calibrate found of {name}", file=sys.stderr)
    if name == "cpu":
        return gpu
    network = 1e9 / 8 * (flags.network or 400)
    return replace(gpu, gpus_per_node=flags.gpus_per_node or gpu.gpus_per_node, network=network)


def options_of(flags: argparse.Namespace, config: Config) -> dict[str, object]:
    """Options of a Request that do not depend on whether it is a search or a config."""
    system = machine.read_system(flags.system) if flags.system else None
    attended = flags.documents and attended_length(flags.documents, config)
    return {"fill": flags.fill, "attended": attended, "system": system}


def model_of(config: Config) -> ModelConfig:
    """The model's numbers, which must be known without the network."""
    if not is_known_here(config.model.name):
        raise ConfigError(f"model.name={config.model.name}: download it and name its folder")
    return resolve_model(config)


def fixed_choices(text: str) -> dict[str, object]:
    """`tp=4,recompute=none` as a dict; ValueError for an unknown choice or value."""
    fixed = {}
    for pair in filter(None, text.split(",")):
        name, _, value = (part.strip() for part in pair.partition("="))
        name = ALIASES.get(name, name)
        if name not in CHOICES or name in fixed:
            near = get_close_matches(name, CHOICES, 1) or [choice(CHOICES)]
            raise ValueError(
                f"--fix {text}: {pair} is not known or there twice: use {near[0]} once"
            )
        schema = KEYS[CHOICES[name]]
        if "enum" in schema:
            good, what = value in schema["enum"], choice(schema["enum"])
        else:
            with suppress(ValueError):
                value = parse_json(value)
            good, what = type(value) is bool, "true or false"
            if schema["type"] == "integer":
                good, what = type(value) is int and value > 0, "a whole number from 1 up"
        if not good:
            raise ValueError(f"--fix {pair}: must be {what}")
        fixed[name] = value
    return fixed


def of_config(flags: argparse.Namespace, path: Path) -> tuple[Request, Candidate]:
    """A config file as it is, with what is predicted for it."""
    config = parse_config(read_json(path))
    name = flags.gpu or ("cpu" if config.distributed.use_cpu else "H100")
    if config.distributed.use_cpu and name != "cpu":
        raise ValueError(f"--gpu {name}: not used for {path}, which has use_cpu true; leave it out")
    gpu = gpu_of(flags, name, config.world_size)
    return predicted(config, model_of(config), gpu, **options_of(flags, config))


def predicted(
    config: Config, model_config: ModelConfig, gpu: Gpu, **options
) -> tuple[Request, Candidate]:
    """A config on a GPU, with options of Request; ValueError if it has no peak for the dtype."""
    layout, workload = config.layout, config.workload
    sizes = layout.world_size, config.global_batch
    request = _request(config, model_config, gpu, *sizes, **options)
    return request, request.candidate(layout, workload)


def config_of(request: Request, candidate: Candidate) -> dict:
    """config.json of a plan: what it chose, and what was asked for."""
    chosen, work = candidate.chosen, candidate.workload
    raw = {
        "distributed": {},
        "model": {"name": request.model_name, "dtype": work.dtype},
        "training": {
            "seq_length": work.seq_length,
            "gradient_accumulation_steps": work.num_micro_batches,
            "optimizer": work.optimizer,
        },
    }
    for name in CHOICES:
        section, key = CHOICES[name].split(".")
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
