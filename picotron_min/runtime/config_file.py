"""config.json read and checked: every mistake in it is reported at once, in plain words.

Without torch, so that it takes no time and happens before any process starts.
"""

import difflib
import os
import re
from collections.abc import Callable, Iterable
from copy import copy
from pathlib import Path
from typing import get_args

from pydantic import ValidationError

from picotron_min.runtime.config import KEYS, SECTIONS, Config, ConfigError, keys_of
from picotron_min.runtime.config_checks import problems_of
from picotron_min.runtime.json_file import read_json
from picotron_min.runtime.wording import choice, counted, shown

MOST_PROCESSES = max(64, os.cpu_count())  # of a machine: 140 MB each


def load_config(path: str | os.PathLike, processes: int | None = None) -> Config:
    """Read and check a config.json for the `processes` that a launcher has started, if one has."""
    raw = read_json(Path(path))
    return parse_config(raw, (), lambda config: _launch_problems(config, processes, path))


def _launch_problems(config: Config, processes: int | None, path: str | os.PathLike) -> list[str]:
    needed = config.world_size
    sizes = " x ".join(f"{axis}_size={n}" for axis, n in config.layout.sizes._asdict().items())
    needs = f"this config needs {counted(needed, 'process')} ({sizes})"
    if processes is None and needed > MOST_PROCESSES:
        remedy = f"one machine starts at most {MOST_PROCESSES}: use torchrun on several nodes"
        return [f"{needs}, and {remedy}"]
    if processes in (None, needed):
        return []
    copies, rest = divmod(processes, needed // config.distributed.dp_size)
    also = "" if rest else f", or set distributed.dp_size to {copies}"
    command = f"torchrun --nproc_per_node {needed} train.py --config {path}"
    return [f"{needs} but was started with {processes}: run  {command}{also}"]


def parse_config(raw: dict, first: Iterable[str] = (), *checks: Callable) -> Config:
    """Check a config given as a dict. Raises ConfigError: `first`, then what all checks find."""
    problems, bad, good = list(first), set(), {name: copy(keys) for name, keys in raw.items()}
    try:
        config = Config.model_validate(raw)
    except ValidationError as error:
        for e in error.errors():
            section, *key = path = e["loc"][:2]
            problems.append(_describe(e, raw))
            bad |= {f"{section}.{name}" for name in key or keys_of(section)}
            (good[section] if key else good).pop(path[-1], None)
        config = Config.model_validate(good)  # with defaults for what is bad, to check the rest
    # A problem that names a bad key, with or without its section, is about the key's default.
    bad |= {where.split(".")[1] for where in bad}
    for check in (problems_of, *checks):
        problems += [p for p in check(config) if bad.isdisjoint(re.findall(r"([\w.]+)=", p))]
    if problems:
        raise ConfigError(*dict.fromkeys(problems))
    return config


# What pydantic expected, in the words of a JSON file; of other kinds its own message is used.
EXPECTED = dict.fromkeys(("bool_type", "bool_parsing"), "must be true or false")
EXPECTED |= dict.fromkeys(("too_short", "too_long"), "must be a list of 2 numbers")  # betas
EXPECTED |= {"model_type": "must be a section, { ... }"}


def _describe(error: dict, raw: dict) -> str:
    """One of pydantic's errors as a sentence: the key, its value, what is expected."""
    (section, *key), kind = error["loc"][:2], error["type"]
    if kind == "extra_forbidden":
        return _unknown(section, *key)
    if kind == "none_required":  # HF_TOKEN: not shown, since it is a secret and this may be logged
        why = "a token belongs in the environment, not in a file"
        return f"environment.HF_TOKEN must be null: {why}. Delete it here, run  export HF_TOKEN=..."
    where, value = ".".join([section, *key]), raw[section][key[0]] if key else raw[section]
    is_quoted = re.fullmatch(r'"([-+.\de]+|true|false)"', shown(value).lower())
    expected = EXPECTED.get(kind) or re.sub("^(Input|String) should", "must", error["msg"])
    if where in KEYS and type(None) in get_args(KEYS[where].annotation):
        expected += " or null"
    if kind in ("int_type", "float_type", "bool_type") and is_quoted:
        expected += ", without quotes"
    if kind == "int_type" and isinstance(value, float) and value.is_integer():
        expected += f", written {int(value)}"
    if value == "float16":
        expected += "; float16 overflows without loss scaling, use bfloat16"
    return f"{where}={shown(value)}: {expected}"


# The key of each word that is a value: "cosine" is one of training.schedule.
CHOICES = {word: key for key, field in KEYS.items() for word in get_args(field.annotation)}


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that `word` may be a slip for; None if they only share some letters."""
    lower = {name.lower(): name for name in known}
    near = difflib.get_close_matches(word.lower(), lower, n=1, cutoff=0.75)
    return lower[near[0]] if near else None


def _unknown(*path: str) -> str:
    """The remedy for an unknown section or key: where it belongs, or what is near."""
    where, word = ".".join(path), path[-1]
    own = keys_of(path[0]) if len(path) > 1 else SECTIONS
    if homes := [name for name in SECTIONS if word in keys_of(name)]:
        return f"{where} is in the wrong place: {word} belongs in {choice(homes)}"
    everywhere = {dotted.split(".")[1]: dotted for dotted in KEYS}
    if meant := nearest(word, own) or everywhere.get(nearest(word, everywhere)):
        return f"{where} is not known: did you mean {meant}?"
    remedy = f'did you mean {CHOICES[word]}="{word}"?' if word in CHOICES else f"use {choice(own)}"
    return f"{where} is not known: {remedy}"
