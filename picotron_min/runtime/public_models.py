"""Public models: their shapes and tokenizers by name."""

import re

from picotron_min.extensions.settings import FAMILIES, ModelConfig, numbers_of
from picotron_min.model_config import RopeScaling

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
OF_FAMILIES = [preset for family in FAMILIES.values() for preset in family.presets.items()]
PRESETS |= {name: ModelConfig(**numbers_of(preset)) for name, preset in OF_FAMILIES}


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
