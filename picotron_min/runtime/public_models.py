"""Public models: their shapes by name, and Hugging Face's `config.json` read and written."""

import re
from dataclasses import asdict, fields

from picotron_min.extensions.settings import ModelConfig
from picotron_min.model_config import RopeScaling
from picotron_min.runtime.architectures import ARCHITECTURES, FIXED, REFUSED, model_type

# Far above any published model (10**7 for other keys): a slip such as 10**12 is refused at once.
LARGEST = dict.fromkeys(("num_hidden_layers", "num_attention_heads", "num_key_value_heads"), 10**4)
LARGEST |= dict.fromkeys(("num_local_experts", "n_routed_experts", "num_experts"), 10**4)
LARGEST |= {"rope_theta": 10**12, "max_position_embeddings": 10**9}
SMALLEST = dict.fromkeys(("num_local_experts", "n_shared_experts", "first_k_dense_replace"), 0)
SMALLEST |= {"shared_expert_intermediate_size": 0, "factor": 1}  # 1 for other whole numbers
KINDS = {field.name: field.type for kind in (ModelConfig, RopeScaling) for field in fields(kind)}


def from_hf(hf: dict) -> ModelConfig:
    """Read a Hugging Face `config.json`; ValueError for what this model would not compute."""
    name = hf.get("model_type", "llama")
    if name not in [*ARCHITECTURES]:
        why = f" ({REFUSED[name]})" if name in [*REFUSED] else ""
        problem, only = f"model_type={name!r:.60} is not supported{why}", [*ARCHITECTURES]
        raise ValueError(f"{problem}: only {', '.join(map(repr, only))} can be trained")
    architecture, given = ARCHITECTURES[name], _with_rope(hf)
    _check_fixed(FIXED | architecture.fixed, architecture.defaults, given)
    hf = architecture.defaults | given
    stretch = [field.name for field in fields(RopeScaling) if hf["rope_type"] == "llama3"]
    keys = [*architecture.keys.values(), *architecture.more, *stretch]
    if missing := [key for key in dict.fromkeys(keys) if key not in hf]:
        raise ValueError(f"the model's config.json lacks {', '.join(missing)}")
    if hf["num_key_value_heads"] is None:
        hf["num_key_value_heads"] = hf["num_attention_heads"]
    check_numbers({key: hf[key] for key in keys if (key, hf[key]) != ("head_dim", None)})
    numbers = {field: hf[key] for field, key in architecture.keys.items()} | architecture.read(hf)
    if numbers.get("num_local_experts") == 0:
        raise ValueError(f"num_local_experts=0: model_type={name!r} needs 1 or more")
    if stretch:
        numbers["rope_scaling"] = scaling = RopeScaling(*(hf[key] for key in stretch))
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


def _check_fixed(fixed: dict, defaults: dict, hf: dict) -> None:
    """Raise a ValueError for the first key with a value that the model would ignore."""
    types = hf.get("layer_types")  # layers of other types have a window
    full = ["full_attention"] * len(types) if isinstance(types, list) else None
    known = {key: [value] for key, value in fixed.items()}
    known |= {"layer_types": [full], "rope_type": ["default", "llama3"]}
    for key, values in known.items():
        value = hf.get(key, defaults.get(key, values[0]))
        if value not in values or isinstance(value, bool) != isinstance(values[0], bool):
            absent = "" if key in hf else " (the default, as config.json lacks it)"
            only, problem = " and ".join(map(repr, values)), f"{key}={value!r:.60}{absent}"
            raise ValueError(f"{problem} is not supported: only {only:.60} can be trained")


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
    """The `config.json` that `transformers.AutoModelForCausalLM` loads (any version).

    ValueError if no architecture describes the model, as after a change of our own.
    """
    name = model_type(model_config)
    architecture = ARCHITECTURES[name]
    hf = {"architectures": [architecture.class_name], "model_type": name}
    hf |= FIXED | architecture.fixed
    hf |= {key: getattr(model_config, field) for field, key in architecture.keys.items()}
    scaling = model_config.rope_scaling
    hf["rope_scaling"] = asdict(scaling) | {"rope_type": "llama3"} if scaling else None
    hf |= architecture.write(model_config)
    ours, theirs = all_shapes(model_config), all_shapes(from_hf(hf))
    if other := [key for key in ours | theirs if ours.get(key) != theirs.get(key)]:
        problem = f"model_type={name!r} of transformers is another model: {other[0]} is"
        change = f"{theirs.get(other[0], 'absent')} there, and {ours.get(other[0], 'absent')} here"
        raise ValueError(f"{problem} {change}: add an architecture for it to architectures.py")
    return hf


def all_shapes(model_config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor that is saved."""
    return model_config.parameter_shapes() | model_config.buffer_shapes()


_smol, _llama_2 = {"tie_word_embeddings": True}, {"max_position_embeddings": 4096}
_llama_3 = {"rope_theta": 500_000.0, "max_position_embeddings": 131_072}
_llama_3_1 = _llama_3 | {"rope_scaling": RopeScaling(8.0)}
_llama_3_2 = _llama_3 | {"rope_scaling": RopeScaling(32.0), "tie_word_embeddings": True}
_mixtral_7b = {"rope_theta": 1e6, "num_local_experts": 8, "max_position_embeddings": 32_768}
_mixtral_22b = _mixtral_7b | {"max_position_embeddings": 65_536}

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
    "mistralai/Mixtral-8x7B-v0.1": ModelConfig(32_000, 4096, 14_336, 32, 32, 8, **_mixtral_7b),
    "mistralai/Mixtral-8x22B-v0.1": ModelConfig(32_000, 6144, 16_384, 56, 48, 8, **_mixtral_22b),
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
