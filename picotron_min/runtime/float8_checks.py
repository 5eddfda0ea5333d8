"""Whether a config with model.fp8 fits the model."""

from collections.abc import Iterator

from picotron_min.extensions.settings import ModelConfig
from picotron_min.runtime.config import Config

MULTIPLE = 16  # of all sizes of such a product, on GPUs


def fp8_problems(config: Config, model_config: ModelConfig) -> Iterator[str]:
    """Sentences, with numbers and remedy: why linears cannot multiply in 8 bits."""
    fp8, skip, layers = config.model.fp8, config.model.fp8_skip, model_config.num_hidden_layers
    if skip and not fp8:
        yield f"fp8_skip={skip} is for fp8=true: set that, or fp8_skip to 0"
    elif fp8 and 2 * skip >= layers:
        why = f"fp8_skip={skip} leaves no layer of num_hidden_layers={layers} in FP8"
        yield f"{why}: use at most {(layers - 1) // 2}, or fp8=false"
    if fp8 and not config.distributed.use_cpu:
        if (dtype := config.model.dtype) != "bfloat16":  # see choose_product in precision/float8.py
            why = f'fp8=true multiplies in 8 bits on GPUs only with dtype="bfloat16", not "{dtype}"'
            yield f"{why}: set that, or fp8 to false, or use_cpu to true to try it"
        for what, size in _sizes(config, model_config).items():
            if size % MULTIPLE:
                why = f"fp8=true needs multiples of {MULTIPLE} on GPUs, and {what} = {size:g}"
                yield f"{why}: change it, or set fp8 to false"


def _sizes(config: Config, c: ModelConfig) -> dict[str, float]:
    """What a rank's products are of, as messages show it."""
    d, t = config.distributed, config.training
    parts = {
        f"{key}={getattr(c, key)} x head_dim={c.head_dim}": getattr(c, key) * c.head_dim
        for key in ("num_attention_heads", "num_key_value_heads")
    }
    if not all(map(c.has_experts, range(c.num_hidden_layers))):
        parts[f"intermediate_size={c.intermediate_size}"] = c.intermediate_size
    if c.num_local_experts and c.n_shared_experts:
        made = f"n_shared_experts={c.n_shared_experts}"
        made += f" x moe_intermediate_size={c.moe_intermediate_size}"
        parts[made] = c.n_shared_experts * c.moe_intermediate_size
    tokens = f"micro_batch_size={t.micro_batch_size} x seq_length={t.seq_length}"
    sizes = {"hidden_size": c.hidden_size}
    sizes |= {f"{what} / tp_size={d.tp_size}": n / d.tp_size for what, n in parts.items()}
    sizes[f"{tokens} / cp_size={d.cp_size}"] = t.micro_batch_size * t.seq_length / d.cp_size
    return sizes
