"""What no single key of config.json shows: whether they fit each other, the files, and the model.

What is wrong is told in a sentence with the numbers and the remedy.
"""

import difflib
import math
import os
import re
from pathlib import Path

from picotron_min.model_config import ModelConfig
from picotron_min.pipeline_schedule import chunks_problem
from picotron_min.runtime.config import Config, ConfigError, choice, shown
from picotron_min.runtime.json_file import read_json
from picotron_min.runtime.public_models import PRESETS, find_preset, from_hf


def problems_of(config: Config) -> list[str]:
    """Why the sections do not fit each other, or the files that are there."""
    problems = _run_problems(config) + _path_problems(config)
    # A model on the hub is fetched, and checked, when the run starts.
    if find_preset(config.model.name) or not _on_hub(config.model.name):
        try:
            resolve_model(config)
        except ConfigError as error:
            problems += error.problems
    return problems


def _run_problems(config: Config) -> list[str]:
    d, t = config.distributed, config.training
    # The ring cuts a sequence into two pieces a rank, tensor parallelism cuts a rank's part again.
    pieces = d.cp_size * (2 if d.cp_engine == "ring" and d.cp_size > 1 else 1)
    pieces = math.lcm(pieces, d.cp_size * (d.tp_size if d.sequence_parallel else 1))
    shorter = t.seq_length // pieces * pieces
    checks = [
        (
            t.warmup_steps >= t.total_train_steps,
            f"warmup_steps={t.warmup_steps} leaves nothing of"
            f" total_train_steps={t.total_train_steps}: use at most {t.total_train_steps - 1}",
        ),
        (
            t.min_learning_rate > t.learning_rate,
            f"min_learning_rate={t.min_learning_rate} is above learning_rate={t.learning_rate}:"
            f" use at most {t.learning_rate}",
        ),
        (
            t.max_tokens and t.max_tokens < config.tokens_per_step,
            f"max_tokens={t.max_tokens} is less than the {config.tokens_per_step} tokens of one"
            " step: raise it, or make the step smaller",
        ),
        (
            d.use_cpu and d.backend == "nccl",
            "backend=nccl needs GPUs but use_cpu=true: set distributed.backend to auto or gloo,"
            " or distributed.use_cpu to false",
        ),
        (
            t.seq_length % pieces,
            f"seq_length={t.seq_length} cannot be cut into {pieces} equal pieces, as"
            f' cp_size={d.cp_size} with cp_engine="{d.cp_engine}", and tp_size={d.tp_size} with'
            f" sequence_parallel={shown(d.sequence_parallel)} need: use"
            f" {choice(n for n in (shorter, shorter + pieces) if n)}",
        ),
        (
            config.logging.trace_file and t.total_train_steps < 5,
            f"trace_file={config.logging.trace_file} gets the third to the fifth step, and"
            f" total_train_steps={t.total_train_steps}: use at least 5, or no trace_file",
        ),
        (
            d.pp_chunks > 1 and d.pp_size == 1,
            f"pp_chunks={d.pp_chunks} needs more than one rank to deal the stages to, and"
            f" pp_size={d.pp_size}: use pp_chunks 1, or a larger pp_size",
        ),
        (
            chunks := chunks_problem(d.pp_engine, d.pp_chunks),
            f'pp_engine="{d.pp_engine}" does not fit pp_chunks={d.pp_chunks}: {chunks}',
        ),
    ]
    return [message for wrong, message in checks if wrong]


def _path_problems(config: Config) -> list[str]:
    problems = _missing("dataset.name", config.dataset.name, ["stdlib"])
    if config.model.weights:
        problems += _missing("model.weights", config.model.weights, [])
    problems += _missing("dataset.tokenizer", config.dataset.tokenizer, ["bytes"])
    save_dir, load_path = config.checkpoint.save_dir, config.checkpoint.load_path
    for key in ("metrics_file", "trace_file"):
        if (path := getattr(config.logging, key)) and os.path.isdir(path):
            problems.append(f"logging.{key}={path} is a folder: name a file")
    if os.path.isfile(save_dir):
        problems.append(f"checkpoint.save_dir={save_dir} is a file: name a folder")
    if load_path not in (None, "latest") and not Path(load_path, "state.json").is_file():
        there = sorted(Path(save_dir).glob("step-*/state.json"))
        example = there[-1].parent if there else f"{save_dir}/step-00000010"
        problems.append(
            f"checkpoint.load_path={load_path} is no checkpoint (it has no state.json):"
            f" use latest, or a folder like {example}"
        )
    return problems


FILES = (".txt", ".json", ".jsonl", ".parquet")


def _on_hub(name: str) -> bool:
    """Whether a name can only be an id on the Hugging Face hub: owner/name, and nothing local."""
    local = name.endswith(FILES) or os.path.exists(name)
    return not local and bool(re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", name))


def _missing(key: str, name: str, built_in: list[str]) -> list[str]:
    if name in built_in or os.path.exists(name) or _on_hub(name):
        return []
    if "/" in name or name.endswith(FILES):
        return [f"{key}={name} does not exist: there is no {os.path.abspath(name)}"]
    near = difflib.get_close_matches(name, built_in, cutoff=0.3) or built_in
    return [f"{key}={name} is not known: use {choice(near)}, a local path, or a hub id owner/name"]


def resolve_model(config: Config) -> ModelConfig:
    """The model's numbers: those that `model.name` stands for, with the overrides applied.

    Raises ConfigError where they are no Llama's, cannot be found, or do not fit the run. A preset
    comes before a folder of the same name (write ./name), a folder before a hub id. Only a hub id
    needs the network.
    """
    preset = find_preset(config.model.name)
    try:
        model_config = preset or from_hf(_hugging_face_config(config.model.name))
        model_config = model_config.override(**config.model.overrides)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"model.name={config.model.name}: {error}") from None
    if problems := model_problems(config, model_config):
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
        raise ConfigError(
            f"cannot fetch config.json of model.name={name} from the hub"
            f" ({str(error).strip().partition(chr(10))[0]}): check the spelling, the network and"
            " your access, or use a preset or a local folder"
        ) from None
    return read_json(Path(path))


def model_problems(config: Config, model_config: ModelConfig) -> list[str]:
    """Why the run does not fit the model's numbers."""
    d, seq_length, problems = config.distributed, config.training.seq_length, []
    cut = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
    common = math.gcd(*(getattr(model_config, name) for name in cut))
    good = choice(n for n in range(1, common + 1) if common % n == 0)
    for name in cut:
        if (size := getattr(model_config, name)) % d.tp_size:
            problems.append(f"tp_size={d.tp_size} does not divide {name}={size}: use {good}")
    heads = model_config.num_attention_heads // d.tp_size
    if d.cp_engine == "ulysses" and heads % d.cp_size:
        good = choice(n for n in range(1, heads + 1) if heads % n == 0)
        problems.append(
            f'cp_engine="ulysses" with cp_size={d.cp_size} does not divide the {heads} heads of a'
            f" rank (num_attention_heads={model_config.num_attention_heads} / tp_size={d.tp_size}):"
            f' use cp_size {good}, or cp_engine "ring"'
        )
    rows = math.ceil((V := model_config.vocab_size) / d.tp_size)
    if (d.tp_size - 1) * rows >= V:
        problems.append(
            f"tp_size={d.tp_size} leaves a rank without rows of vocab_size={V},"
            f" dealt out {rows} a rank: use a smaller tp_size"
        )
    stages, layers = d.pp_size * d.pp_chunks, model_config.num_hidden_layers
    if d.pp_layers and (len(d.pp_layers), sum(d.pp_layers)) != (stages, layers):
        problems.append(
            f"pp_layers={d.pp_layers} has {len(d.pp_layers)} stages with {sum(d.pp_layers)} layers,"
            f" not pp_size={d.pp_size} x pp_chunks={d.pp_chunks} = {stages} stages with"
            f" num_hidden_layers={layers}: correct it, or set it to null"
        )
    if stages > layers:
        problems.append(
            f"pp_size={d.pp_size} x pp_chunks={d.pp_chunks} makes {stages} stages of"
            f" num_hidden_layers={layers}: use at most {layers} stages"
        )
    if seq_length > (longest := model_config.max_position_embeddings):
        problems.append(
            f"seq_length={seq_length} is above max_position_embeddings={longest} of"
            f" model.name={config.model.name}: use at most {longest}, or set"
            f" model.max_position_embeddings to {seq_length}"
        )
    if config.dataset.tokenizer == "bytes" and model_config.vocab_size < 257:
        problems.append(
            f"vocab_size={model_config.vocab_size} is too small for dataset.tokenizer=bytes"
            " (256 bytes and end of text): use at least 257"
        )
    return problems
