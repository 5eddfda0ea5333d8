"""Public models: their shapes by name, and Hugging Face's `config.json` read and written."""

import re
from dataclasses import asdict, fields

from picotron_min.extensions.settings import ModelConfig
from picotron_min.model_config import RopeScaling
from picotron_min.runtime.architectures import ARCHITECTURES, REFUSED, Architecture, model_type

# Far above any published model (10**7 for other keys): a slip such as 10**12 is refused at once.
LARGEST = {"num_hidden_layers": 10**4, "num_attention_heads": 10**4, "num_key_value_heads": 10**4}
LARGEST |= {"num_local_experts": 10**4, "n_routed_experts": 10**4, "num_experts": 10**4}
LARGEST |= {"rope_theta": 10**12, "max_position_embeddings": 10**9}
SMALLEST = {"num_local_experts": 0, "n_shared_experts": 0, "first_k_dense_replace": 0, "factor": 1}
SMALLEST |= {"shared_expert_intermediate_size": 0}  # 1 for other whole numbers
KINDS = {field.name: field.type for kind in (ModelConfig, RopeScaling) for field in fields(kind)}


def from_hf(hf: dict) -> ModelConfig:
    """Read a Hugging Face `config.json`; ValueError for what this model would not compute."""
    architecture = _architecture(hf)
    hf = architecture.defaults | _with_rope(hf)
    _check_supported(architecture, hf)
    stretch = [field.name for field in fields(RopeScaling) if hf["rope_type"] == "llama3"]
    keys = dict.fromkeys((*architecture.keys.values(), *architecture.more, *stretch))
    if missing := [key for key in keys if key not in hf]:
        raise ValueError(f"the model's config.json lacks {', '.join(missing)}")
    if hf["num_key_value_heads"] is None:
        hf["num_key_value_heads"] = hf["num_attention_heads"]
    if hf["head_dim"] is None:  # ModelConfig derives it
        del keys["head_dim"]
    check_numbers({key: hf[key] for key in keys})
    numbers = {name: hf[key] for name, key in architecture.keys.items()} | architecture.read(hf)
    if numbers.get("num_local_experts") == 0:
        raise ValueError(f"num_local_experts=0: model_type={hf['model_type']!r} needs 1 or more")
    if stretch:
        numbers["rope_scaling"] = scaling = RopeScaling(*(hf[name] for name in stretch))
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        if low >= high:  # the model divides by their difference
            raise ValueError(f"high_freq_factor={high}: must be above low_freq_factor={low}")
    return ModelConfig(**numbers)


def _with_rope(hf: dict) -> dict:
    """Everything about rotary embeddings at the top level, in either spelling."""
    rope = {}  # transformers 5 has all in rope_parameters; before, rope_theta was at the top level
    for key in ("rope_scaling", "rope_parameters"):
        if not isinstance(hf.get(key), dict | None):
            raise ValueError(f"{key}={hf[key]!r:.60}: must be an object, {{ ... }}, or null")
        rope |= hf.get(key) or {}
    rope.setdefault("rope_type", rope.get("type", "default"))
    return hf | rope


def _architecture(hf: dict) -> Architecture:
    name = hf.get("model_type", "llama")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        only = ", ".join(map(repr, ARCHITECTURES))
        why = f" ({REFUSED[name]})" if isinstance(name, str) and name in REFUSED else ""
        problem = f"model_type={name!r:.60} is not supported{why}"
        raise ValueError(f"{problem}: only {only} can be trained")
    return ARCHITECTURES[name]


def _check_supported(architecture: Architecture, hf: dict) -> None:
    """Raise a ValueError for the first key with a value that the model would ignore."""
    types = hf.get("layer_types")  # those of other layers have a window
    full = ["full_attention"] * len(types) if isinstance(types, list) else None
    rules = {"layer_types": (None, [full]), "rope_type": ("default", ["default", "llama3"])}
    for key, (absent, known) in (architecture.only | rules).items():
        value = hf.get(key, absent)
        if value not in known or isinstance(value, bool) != isinstance(known[0], bool):
            why = "" if key in hf else " (the default, as config.json lacks it)"
            only = " and ".join(map(repr, known))
            problem = f"{key}={value!r:.60}{why} is not supported"
            raise ValueError(f"{problem}: only {only:.60} can be trained")


def check_numbers(numbers: dict) -> None:
    """Raise a ValueError that names every number of a model with a wrong type or out of range."""
    wrong = []
    for name, value in numbers.items():
        kind = KINDS.get(name, int)
        good, expected = type(value) is bool, "true or false"
        if name == "scoring_func":
            good, expected = value in ("softmax", "sigmoid"), "softmax or sigmoid"
        elif name == "mlp_only_layers":
            good = isinstance(value, list | tuple) and all(type(v) is int and v >= 0 for v in value)
            expected = "a list of layers"
        elif kind is not bool:
            whole, largest = kind is not float, LARGEST.get(name, 10**7)
            smallest = SMALLEST.get(name, 1 if whole else 1e-30)
            good = type(value) in (int, int if whole else float) and smallest <= value <= largest
            expected = f"a {'whole ' * whole}number from {smallest} up to {largest:,}"
        if not good:
            wrong.append(f"{name}={value!r:.60}: must be {expected}")
    if wrong:
        raise ValueError("; ".join(wrong))


def to_hf(model_config: ModelConfig) -> dict:
    """The `config.json` that `transformers.AutoModelForCausalLM` loads (any version)."""
    name = model_type(model_config)
    architecture = ARCHITECTURES[name]
    hf = {"architectures": [architecture.class_name], "model_type": name}
    hf |= {key: known[0] for key, (_, known) in architecture.only.items()}
    hf |= {key: getattr(model_config, field) for field, key in architecture.keys.items()}
    hf |= architecture.write(model_config)
    scaling = model_config.rope_scaling
    hf["rope_scaling"] = asdict(scaling) | {"rope_type": "llama3"} if scaling else None
    return hf


_smol, _llama_2 = {"tie_word_embeddings": True}, {"max_position_embeddings": 4096}
_llama_3 = {"rope_theta": 500_000.0, "max_position_embeddings": 131_072}
_llama_3_1 = _llama_3 | {"rope_scaling": RopeScaling(8.0)}
_llama_3_2 = _llama_3 | {"rope_scaling": RopeScaling(32.0), "tie_word_embeddings": True}
_mixtral = {"rope_theta": 1e6, "num_local_experts": 8, "num_experts_per_tok": 2}

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
    "mistralai/Mixtral-8x7B-v0.1": ModelConfig(
        32_000, 4096, 14_336, 32, 32, 8, max_position_embeddings=32_768, **_mixtral
    ),
    "mistralai/Mixtral-8x22B-v0.1": ModelConfig(
        32_000, 6144, 16_384, 56, 48, 8, max_position_embeddings=65_536, **_mixtral
    ),
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
