"""Checks of a model: whether its numbers fit the layout, the sequence, experts and FP8."""

import math
from collections.abc import Iterator

from picotron_min.costs import layers_of_stages
from picotron_min.extensions.settings import Mixture, ModelConfig
from picotron_min.runtime.config import Config
from picotron_min.runtime.wording import divisors, shown

FP8_MULTIPLE = 16  # of all sizes of a product in 8 bits, on GPUs
OF_EXPERTS = {name: getattr(Mixture, name) for name in Mixture.__annotations__}  # defaults


def model_problems(config: Config, c: ModelConfig) -> Iterator[str]:
    """Sentences, with numbers and remedy: why the config does not fit the model's numbers."""
    layout, seq_length = config.layout, config.training.seq_length
    tp, cp, longest = layout.tp, layout.cp, c.max_position_embeddings
    cut = _heads(c) | _mlps(c)
    # The ranks divide tokens among them before these go to experts, also without sequence_parallel.
    if c.num_local_experts and not layout.sequence_parallel and seq_length % cp == 0:
        cut[f"seq_length={seq_length} / cp_size={cp} = {seq_length // cp}"] = seq_length // cp
    yield from _uneven("tp_size", tp, cut)
    if layout.cp_engine == "ulysses":
        heads, own = c.num_attention_heads, c.num_attention_heads // tp
        made = f"num_attention_heads={heads} / tp_size={tp} = {own}"
        yield from _uneven("cp_size", cp, {made: own}, or_else=', or cp_engine="ring"')
    if seq_length > longest:
        where = f"max_position_embeddings={longest} of model.name={config.model.name}"
        yield f"seq_length={seq_length} is above {where}: use at most {longest}, or raise it"
    for check in (_stage_problems, _depth_problems, _expert_problems, _fp8_problems):
        yield from check(config, c)


def _heads(c: ModelConfig) -> dict[str, int]:
    keys = ("num_attention_heads", "num_key_value_heads")
    return {f"{key}={getattr(c, key)}": getattr(c, key) for key in keys}


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


def _depth_problems(config: Config, c: ModelConfig) -> Iterator[str]:
    if (depths := c.num_nextn_predict_layers) and not config.training.mtp_loss_scaling_factor:
        why = f"mtp_loss_scaling_factor=0 leaves num_nextn_predict_layers={depths} untrained"
        yield f"{why}: raise it, or num_nextn_predict_layers to 0"


def _expert_problems(config: Config, c: ModelConfig) -> Iterator[str]:
    d, X, F = config.distributed, c.num_local_experts, c.moe_intermediate_size
    if X:
        ranks = d.dp_size * d.cp_size * d.tp_size
        yield from _uneven("ep_size", d.ep_size, {f"num_local_experts={X}": X}, ranks)
        yield from _uneven("etp_size", d.etp_size, {f"moe_intermediate_size={F}": F}, ranks)
        return
    given = {"ep_size": d.ep_size, "etp_size": d.etp_size} | config.model.overrides
    idle = OF_EXPERTS | {"ep_size": 1, "etp_size": 1, "mlp_only_layers": []}
    idle["moe_intermediate_size"] = F  # a shape that is written whole has it
    if others := [f"{k}={shown(v)}" for k, v in given.items() if k in idle and v != idle[k]]:
        why = f"model.name={config.model.name} has no experts, but {', '.join(others)}"
        yield f"{why}: set num_local_experts, or leave the rest out"


def _fp8_problems(config: Config, c: ModelConfig) -> Iterator[str]:
    m, d, t, layers = config.model, config.distributed, config.training, c.num_hidden_layers
    if m.fp8 and 2 * m.fp8_skip >= layers:
        why = f"fp8_skip={m.fp8_skip} leaves no layer of num_hidden_layers={layers} in FP8"
        yield f"{why}: use at most {(layers - 1) // 2}, or fp8=false"
    if not m.fp8 or d.use_cpu:
        return
    if m.dtype != "bfloat16":  # see choose_product in precision/float8.py
        why = f'fp8=true multiplies in 8 bits on GPUs only with dtype="bfloat16", not "{m.dtype}"'
        yield f"{why}: set that, or fp8 to false, or use_cpu to true to try it"
    heads = {f"{what} x head_dim={c.head_dim}": n * c.head_dim for what, n in _heads(c).items()}
    cut = (heads | _mlps(c)).items()
    sizes = {f"{what} / tp_size={d.tp_size}": size / d.tp_size for what, size in cut}
    tokens = f"micro_batch_size={t.micro_batch_size} x seq_length={t.seq_length}"
    sizes[f"{tokens} / cp_size={d.cp_size}"] = t.micro_batch_size * t.seq_length / d.cp_size
    for what, size in (sizes | {"hidden_size": c.hidden_size}).items():
        if size % FP8_MULTIPLE:
            why = f"fp8=true needs multiples of {FP8_MULTIPLE} on GPUs, and {what} = {size:g}"
            yield f"{why}: change it, or set fp8 to false"
