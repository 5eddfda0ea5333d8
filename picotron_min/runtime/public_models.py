"""Public models: their shapes by name, and Hugging Face's `config.json` read and written."""

import re
from dataclasses import asdict, fields

from picotron_min.model_config import SIZES, ModelConfig, RopeScaling

# The only values of these keys that this model computes; the first is the default.
SUPPORTED = {"model_type": ["llama"], "hidden_act": ["silu"], "rope_type": ["default", "llama3"]}
SUPPORTED |= {"attention_bias": [False], "mlp_bias": [False], "partial_rotary_factor": [1.0]}
# Far above any published model (10**7 for other keys): a slip such as 10**12 is refused at once.
LARGEST = {"num_hidden_layers": 10**4, "num_attention_heads": 10**4, "num_key_value_heads": 10**4}
LARGEST |= {"rope_theta": 10**12, "max_position_embeddings": 10**9}
# What only a model with experts has.
EXPERTS = ("num_local_experts", "num_experts_per_tok", "moe_intermediate_size", "n_shared_experts")
EXPERTS += ("moe_shared_expert_gate", "mlp_only_layers", "scoring_func", "norm_topk_prob")
EXPERTS += ("n_group", "topk_group", "routed_scaling_factor")


def from_hf(hf: dict) -> ModelConfig:
    """Read a Hugging Face `config.json`; ValueError for what this model would not compute."""
    rope = {}  # transformers 5 has all in rope_parameters; before, rope_theta was at the top level
    for key in ("rope_scaling", "rope_parameters"):
        if not isinstance(hf.get(key), dict | None):
            raise ValueError(f"{key}={hf[key]!r:.60}: must be an object, {{ ... }}, or null")
        rope |= hf.get(key) or {}
    rope.setdefault("rope_type", rope.get("type", "default"))
    hf = {"rope_theta": 10_000.0, "rms_norm_eps": 1e-6} | hf | rope  # transformers' defaults
    for key, known in SUPPORTED.items():
        value = hf.get(key, known[0])
        if value not in known or isinstance(value, bool) != isinstance(known[0], bool):
            only = " and ".join(map(repr, known))
            raise ValueError(f"{key}={value!r:.60} is not supported: only {only} can be trained")
    if hf.get("num_key_value_heads") is None:
        hf["num_key_value_heads"] = hf.get("num_attention_heads")
    if hf.get("head_dim", 0) is None:
        del hf["head_dim"]  # ModelConfig derives it
    stretch = [field.name for field in fields(RopeScaling) if hf["rope_type"] == "llama3"]
    if missing := [name for name in (*SIZES, *stretch) if name not in hf]:
        raise ValueError(f"the model's config.json lacks {', '.join(missing)}")
    names = [f.name for f in fields(ModelConfig) if f.name not in ("rope_scaling", *EXPERTS)]
    check_numbers(numbers := {name: hf[name] for name in (*names, *stretch) if name in hf})
    if stretch:
        scaling = RopeScaling(**{name: numbers.pop(name) for name in stretch})
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        if low >= high:  # the model divides by their difference
            raise ValueError(f"high_freq_factor={high}: must be above low_freq_factor={low}")
        numbers["rope_scaling"] = scaling
    return ModelConfig(**numbers)


def check_numbers(numbers: dict) -> None:
    """Raise a ValueError that names every number of a model with a wrong type or out of range."""
    wrong, kinds = [], {f.name: f.type for kind in (ModelConfig, RopeScaling) for f in fields(kind)}
    for name, value in numbers.items():
        good, expected = type(value) is bool, "true or false"
        if name == "scoring_func":
            good, expected = value in ("softmax", "sigmoid"), "softmax or sigmoid"
        elif name == "mlp_only_layers":
            good = isinstance(value, list | tuple) and all(type(v) is int and v >= 0 for v in value)
            expected = "a list of layers"
        elif kinds[name] is not bool:
            whole, largest = kinds[name] is not float, LARGEST.get(name, 10**7)
            smallest = 1 if whole or name == "factor" else 1e-30
            smallest = 0 if name in ("num_local_experts", "n_shared_experts") else smallest
            good = type(value) in (int, int if whole else float) and smallest <= value <= largest
            expected = f"a {'whole ' * whole}number from {smallest} up to {largest:,}"
        if not good:
            wrong.append(f"{name}={value!r:.60}: must be {expected}")
    if wrong:
        raise ValueError("; ".join(wrong))


def to_hf(model_config: ModelConfig) -> dict:
    """The `config.json` that `transformers.AutoModelForCausalLM` loads (any version)."""
    hf = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu"}
    hf |= {"attention_bias": False, "mlp_bias": False} | asdict(model_config)
    for name in EXPERTS:
        del hf[name]
    if model_config.rope_scaling:
        hf["rope_scaling"]["rope_type"] = "llama3"
    return hf


_smol, _llama_2 = {"tie_word_embeddings": True}, {"max_position_embeddings": 4096}
_llama_3 = {"rope_theta": 500_000.0, "max_position_embeddings": 131_072}
_llama_3_1 = _llama_3 | {"rope_scaling": RopeScaling(8.0)}
_llama_3_2 = _llama_3 | {"rope_scaling": RopeScaling(32.0), "tie_word_embeddings": True}

# By the ids of their repositories on the Hugging Face hub, from the config.json of each.
PRESETS = {
    "tiny": ModelConfig(257, 128, 384, 4, 4, 2),
    "HuggingFaceTB/SmolLM-135M": ModelConfig(49_152, 576, 1536, 30, 9, 3, **_smol),
    "HuggingFaceTB/SmolLM-360M": ModelConfig(49_152, 960, 2560, 32, 15, 5, **_smol),
    "HuggingFaceTB/SmolLM-1.7B": ModelConfig(49_152, 2048, 8192, 24, 32, 32, **_smol),
    "meta-llama/Llama-2-7b-hf": ModelConfig(32_000, 4096, 11_008, 32, 32, 32, **_llama_2),
    "meta-llama/Llama-2-13b-hf": ModelConfig(32_000, 5120, 13_824, 40, 40, 40, **_llama_2),
    "meta-llama/Llama-2-70b-hf": ModelConfig(32_000, 8192, 28_672, 80, 64, 8, **_llama_2),
    "meta-llama/Llama-3.2-1B": ModelConfig(128_256, 2048, 8192, 16, 32, 8, **_llama_3_2),
    "meta-llama/Llama-3.2-3B": ModelConfig(128_256, 3072, 8192, 28, 24, 8, **_llama_3_2),
    "meta-llama/Llama-3.1-8B": ModelConfig(128_256, 4096, 14_336, 32, 32, 8, **_llama_3_1),
    "meta-llama/Llama-3.1-70B": ModelConfig(128_256, 8192, 28_672, 80, 64, 8, **_llama_3_1),
    "meta-llama/Llama-3.1-405B": ModelConfig(128_256, 16_384, 53_248, 126, 128, 8, **_llama_3_1),
}


def preset_name(name: str) -> str | None:
    """The preset that a name means, with or without its owner: also Llama-2-7B, SmolLM-360M."""

    def plain(text: str) -> str:  # variants share the shape
        return re.sub("(-hf)?(-instruct|-chat)?(-hf)?$", "", text.lower())

    names = {plain(text): preset for preset in PRESETS for text in (preset, preset.split("/")[-1])}
    return names.get(plain(name))


def find_preset(name: str) -> ModelConfig | None:
    return PRESETS.get(preset_name(name))


def tokenizer_of(model_name: str) -> str:
    """The tokenizer of a model by itself: `bytes` for tiny, else a folder or an id on the hub."""
    if "/" in model_name:  # an id itself, or a folder
        return model_name
    preset = preset_name(model_name) or model_name
    return "bytes" if preset == "tiny" else preset
