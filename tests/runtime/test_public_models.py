"""Public models by name, and every field of a Hugging Face config.json, right or wrong."""

import json

import pytest
import transformers

from picotron_min.costs import parameter_count
from picotron_min.extensions.settings import ModelConfig
from picotron_min.runtime.architectures import from_hf, to_hf, without_form
from picotron_min.runtime.public_models import PRESETS, find_preset, tokenizer_of
from picotron_min.runtime.wording import explained

BASE = ModelConfig(97, 32, 56, 3, 4, 4)
WIDE = ModelConfig(97, 32, 56, 3, 4, 2, head_dim=16)
BIASED, UNROTATED = WIDE.override(qkv_bias=True), WIDE.override(no_rope_layers=(1, 0, 1))
BEHIND = WIDE.override(post_norm=True)

# Parameters in millions as the models' own cards and papers state them, and the tokenizer's name.
PUBLISHED = """
SmolLM-135M               134.5      HuggingFaceTB/SmolLM-135M
HuggingFaceTB/SmolLM-360M 361.8      HuggingFaceTB/SmolLM-360M
SmolLM-1.7B               1711.4     HuggingFaceTB/SmolLM-1.7B
Llama-2-7b-hf             6738.4     meta-llama/Llama-2-7b-hf
Llama-2-13b-chat-hf       13015.9    meta-llama/Llama-2-13b-hf
meta-llama/Llama-2-70B    68976.6    meta-llama/Llama-2-70B
llama-3.2-1B-Instruct     1235.8     meta-llama/Llama-3.2-1B
Llama-3.2-3B              3212.7     meta-llama/Llama-3.2-3B
Llama-3.1-8B              8030.3     meta-llama/Llama-3.1-8B
Llama-3.1-70B             70553.7    meta-llama/Llama-3.1-70B
Llama-3.1-405B            405853.4   meta-llama/Llama-3.1-405B
Qwen3-0.6B                596.0      Qwen/Qwen3-0.6B
Qwen2.5-0.5B-Instruct     494.0      Qwen/Qwen2.5-0.5B
Qwen/Qwen2.5-1.5B         1543.7     Qwen/Qwen2.5-1.5B
Qwen2.5-7B                7615.6     Qwen/Qwen2.5-7B
OLMo-2-0425-1B            1484.9     allenai/OLMo-2-0425-1B
SmolLM3-3B                3075.1     HuggingFaceTB/SmolLM3-3B
Mixtral-8x7B-v0.1         46702.8    mistralai/Mixtral-8x7B-v0.1
Mixtral-8x22B-v0.1        140620.6   mistralai/Mixtral-8x22B-v0.1
"""


@pytest.mark.quick
def test_presets_have_the_published_number_of_parameters_and_tokenizers():
    for name, millions, tokenizer in map(str.split, PUBLISHED.strip().splitlines()):
        count = parameter_count(find_preset(name))
        assert count / 1e6 == pytest.approx(float(millions), abs=0.06), name
        assert tokenizer_of(name) == tokenizer
    others = ["someone/a-llama", "./folder"]
    assert [*map(tokenizer_of, ["tiny", *others])] == ["bytes", *others]


EXPERTS = BASE.override(num_local_experts=8, moe_intermediate_size=16)
SIGMOID = EXPERTS.override(scoring_func="sigmoid")
FILES = {"llama": to_hf(BASE), "mixtral": to_hf(EXPERTS), "glm4_moe": to_hf(SIGMOID)}
FILES |= {"qwen2": to_hf(BIASED), "smollm3": to_hf(UNROTATED), "olmo2": to_hf(BEHIND)}


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_survives_a_round_trip_through_transformers(name):
    there = transformers.AutoConfig.for_model(**to_hf(PRESETS[name]))
    assert from_hf(there.to_dict()) == PRESETS[name]


# What this model does not compute, or nobody: a file, a change in JSON, and words of the refusal.
REFUSED = r"""
llama     | "model_type": "mistral"          | model_type='mistral' is not supported: only 'llama'
llama     | "attention_bias": true           | attention_bias=True is not supported: only False
llama     | "hidden_act": "gelu"             | hidden_act='gelu' is not supported: only 'silu'
llama     | "rope_scaling": {"rope_type": "yarn", "factor": 4.0} | rope_type='yarn' is not supported
llama     | "rope_scaling": null, "rope_theta": 0.0 | rope_theta=0.0: must be greater
llama     | "rope_parameters": {"rope_type": "llama3", "rope_theta": 1.0, "factor": 0.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64} | factor=0.0: must be greater
llama     | "partial_rotary_factor": 0.5     | partial_rotary_factor=0.5 is not supported: only 1.0
llama     | "vocab_size": 0, "rms_norm_eps": -1.0 | vocab_size=0: .*; rms_norm_eps=-1.0: must be
llama     | "hidden_size": "32"              | 'hidden_size' expected int, got str
mixtral   | "sliding_window": 4096           | sliding_window=4096 is not supported: only None
mixtral   | "layer_types": ["sliding_attention"] | layer_typ
glm4_moe  | "use_qk_norm": true              | use_qk_norm=True is not supported: only False
glm4_moe  | "rope_parameters": {"partial_rotary_factor": 0.5} | partial_rotary_factor=0.5
qwen2     | "use_sliding_window": true       | use_sliding_window=True is not supported: only False
smollm3   | "use_sliding_window": true       | use_sliding_window=True is not supported: only False
"""  # noqa: E501


@pytest.mark.parametrize("row", REFUSED.strip().splitlines())
def test_a_model_that_would_be_computed_differently_is_refused(row):
    model_type, change, message = (part.strip() for part in row.split(" | "))
    assert from_hf(FILES[model_type])
    with pytest.raises(ValueError, match=message), explained("config.json"):
        from_hf(FILES[model_type] | json.loads(f"{{{change}}}"))


def test_published_files_leave_out_what_follows_from_other_numbers():
    hf = {key: value for key, value in FILES["qwen2"].items() if key != "head_dim"}
    assert from_hf(hf).head_dim == WIDE.hidden_size // WIDE.num_attention_heads
    hf = {key: value for key, value in FILES["smollm3"].items() if key != "no_rope_layers"}
    more = {"num_hidden_layers": 8, "no_rope_layer_interval": 4}
    assert from_hf(hf | more).no_rope_layers == (1, 1, 1, 0) * 2


def test_a_model_that_no_architecture_describes_is_not_exported():
    alone = EXPERTS.override(num_nextn_predict_layers=1)
    assert "for 'mixtral', or scoring_func=\"sigmoid\" for 'glm4_moe'; or" in without_form(alone)
    with pytest.raises(ValueError, match="no model of transformers is like it"):
        to_hf(alone)
