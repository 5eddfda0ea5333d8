"""Checks of config.json that no single key allows: its keys fit each other, files and the model."""

import difflib
import math
import os
import re
from collections.abc import Iterator
from operator import attrgetter

from picotron_min.extensions.settings import LARGEST_BETA2, ModelConfig, chunks_problem
from picotron_min.runtime.architectures import from_hf
from picotron_min.runtime.config import Config, ConfigError
from picotron_min.runtime.corpus import COMPRESSION, READERS
from picotron_min.runtime.hub import fetch
from picotron_min.runtime.json_file import read_json
from picotron_min.runtime.model_checks import model_problems
from picotron_min.runtime.public_models import PRESETS, find_preset
from picotron_min.runtime.wording import choice, divisors, explained


def problems_of(config: Config) -> Iterator[str]:
    """Sentences, with numbers and remedy: what does not fit, as far as this machine shows it."""
    for check in (_training_problems, layout_problems, _name_problems, _path_problems):
        yield from check(config)
    try:
        if is_known_here(config.model.name):
            resolve_model(config)
    except ValueError as error:
        yield from getattr(error, "problems", [str(error)])


def _training_problems(config: Config) -> Iterator[str]:
    t, tokens, steps = config.training, config.tokens_per_step, config.training.total_train_steps
    lowest, peak = t.min_learning_rate, t.learning_rate
    decays = {"betas[1]": t.betas[1]} | ({"momentum": t.momentum} if t.optimizer == "muon" else {})
    for name, decay in decays.items():
        if t.moments == "bfloat16" and decay > LARGEST_BETA2:
            why = f'{name}={decay} with moments="bfloat16": its average freezes by rounding'
            yield f"{why}: use at most {LARGEST_BETA2}, or moments float32"
    if t.warmup_steps >= steps:
        yield f"warmup_steps={t.warmup_steps}: must be below total_train_steps={steps}"
    if lowest > peak:
        yield f"min_learning_rate={lowest} is above learning_rate={peak}: use at most {peak}"
    if t.max_tokens and t.max_tokens < tokens:
        yield f"max_tokens={t.max_tokens}: must be at least {tokens}, the tokens of one step"
    if t.moe_pad_expert_input_to_capacity and not t.moe_expert_capacity_factor:
        needs = "moe_pad_expert_input_to_capacity=true needs moe_expert_capacity_factor"
        yield f"{needs}: set it, for example to 1.25"
    if (factor := t.moe_expert_rank_capacity_factor or 1) < 1:
        why = "below 1, the rows of a rank where all experts get as many tokens"
        yield f"moe_expert_rank_capacity_factor={factor} is {why}: use 1 or more, for example 1.5"
    if (bias := t.moe_router_force_biased or 0) > 0:
        why = "would be new in each forward, of which every layout has a number of its own"
        yield f"moe_router_force_biased={bias} {why}: use {-bias}, one bias a layer"
    if config.dataset.packing == "bfd" and not config.dataset.document_mask:
        why = 'packing="bfd" packs whole documents, which document_mask=false does not keep apart'
        yield f'{why}: set document_mask to true, or packing to "wrapped"'


def layout_problems(config: Config) -> Iterator[str]:
    """What does not fit whatever the model is."""
    d, seq_length = config.distributed, config.training.seq_length
    # The ring gives each rank two pieces of a sequence; tensor parallelism splits a rank's part.
    ring = 2 * d.cp_size if d.cp_engine == "ring" and d.cp_size > 1 else d.cp_size
    pieces = math.lcm(ring, d.cp_size * (d.tp_size if d.sequence_parallel else 1))
    if rest := seq_length % pieces:
        good = choice(n for n in (seq_length - rest, seq_length - rest + pieces) if n)
        causes = [f'cp_size={d.cp_size} with cp_engine="{d.cp_engine}"'] * (d.cp_size > 1)
        if d.tp_size > 1 and d.sequence_parallel:
            causes.append(f"tp_size={d.tp_size} with sequence_parallel=true")
        why = f"which {' and '.join(causes)} need{'s' * (len(causes) == 1)}"
        yield f"seq_length={seq_length} cannot be cut into {pieces} equal pieces, {why}: use {good}"
    if d.tp_overlap and not (d.sequence_parallel and d.overlap):
        needs = "sequence_parallel=true and overlap=true"
        yield f"tp_overlap=true needs {needs}: set these, or tp_overlap to false"
    ranks, needed = d.dp_size * d.cp_size * d.tp_size, d.ep_size * d.etp_size
    if ranks % needed:
        made = f"ep_size={d.ep_size} x etp_size={d.etp_size} = {needed} does not divide"
        of = f"dp_size={d.dp_size} x cp_size={d.cp_size} x tp_size={d.tp_size} = {ranks}"
        yield f"{made} {of}: use a product of {divisors(ranks)}"
    given = f'pp_engine="{d.pp_engine}" with pp_chunks={d.pp_chunks}'
    if d.pp_size == 1 and (d.pp_chunks > 1 or chunks_problem(d.pp_engine, 1)):
        yield f"{given} needs more than pp_size=1: use more ranks, or 1f1b with pp_chunks 1"
    elif problem := chunks_problem(d.pp_engine, d.pp_chunks):
        yield f"{given} does not fit: {problem}"


def _name_problems(config: Config) -> Iterator[str]:
    built_in = {"dataset.name": ["stdlib"], "model.weights": [], "dataset.tokenizer": ["bytes"]}
    for key, known in built_in.items():
        if (name := attrgetter(key)(config)) and (problem := _missing(name, known)):
            yield f"{key}={name}: {problem}"
    start = config.checkpoint.load_path or "latest"
    is_near = start != "latest" and difflib.get_close_matches(start, ["latest"])
    if is_near and not os.path.exists(start):
        yield f'checkpoint.load_path={start}: there is no such folder: did you mean "latest"?'


def _path_problems(config: Config) -> Iterator[str]:
    """What a run writes is in places of its own."""
    save_dir, taken = config.checkpoint.save_dir, {}
    paths = {"save_dir": save_dir, "run.jsonl": os.path.join(save_dir, "run.jsonl")}
    paths |= {"metrics_file": config.metrics_file, "trace_file": config.logging.trace_file}
    for key, name in paths.items():
        if name and (other := taken.setdefault(os.path.realpath(name), key)) != key:
            yield f"{key}={name}: the run itself writes {other} there: name another file"


def _missing(name: str, built_in: list[str]) -> str | None:
    """The remedy for a name that is neither built in, nor on this machine, nor on the hub."""
    if name in built_in or os.path.exists(name) or _on_hub(name):
        return None
    if "/" in name or name.endswith(FILES):
        return f"there is no {os.path.abspath(name)}: name a path that exists, or a hub id"
    near = difflib.get_close_matches(name, built_in, cutoff=0.3) or built_in
    return f"use {choice([*near, 'a local path', 'a hub id owner/name'])}"


FILES = (*READERS, *COMPRESSION, ".npy", ".bin")


def _on_hub(name: str) -> bool:
    """Whether a name can only be an id on the Hugging Face hub: owner/name, and nothing local."""
    is_local = name.endswith(FILES) or os.path.lexists(name)  # also a link to nothing
    return not is_local and bool(re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", name))


def is_known_here(model_name: str) -> bool:
    """Whether a model's numbers are known without the network, on which only a run relies."""
    return bool(find_preset(model_name)) or not _on_hub(model_name)


def resolve_model(config: Config) -> ModelConfig:
    """The numbers of `model.name` with the overrides; ValueError if they do not fit the run.

    A preset comes before a folder of the same name (write ./name), a folder before a hub id.
    """
    name = config.model.name
    with explained(f"model.name={name}"):
        if not (model_config := find_preset(name)):
            if problem := _missing(name, [preset.split("/")[-1] for preset in PRESETS]):
                raise ValueError(problem)
            model_config = from_hf(read_json(fetch(name, "config.json") / "config.json"))
        model_config = model_config.override(**config.model.overrides)
    if problems := [*model_problems(config, model_config), *_bytes_problems(config, model_config)]:
        raise ConfigError(*problems)
    return model_config


def _bytes_problems(config: Config, model_config: ModelConfig) -> Iterator[str]:
    """Whether ids fit the model; other tokenizers are checked when they have been loaded."""
    V, what = model_config.vocab_size, "token ids of dataset.tokenizer=bytes"
    if config.tokenizer == "bytes" and V < 257:
        yield f"vocab_size={V}: use at least 257, the {what}"
    elif config.tokenizer == "bytes" and V > 2 * 257 and not config.model.vocab_size:
        why = f"vocab_size={V} of model.name={config.model.name} is far above the 257 {what}"
        yield f"{why}: leave it out for the model's own, or set vocab_size"
