"""Public models: their shapes by name, and Hugging Face's `config.json` read and written.

Standard library only, so that a run can be planned without torch and without the network.
"""

from dataclasses import asdict, fields

from picotron_min.model_config import SIZES, ModelConfig, RopeScaling


def from_hf(hf: dict) -> ModelConfig:
    """Read a Hugging Face `config.json`, with rotary settings in the old or the new spelling.

    Raises ValueError for anything this model would silently compute differently.
    """
    required = {
        "model_type": "llama",
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
    }
    for key, value in required.items():
        if hf.get(key, value) != value:
            raise ValueError(f"{key}={hf[key]!r} is not supported: only {value!r} is")
    if missing := [name for name in SIZES if name not in hf and name != "num_key_value_heads"]:
        raise ValueError(f"the model's config.json lacks {', '.join(missing)}")
    # transformers 5 writes all rotary settings into rope_parameters; older files have
    # rope_theta at the top level and the stretching, if any, in rope_scaling.
    rope = {"rope_theta": hf.get("rope_theta", ModelConfig.rope_theta)}
    rope |= hf.get("rope_scaling") or {}
    rope |= hf.get("rope_parameters") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "llama3"):
        raise ValueError(f"rope_type={kind!r} is not supported: only default and llama3 are")
    if rope.get("partial_rotary_factor", hf.get("partial_rotary_factor", 1.0)) != 1.0:
        raise ValueError("partial_rotary_factor other than 1 is not supported")
    known = {f.name for f in fields(ModelConfig)} & hf.keys() - {"rope_scaling", "rope_theta"}
    values = {name: hf[name] for name in known}
    values.setdefault("num_key_value_heads", hf["num_attention_heads"])
    values["rope_theta"] = float(rope["rope_theta"])
    if kind == "llama3":
        scaling = {f.name: rope[f.name] for f in fields(RopeScaling) if f.name in rope}
        values["rope_scaling"] = RopeScaling(**scaling)
    return ModelConfig(**values)


def to_hf(model_config: ModelConfig) -> dict:
    """The `config.json` that `transformers.AutoModelForCausalLM` loads (any version)."""
    hf = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu"}
    hf |= {"attention_bias": False, "mlp_bias": False} | asdict(model_config)
    if model_config.rope_scaling:
        hf["rope_scaling"]["rope_type"] = "llama3"
    return hf


def _llama(vocab, hidden, inner, layers, heads, kv_heads, **more) -> ModelConfig:
    return ModelConfig(vocab, hidden, inner, layers, heads, kv_heads, **more)


def _llama_3(hidden, inner, layers, heads, kv_heads, factor, tied=False) -> ModelConfig:
    return ModelConfig(
        128_256, hidden, inner, layers, heads, kv_heads,
        rope_theta=500_000.0, rope_scaling=RopeScaling(factor),
        tie_word_embeddings=tied, max_position_embeddings=131_072,
    )  # fmt: skip


_smol = {"tie_word_embeddings": True}
_llama_2 = {"max_position_embeddings": 4096}

# Facts of the public models' config.json files, so that planning a run needs no network.
PRESETS = {
    "tiny": _llama(257, 128, 384, 4, 4, 2),
    "HuggingFaceTB/SmolLM-135M": _llama(49_152, 576, 1536, 30, 9, 3, **_smol),
    "HuggingFaceTB/SmolLM-360M": _llama(49_152, 960, 2560, 32, 15, 5, **_smol),
    "HuggingFaceTB/SmolLM-1.7B": _llama(49_152, 2048, 8192, 24, 32, 32, **_smol),
    "meta-llama/Llama-2-7B": _llama(32_000, 4096, 11_008, 32, 32, 32, **_llama_2),
    "meta-llama/Llama-2-13B": _llama(32_000, 5120, 13_824, 40, 40, 40, **_llama_2),
    "meta-llama/Llama-2-70B": _llama(32_000, 8192, 28_672, 80, 64, 8, **_llama_2),
    "meta-llama/Llama-3.2-1B": _llama_3(2048, 8192, 16, 32, 8, 32.0, tied=True),
    "meta-llama/Llama-3.2-3B": _llama_3(3072, 8192, 28, 24, 8, 32.0, tied=True),
    "meta-llama/Llama-3.1-8B": _llama_3(4096, 14_336, 32, 32, 8, 8.0),
    "meta-llama/Llama-3.1-70B": _llama_3(8192, 28_672, 80, 64, 8, 8.0),
    "meta-llama/Llama-3.1-405B": _llama_3(16_384, 53_248, 126, 128, 8, 8.0),
}


def find_preset(name: str) -> ModelConfig | None:
    """The built-in model of that name, with or without its owner; variants share its shape.

    `SmolLM-360M`, `HuggingFaceTB/SmolLM-360M-Instruct` and `meta-llama/Llama-2-7b-hf` are found.
    """
    wanted = name.lower()
    for suffix in ("-instruct", "-chat-hf", "-hf"):
        wanted = wanted.removesuffix(suffix)
    for preset, config in PRESETS.items():
        if wanted in (preset.lower(), preset.lower().rsplit("/")[-1]):
            return config
    return None
