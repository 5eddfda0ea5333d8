"""config.json read and checked: all mistakes of its keys are reported at once, in plain words.

Without torch, so that it takes no time and happens before any process starts.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from difflib import get_close_matches
from pathlib import Path

from pydantic import ValidationError

from picotron_min.runtime.config import KEYS, SECTIONS, Config, ConfigError
from picotron_min.runtime.config_checks import problems_of
from picotron_min.runtime.json_file import read_json
from picotron_min.runtime.wording import choice, counted, mistake

MOST_PROCESSES = max(64, os.cpu_count())  # of a machine: 140 MB each


def load_config(path: str | os.PathLike, processes: int | None = None) -> Config:
    """Read and check a config.json for the `processes` that a launcher has started, if one has."""
    raw = read_json(Path(path))
    return parse_config(raw, lambda config: _launch_problems(config, processes, path))


def _launch_problems(config: Config, processes: int | None, path) -> Iterator[str]:
    needed = config.world_size
    sizes = " x ".join(f"{axis}_size={n}" for axis, n in config.layout.sizes._asdict().items())
    needs = f"this config needs {counted(needed, 'process')} ({sizes})"
    if processes is None and needed > MOST_PROCESSES:
        remedy = f"one machine starts at most {MOST_PROCESSES}: use torchrun on several nodes"
        yield f"{needs}, and {remedy}"
    if processes not in (None, needed):
        command = f"torchrun --nproc_per_node {needed} train.py --config {path}"
        yield f"{needs} but was started with {processes}: run  {command}"


def parse_config(raw: dict, *checks: Callable[[Config], Iterable[str]]) -> Config:
    """Check a config given as a dict: each key, then if all are well formed, what fits the others.

    ConfigError with all that is wrong.
    """
    try:
        config = Config.model_validate(raw)
    except ValidationError as error:
        raise ConfigError(*map(_describe, error.errors())) from None
    if problems := [p for check in (*checks, problems_of) for p in check(config)]:
        raise ConfigError(*dict.fromkeys(problems))
    return config


def _describe(error: dict) -> str:
    """One of pydantic's errors, with the remedy for what users often write."""
    if (kind := error["type"]) == "extra_forbidden":
        return _unknown(*error["loc"])
    if kind == "none_required":  # HF_TOKEN
        return "environment.HF_TOKEN must be null: delete it, and run  export HF_TOKEN=..."
    return mistake(error)


def _unknown(*path: str) -> str:
    """The remedy for an unknown section or key: where it belongs, or what is near."""
    where, own = ".".join(path), SECTIONS[path[0]] if len(path) > 1 else SECTIONS
    known = {key.split(".")[1]: key for key in reversed(KEYS)} | {name: name for name in own}
    near = get_close_matches(path[-1], known, n=1)
    remedy = f"did you mean {known[near[0]]}?" if near else f"use {choice(own)}"
    return f"{where} is not known: {remedy}"
