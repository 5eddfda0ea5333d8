"""Checks of config.json that no single key allows: its keys fit each other, files and the model."""

import math
import os
import re
from collections.abc import Iterator
from difflib import get_close_matches
from operator import attrgetter

from picotron_min.costs import layers_of_stages
from picotron_min.extensions.settings import LARGEST_BETA2, Mixture, ModelConfig, chunks_problem
from picotron_min.runtime.architectures import from_hf
from picotron_min.runtime.config import Config, ConfigError
from picotron_min.runtime.corpus import COMPRESSION, IDS, READERS
from picotron_min.runtime.hub import fetch
from picotron_min.runtime.json_file import read_json
from picotron_min.runtime.public_models import PRESETS, find_preset
from picotron_min.runtime.wording import choice, divisors, explained, shown

FP8_MULTIPLE = 16  # of all sizes of a product in 8 bits, on GPUs
OF_EXPERTS = {name: getattr(Mixture, name) for name in Mixture.__annotations__}  # defaults


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
    t, steps = config.training, config.training.total_train_steps
    lowest, peak = t.min_learning_rate, t.learning_rate
    for name, decay in {"betas[1]": t.betas[1], "momentum": t.momentum}.items():
        if t.moments == "bfloat16" and decay > LARGEST_BETA2:
            why = f'{name}={decay} with moments="bfloat16": its average freezes by rounding'
            yield f"{why}: use at most {LARGEST_BETA2}, or moments float32"
    if t.warmup_steps >= steps:
        yield f"warmup_steps={t.warmup_steps}: must be below total_train_steps={steps}"
    if lowest > peak:
        yield f"min_learning_rate={lowest} is above learning_rate={peak}: use at most {peak}"
    if t.moe_pad_expert_input_to_capacity and not t.moe_expert_capacity_factor:
        needs = "moe_pad_expert_input_to_capacity=true needs moe_expert_capacity_factor"
        yield f"{needs}: set it, for example to 1.25"
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
        why = f'which cp_size={d.cp_size} with cp_engine="{d.cp_engine}" and tp_size={d.tp_size}'
        why += f" with sequence_parallel={shown(d.sequence_parallel)} need"
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
    if not find_preset(config.model.name):
        built_in["model.name"] = [preset.split("/")[-1] for preset in PRESETS]
    for key, known in built_in.items():
        if (name := attrgetter(key)(config)) and (problem := _missing(name, known)):
            yield f"{key}={name}: {problem}"


def _path_problems(config: Config) -> Iterator[str]:
    """What a run writes is in places of its own."""
    save_dir, log = config.checkpoint.save_dir, config.logging
    paths = (save_dir, os.path.join(save_dir, "run.jsonl"), config.metrics_file, log.trace_file)
    paths = [os.path.realpath(path) for path in paths if path]
    if len({*paths}) < len(paths):
        what = "save_dir, run.jsonl in it, metrics_file and trace_file"
        yield f"{what} must differ, not be {', '.join(paths)}: name another file"


def _missing(name: str, built_in: list[str]) -> str | None:
    """The remedy for a name that is neither built in, nor on this machine, nor on the hub."""
    if name in built_in or os.path.exists(name) or _on_hub(name):
        return None
    good = [*get_close_matches(name, built_in, cutoff=0.3), "a path", "a hub id owner/name"]
    return f"there is no {os.path.abspath(name)}: use {choice(good)}"


FILES = (*READERS, *COMPRESSION, *IDS)


def _on_hub(name: str) -> bool:
    """Whether a name can only be an id on the Hugging Face hub: owner/name, and nothing local."""
    is_local = name.endswith(FILES) or os.path.lexists(name)  # also a link to nothing
    return not is_local and bool(re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", name))


def is_known_here(model_name: str) -> bool:
    """Whether a model's numbers are known without the network, on which only a run relies."""
    return bool(find_preset(model_name)) or os.path.exists(model_name)


def resolve_model(config: Config) -> ModelConfig:
    """The numbers of `model.name` with the overrides; ValueError if they do not fit the run.

    A preset comes before a folder of the same name (write ./name), a folder before a hub id.
    """
    name = config.model.name
    with explained(f"model.name={name}"):
        if not (model_config := find_preset(name)):
            model_config = from_hf(read_json(fetch(name, "config.json") / "config.json"))
        model_config = model_config.override(**config.model.overrides)
    if problems := [*model_problems(config, model_config)]:
        raise ConfigError(*problems)
    return model_config


def model_problems(config: Config, c: ModelConfig) -> Iterator[str]:
    """Sentences, with numbers and remedy: why the config does not fit the model's numbers."""
    layout, seq_length = config.layout, config.training.seq_length
    tp, cp, longest = layout.tp, layout.cp, c.max_position_embeddings
    heads = ("num_attention_heads", "num_key_value_heads")
    cut = {f"{key}={getattr(c, key)}": getattr(c, key) for key in heads} | _mlps(c)
    # The ranks divide tokens among them before these go to experts, also without sequence_parallel.
    if c.num_local_experts and not layout.sequence_parallel and seq_length % cp == 0:
        cut[f"seq_length={seq_length} / cp_size={cp} = {seq_length // cp}"] = seq_length // cp
    yield from _uneven("tp_size", tp, cut)
    if layout.cp_engine == "ulysses":
        own = c.num_attention_heads // tp
        made = f"num_attention_heads={c.num_attention_heads} / tp_size={tp} = {own}"
        yield from _uneven("cp_size", cp, {made: own}, or_else=', or cp_engine="ring"')
    if seq_length > longest:
        where = f"max_position_embeddings={longest} of model.name={config.model.name}"
        yield f"seq_length={seq_length} is above {where}: use at most {longest}, or raise it"
    if (depths := c.num_nextn_predict_layers) and not config.training.mtp_loss_scaling_factor:
        why = f"mtp_loss_scaling_factor=0 leaves num_nextn_predict_layers={depths} untrained"
        yield f"{why}: raise it, or num_nextn_predict_layers to 0"
    for check in (_stage_problems, _expert_problems, _fp8_problems):
        yield from check(config, c)


def _mlps(c: ModelConfig) -> dict[str, int]:
    """The sizes of the MLPs that all tokens use, as messages show them."""
    M, F, n, sizes = c.intermediate_size, c.moe_intermediate_size, c.n_shared_experts, {}
    if not all(map(c.has_experts, range(c.num_hidden_layers))):
        sizes[f"intermediate_size={M}"] = M
    if c.num_local_experts and n:
        sizes[f"n_shared_experts={n} x moe_intermediate_size={F} = {n * F}"] = n * F
    return sizes


def _uneven(key: str, size: int, numbers: dict[str, int], ranks=0, or_else="") -> Iterator[str]:
    """Which of the numbers a size does not divide, and the sizes that divide all of them."""
    for what, number in numbers.items():
        if number % size:
            good = divisors(math.gcd(ranks, *numbers.values()))
            yield f"{key}={size} does not divide {what}: use {good}{or_else}"


def _stage_problems(config: Config, c: ModelConfig) -> Iterator[str]:
    layout, layers, offload = config.layout, c.num_hidden_layers, config.model.offload
    stages, given = layout.num_stages, layout.pp_layers
    made = f"pp_size={layout.pp} x pp_chunks={layout.pp_chunks} = {stages}"
    if given and (len(given), sum(given)) != (stages, layers):
        needs = f"{made} numbers with the sum num_hidden_layers={layers}"
        yield f"pp_layers={list(given)}: must be {needs}, or null"
    if stages > layers:
        yield f"{made} stages exceed num_hidden_layers={layers}: use at most {layers}"
    elif offload:
        fewest = min(layers_of_stages(c, layout, config.training.seq_length))
        if offload >= fewest:
            why = f"the last layer of a stage stays on the device, and the smallest has {fewest}"
            yield f"offload={offload}: {why}: use at most {fewest - 1}"


def _expert_problems(config: Config, c: ModelConfig) -> Iterator[str]:
    d, X, F = config.distributed, c.num_local_experts, c.moe_intermediate_size
    if X:
        ranks = d.dp_size * d.cp_size * d.tp_size
        yield from _uneven("ep_size", d.ep_size, {f"num_local_experts={X}": X}, ranks)
        yield from _uneven("etp_size", d.etp_size, {f"moe_intermediate_size={F}": F}, ranks)
        return
    given = dict(d) | dict(config.model)
    idle = OF_EXPERTS | {"ep_size": 1, "etp_size": 1, "mlp_only_layers": [], "fp8_experts": False}
    idle["moe_intermediate_size"] = F  # a shape that is written whole has it
    if others := [f"{k}={shown(given[k])}" for k, v in idle.items() if given[k] not in (None, v)]:
        why = f"model.name={config.model.name} has no experts, but {', '.join(others)}"
        yield f"{why}: set num_local_experts, or leave the rest out"


def _fp8_problems(config: Config, c: ModelConfig) -> Iterator[str]:
    m, d, t, layers = config.model, config.distributed, config.training, c.num_hidden_layers
    off = "fp8 and fp8_experts to false"
    if not (m.fp8 or m.fp8_experts):
        return
    if 2 * m.fp8_skip >= layers:
        why = f"fp8_skip={m.fp8_skip} leaves no layer of num_hidden_layers={layers} in FP8"
        yield f"{why}: use at most {(layers - 1) // 2}, or set {off}"
    if d.use_cpu:
        return
    if m.dtype != "bfloat16":  # see choose_product in precision/float8.py
        why = f'FP8 is multiplied on GPUs only with dtype="bfloat16", not "{m.dtype}"'
        yield f"{why}: set that, or {off}, or use_cpu to true to try it"
    sizes = {"hidden_size": c.hidden_size}
    if m.fp8_experts:
        what = f"moe_intermediate_size={c.moe_intermediate_size} / etp_size={d.etp_size}"
        sizes[what] = c.moe_intermediate_size / d.etp_size
    if m.fp8:
        sizes |= {f"{what} / tp_size={d.tp_size}": n / d.tp_size for what, n in _mlps(c).items()}
        tokens = f"micro_batch_size={t.micro_batch_size} x seq_length={t.seq_length}"
        sizes[f"{tokens} / cp_size={d.cp_size}"] = t.micro_batch_size * t.seq_length / d.cp_size
    for what, size in sizes.items():
        if size % FP8_MULTIPLE:
            why = f"FP8 needs multiples of {FP8_MULTIPLE} on GPUs, and {what} = {size:g}"
            yield f"{why}: change it, or set {off}"
