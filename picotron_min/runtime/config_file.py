"""config.json read and checked: every mistake in it is told at once, in plain words.

torch is not imported here: a mistake is told at once, before any process starts.
"""

import difflib
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import get_args

from pydantic import ValidationError

from picotron_min.runtime.config import AXES, SECTIONS, Config, ConfigError, choice, keys_of, shown
from picotron_min.runtime.config_checks import problems_of
from picotron_min.runtime.json_file import read_json_strictly


def load_config(path: str | os.PathLike, processes: int | None = None) -> Config:
    """Read and check a config.json. Raises ConfigError with every problem in it.

    `processes` is how many were started, if somebody else started them.
    """
    try:
        raw, repeated = read_json_strictly(Path(path))
    except ValueError as error:
        raise ConfigError(str(error)) from None
    problems = [f"{key} is given more than once: keep one" for key in repeated]
    return parse_config(raw, problems, lambda config: _launch_problems(config, processes, path))


def _launch_problems(config: Config, processes: int | None, path: str | os.PathLike) -> list[str]:
    needed, rest = config.world_size, config.world_size // config.distributed.dp_size
    if processes in (None, needed):
        return []
    layout = " x ".join(f"{axis}={getattr(config.distributed, axis)}" for axis in AXES)
    also = "" if processes % rest else f", or set distributed.dp_size to {processes // rest}"
    return [
        f"this config needs {needed} process{'es' if needed > 1 else ''} ({layout})"
        f" but was started with {processes}: run"
        f"  torchrun --nproc_per_node {needed} train.py --config {path}{also}"
    ]


def parse_config(
    raw: dict,
    problems: Iterable[str] = (),
    more_checks: Callable[[Config], list[str]] | None = None,
) -> Config:
    """Check a config given as a dict. Raises ConfigError with every problem, `problems` first."""
    problems, bad = list(problems), set()
    try:
        config = Config.model_validate(raw)
    except ValidationError as error:
        for e in error.errors():
            section, *key = e["loc"][:2]
            problems.append(_describe(e, raw))
            bad |= {(section, name) for name in key or [None, *keys_of(section)]}
        # The rest is checked with defaults in place of what is bad, so that the user hears of
        # everything in one go.
        config = Config.model_validate(
            {
                section: {key: value for key, value in keys.items() if (section, key) not in bad}
                for section, keys in raw.items()
                if (section, None) not in bad
            }
        )
    # What is now said about a bad key is about its default: left out.
    bad_names = {name for section, key in bad for name in (key, f"{section}.{key}")}
    for problem in problems_of(config) + (more_checks(config) if more_checks else []):
        if bad_names.isdisjoint(re.findall(r"([\w.]+)=", problem)):
            problems.append(problem)
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
    expected = error["msg"].replace("Input should", "must")
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


def _unknown(section: str, key: str | None = None) -> str:
    """What to say of a key (or section) that is not known: where it belongs, or the nearest."""
    where, own = (f"{section}.{key}", keys_of(section)) if key else (section, SECTIONS)
    word = key or section
    if homes := [name for name in SECTIONS if word in keys_of(name)]:
        return f"{where} is in the wrong place: {word} belongs in {choice(homes)}"
    everywhere = {key.lower(): f"{name}.{key}" for name in SECTIONS for key in keys_of(name)}
    for known in ({name.lower(): name for name in own}, everywhere):
        if near := difflib.get_close_matches(word.lower(), known, n=1):
            return f"{where} is not known: did you mean {known[near[0]]}?"
    return f"{where} is not known: use {choice(own)}"
