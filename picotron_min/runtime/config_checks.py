"""What no single key of config.json shows: whether the keys fit each other, files and model.

Each problem is a sentence with the numbers and the remedy.
"""

import difflib
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path

from picotron_min.model_config import ModelConfig
from picotron_min.pipeline_schedule import chunks_problem
from picotron_min.runtime.config import Config, ConfigError, choice, counted, shown
from picotron_min.runtime.json_file import read_json
from picotron_min.runtime.public_models import (
    PRESETS,
    check_numbers,
    find_preset,
    from_hf,
    tokenizer_of,
)


def problems_of(config: Config) -> list[str]:
    """Why the sections fit neither each other nor the files on this machine."""
    checks = (_training_problems, _layout_problems, _path_problems)
    problems = [problem for check in checks for problem in check(config)]
    if is_known_here(config.model.name):
        try:
            resolve_model(config)
        except ConfigError as error:
            problems += error.problems
    return problems


def _training_problems(config: Config) -> Iterator[str]:
    t, trace_file = config.training, config.logging.trace_file
    steps, tokens = t.total_train_steps, config.tokens_per_step
    if t.warmup_steps >= steps:
        remedy = f"use at most {steps - 1}"
        yield f"warmup_steps={t.warmup_steps} leaves nothing of total_train_steps={steps}: {remedy}"
    if (lowest := t.min_learning_rate) > (peak := t.learning_rate):
        yield f"min_learning_rate={lowest} is above learning_rate={peak}: use at most {peak}"
    if t.max_tokens and t.max_tokens < tokens:
        remedy = "raise it, or make the step smaller"
        yield f"max_tokens={t.max_tokens} is less than the {tokens} tokens of one step: {remedy}"
    if trace_file and steps < 5:
        why = f"records the third to the fifth step, and total_train_steps={steps}"
        yield f"trace_file={trace_file} {why}: use at least 5, or no trace_file"


def _layout_problems(config: Config) -> Iterator[str]:
    d, seq_length = config.distributed, config.training.seq_length
    if d.use_cpu and d.backend == "nccl":
        remedy = "set distributed.backend to auto or gloo, or distributed.use_cpu to false"
        yield f"backend=nccl needs GPUs but use_cpu=true: {remedy}"
    # The ring gives each rank two pieces of a sequence; tensor parallelism splits a rank's part.
    ring = d.cp_size * (2 if d.cp_engine == "ring" and d.cp_size > 1 else 1)
    pieces = math.lcm(ring, d.cp_size * (d.tp_size if d.sequence_parallel else 1))
    if seq_length % pieces:
        shorter = seq_length // pieces * pieces
        good = choice(n for n in (shorter, shorter + pieces) if n)
        yield (
            f"seq_length={seq_length} cannot be cut into {pieces} equal pieces, as"
            f' cp_size={d.cp_size} with cp_engine="{d.cp_engine}", and tp_size={d.tp_size} with'
            f" sequence_parallel={shown(d.sequence_parallel)} need: use {good}"
        )
    if d.pp_chunks > 1 and d.pp_size == 1:
        yield (
            f"pp_chunks={d.pp_chunks} needs more than one rank to deal the stages to, and"
            f" pp_size={d.pp_size}: use pp_chunks 1, or a larger pp_size"
        )
    if problem := chunks_problem(d.pp_engine, d.pp_chunks):
        yield f'pp_engine="{d.pp_engine}" does not fit pp_chunks={d.pp_chunks}: {problem}'


def _path_problems(config: Config) -> Iterator[str]:
    save_dir, load_path = config.checkpoint.save_dir, config.checkpoint.load_path
    yield from _missing("dataset.name", config.dataset.name, ["stdlib"])
    if config.model.weights:
        yield from _missing("model.weights", config.model.weights, [])
    if (tokenizer := config.tokenizer) != tokenizer_of(config.model.name):
        yield from _missing("dataset.tokenizer", tokenizer, ["bytes"])
    elif Path(tokenizer).is_dir() and not re.search(
        r"token|vocab|\.model", str(os.listdir(tokenizer))
    ):
        remedy = "set dataset.tokenizer to a folder, a tokenizer's .json file, a hub id, or bytes"
        yield f"model.name={tokenizer} holds no tokenizer: {remedy}"
    yield from _unwritable("checkpoint.save_dir", save_dir, "folder")
    yield from _unwritable("dataset.cache_dir", config.dataset.cache_dir, "folder")
    for key in ("metrics_file", "trace_file"):
        if path := getattr(config.logging, key):
            yield from _unwritable(f"logging.{key}", path, "file")
    if load_path not in (None, "latest") and not Path(load_path, "state.json").is_file():
        there = sorted(Path(save_dir).glob("step-*/state.json"))
        example = there[-1].parent if there else f"{save_dir}/step-00000010"
        why = f"checkpoint.load_path={load_path} is no checkpoint (it has no state.json)"
        yield f"{why}: use latest, or a folder like {example}"


def _unwritable(key: str, path: str, kind: str) -> Iterator[str]:
    """Why a run cannot write to a path: what exists of it decides, nothing is made."""
    whole = there = Path(path).absolute()
    while not os.path.exists(there):
        there = there.parent
    if there == whole and there.is_dir() != (kind == "folder"):
        yield f"{key}={path} is a {'folder' if there.is_dir() else 'file'}: name a {kind}"
    elif there != whole and not there.is_dir():
        yield f"{key}={path} cannot be made, since {there} is a file: name another {kind}"
    elif not os.access(there, os.W_OK):
        yield f"{key}={path} cannot be written, since you may not write to {there}: name another"


FILES = (".txt", ".json", ".jsonl", ".parquet")


def _on_hub(name: str) -> bool:
    """Whether a name can only be an id on the Hugging Face hub: owner/name, and nothing local."""
    local = name.endswith(FILES) or os.path.exists(name)
    return not local and bool(re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", name))


def is_known_here(model_name: str) -> bool:
    """Whether a model's numbers are known without the network, on which only a run relies."""
    return bool(find_preset(model_name)) or not _on_hub(model_name)


def uses_hub(config: Config) -> bool:
    """Whether a name has to be looked up on the hub."""
    names = [config.model.weights, config.dataset.name, config.tokenizer]
    return not is_known_here(config.model.name) or any(name and _on_hub(name) for name in names)


def _missing(key: str, name: str, built_in: list[str]) -> list[str]:
    if name in built_in or os.path.exists(name) or _on_hub(name):
        return []
    if "/" in name or name.endswith(FILES):
        return [f"{key}={name} does not exist: there is no {os.path.abspath(name)}"]
    near = difflib.get_close_matches(name, built_in, cutoff=0.3) or built_in
    return [f"{key}={name} is not known: use {choice(near)}, a local path, or a hub id owner/name"]


def resolve_model(config: Config) -> ModelConfig:
    """The model's numbers: those that `model.name` stands for, with the overrides applied.

    Raises ConfigError where they define no Llama, cannot be found, or do not fit the run. A preset
    comes before a folder of the same name (write ./name), a folder before a hub id. Only a hub id
    needs the network.
    """
    name, overrides = config.model.name, config.model.overrides
    try:
        check_numbers(overrides)
        model_config = find_preset(name) or from_hf(_hugging_face_config(name))
        model_config = model_config.override(**overrides)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"model.name={name}: {error}") from None
    checks = (model_problems, _vocabulary_problems)
    if problems := [problem for check in checks for problem in check(config, model_config)]:
        raise ConfigError(*problems)
    return model_config


def _hugging_face_config(name: str) -> dict:
    """The config.json of a local folder, or of a model on the hub."""
    if not _on_hub(name):
        if missing := _missing("model.name", name, [preset.split("/")[-1] for preset in PRESETS]):
            raise ConfigError(*missing)
        return read_json(Path(name, "config.json"))
    from huggingface_hub import hf_hub_download

    try:
        path = hf_hub_download(name, "config.json")
    except Exception as error:  # a dozen kinds, from no network to a gated model
        why = str(error).strip().partition("\n")[0]
        remedy = (
            "check the spelling, the network and your access, or use a preset or a local folder"
        )
        where = f"config.json of model.name={name} from the hub"
        raise ConfigError(f"cannot fetch {where} ({why}): {remedy}") from None
    return read_json(Path(path))


def model_problems(config: Config, model_config: ModelConfig) -> Iterator[str]:
    """Why the layout and the sequence do not fit the model's numbers."""
    layout, seq_length = config.layout, config.workload.seq_length
    tp, cp, V = layout.tp, layout.cp, model_config.vocab_size
    cut = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
    good = _divisors(math.gcd(*(getattr(model_config, name) for name in cut)))
    for name in cut:
        if (size := getattr(model_config, name)) % tp:
            yield f"tp_size={tp} does not divide {name}={size}: use {good}"
    heads = model_config.num_attention_heads // tp
    if layout.cp_engine == "ulysses" and heads % cp:
        yield (
            f'cp_engine="ulysses" with cp_size={cp} does not divide the {counted(heads, "head")} of'
            f" a rank (num_attention_heads={model_config.num_attention_heads} / tp_size={tp}):"
            f' use cp_size {_divisors(heads)}, or cp_engine "ring"'
        )
    if (tp - 1) * (rows := math.ceil(V / tp)) >= V:
        why = f"leaves a rank without rows of vocab_size={V}, which are split {rows} a rank"
        yield f"tp_size={tp} {why}: use a smaller tp_size"
    made = f"pp_size={layout.pp} x pp_chunks={layout.pp_chunks}"
    stages, layers, given = layout.num_stages, model_config.num_hidden_layers, layout.pp_layers
    if given and (len(given), sum(given)) != (stages, layers):
        has = f"{counted(len(given), 'stage')} with {counted(sum(given), 'layer')}"
        needs = f"{made} = {counted(stages, 'stage')} with num_hidden_layers={layers}"
        yield f"pp_layers={list(given)} has {has}, not {needs}: correct it, or set it to null"
    if stages > layers:
        most = counted(layers, "stage")
        yield f"{made} makes {stages} stages of num_hidden_layers={layers}: use at most {most}"
    if seq_length > (longest := model_config.max_position_embeddings):
        where = f"max_position_embeddings={longest} of model.name={config.model.name}"
        remedy = f"use at most {longest}, or set model.max_position_embeddings to {seq_length}"
        yield f"seq_length={seq_length} is above {where}: {remedy}"


def _divisors(number: int) -> str:
    return choice(n for n in range(1, number + 1) if number % n == 0)


def _vocabulary_problems(config: Config, model_config: ModelConfig) -> Iterator[str]:
    """Why the tokenizer's ids do not fit the model's, as far as they are known on this machine."""
    name, V, ids = config.tokenizer, model_config.vocab_size, _count_ids(config.tokenizer)
    if ids > V:
        why = f"is too small for the {ids} token ids of dataset.tokenizer={name}"
        yield f"vocab_size={V} {why}: use at least {ids}"
    if name == "bytes" and 2 * ids < V and not config.model.vocab_size:
        yield (
            f"dataset.tokenizer=bytes has {ids} token ids, far fewer than vocab_size={V}"
            f" of model.name={config.model.name}: leave dataset.tokenizer out to use the model's"
            f" own, or set model.vocab_size to {ids} (or to {V} if you mean it)"
        )


def _count_ids(tokenizer: str) -> int:
    """How many ids a tokenizer has; 0 if no file on this machine shows it."""
    path = Path(tokenizer, "tokenizer.json") if os.path.isdir(tokenizer) else Path(tokenizer)
    if tokenizer == "bytes" or not path.is_file():
        return 257 if tokenizer == "bytes" else 0  # 256 bytes and end of text
    from tokenizers import Tokenizer

    try:
        return 1 + max(Tokenizer.from_file(str(path)).get_vocab().values())
    except Exception as error:  # the package raises nothing narrower
        raise ConfigError(f"dataset.tokenizer={tokenizer}: cannot read {path}: {error}") from None
