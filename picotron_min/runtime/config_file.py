"""config.json read and checked: every mistake in it is reported at once, in plain words.

torch is not imported here, so that this takes no time and happens before any process starts.
"""

import difflib
import itertools
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import get_args

from pydantic import ValidationError

from picotron_min.runtime.config import (
    KEYS,
    SECTIONS,
    Config,
    ConfigError,
    choice,
    counted,
    keys_of,
    shown,
)
from picotron_min.runtime.config_checks import problems_of
from picotron_min.runtime.json_file import read_json


def load_config(path: str | os.PathLike, processes: int | None = None) -> Config:
    """Read and check a config.json. Raises ConfigError with every problem in it.

    `processes` is how many a launcher has started; None if they are to be started here.
    """
    try:
        raw = read_json(Path(path))
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return parse_config(raw, (), lambda config: _launch_problems(config, processes, path))


def _launch_problems(config: Config, processes: int | None, path: str | os.PathLike) -> list[str]:
    needed, rest = config.world_size, config.world_size // config.distributed.dp_size
    sizes = " x ".join(f"{axis}_size={n}" for axis, n in config.layout.sizes._asdict().items())
    needs = f"this config needs {counted(needed, 'process')} ({sizes})"
    most = max(64, os.cpu_count())  # 140 MB each, so that thousands would bring the machine down
    if processes is None and needed > most:
        return [f"{needs}, and one machine starts at most {most}: use torchrun on several nodes"]
    if processes in (None, needed):
        return []
    also = "" if processes % rest else f", or set distributed.dp_size to {processes // rest}"
    command = f"torchrun --nproc_per_node {needed} train.py --config {path}"
    return [f"{needs} but was started with {processes}: run  {command}{also}"]


def parse_config(raw: dict, first: Iterable[str] = (), *checks: Callable) -> Config:
    """Check a config given as a dict. Raises ConfigError with every problem, `first` first.

    `checks` are further functions that return the problems of a config.
    """
    problems, bad = list(first), set()
    try:
        config = Config.model_validate(raw)
    except ValidationError as error:
        for e in error.errors():
            section, *key = e["loc"][:2]
            problems.append(_describe(e, raw))
            bad |= {(section, name) for name in key or [None, *keys_of(section)]}
        # The rest is checked with defaults in place of what is bad: all is reported at once.
        good = {name: keys for name, keys in raw.items() if (name, None) not in bad}
        for name, keys in good.items():
            good[name] = {key: value for key, value in keys.items() if (name, key) not in bad}
        config = Config.model_validate(good)
    # A problem that names a bad key is about the key's default: left out.
    bad_names = {name for section, key in bad for name in (key, f"{section}.{key}")}
    found = itertools.chain(*(check(config) for check in (problems_of, *checks)))
    problems += [p for p in found if bad_names.isdisjoint(re.findall(r"([\w.]+)=", p))]
    if problems:
        raise ConfigError(*dict.fromkeys(problems))
    return config


def _describe(error: dict, raw: dict) -> str:
    """One of pydantic's errors as a sentence: the key, its value, what is expected."""
    (section, *key), kind = error["loc"][:2], error["type"]
    if kind == "extra_forbidden":
        return _unknown(section, *key)
    if kind == "none_required":  # HF_TOKEN: not shown, since it is a secret and this may be logged
        return (
            "environment.HF_TOKEN must be null: a token belongs in the environment, not in a file."
            " Delete it here and run  export HF_TOKEN=..."
        )
    where, value = section, raw[section]
    expected = re.sub("^(Input|String) should", "must", error["msg"])
    expected = expected.replace("a valid boolean", "true or false")
    if kind == "model_type":
        expected = "must be a section, { ... }"
    if key:
        where, value = f"{section}.{key[0]}", value[key[0]]
        if type(None) in get_args(keys_of(section)[key[0]].annotation):
            expected += " or null"
    is_quoted = isinstance(value, str) and re.fullmatch(r"[-+.\de]+|true|false", value.lower())
    if kind in ("int_type", "float_type", "bool_type") and is_quoted:
        expected += ", without quotes"
    if kind in ("too_short", "too_long"):
        expected = "must be a list of 2 numbers"  # betas
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


def _unknown(section: str, key: str | None = None) -> str:
    """The remedy for an unknown key or section: where it belongs, or what is near."""
    where, own, word = f"{section}.{key}", keys_of(section), key
    if not key:
        where, own, word = section, SECTIONS, section
    if homes := [name for name in SECTIONS if word in keys_of(name)]:
        return f"{where} is in the wrong place: {word} belongs in {choice(homes)}"
    everywhere = {dotted.split(".")[1]: dotted for dotted in KEYS}
    if meant := nearest(word, own) or everywhere.get(nearest(word, everywhere)):
        return f"{where} is not known: did you mean {meant}?"
    if word in CHOICES:
        return f'{where} is not known: did you mean {CHOICES[word]}="{word}"?'
    return f"{where} is not known: use {choice(own)}"
