"""Public models by name, and every field of a Hugging Face config.json, right or wrong."""

import pytest
import torch
import transformers

from picotron_min.costs import parameter_count
from picotron_min.extensions.experts.moe import apply_moe
from picotron_min.extensions.experts.router import RoutingCounts
from picotron_min.extensions.qk_norm.extension import QkNorm
from picotron_min.extensions.settings import SIZES, ModelConfig, Routing
from picotron_min.model import Llama
from picotron_min.model_config import RopeScaling
from picotron_min.runtime.architectures import ARCHITECTURES, from_hf, to_hf
from picotron_min.runtime.hugging_face import export_hf
from picotron_min.runtime.public_models import PRESETS, find_preset, tokenizer_of
from picotron_min.runtime.tokenizer import BytesTokenizer
from tests.runtime.test_hugging_face_experts import unstacked

BASE = ModelConfig(97, 32, 56, 3, 4, 4)
NORMED = ModelConfig(97, 32, 56, 3, 4, 2, head_dim=16, qk_norm=True)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_the_parameters_that_transformers_builds(name):
    model_config = PRESETS[name]
    with torch.device("meta"):
        ours = Llama(model_config)
        apply_moe(ours, Routing(), RoutingCounts(model_config, torch.device("meta")))
        if model_config.qk_norm:
            QkNorm().swap(ours)
        their_config = transformers.AutoConfig.for_model(**to_hf(model_config))
        theirs = transformers.AutoModelForCausalLM.from_config(their_config)
    theirs.tie_weights()  # 5.0 did not, without memory
    shapes = {name: tuple(p.shape) for name, p in ours.named_parameters()}
    apart = unstacked(dict(theirs.named_parameters()))
    assert shapes == {name: tuple(matrix.shape) for name, matrix in apart.items()}
    assert shapes == model_config.parameter_shapes()


# Parameter counts that the models' own cards and papers state, in millions.
PUBLISHED = {
    "SmolLM-135M": 134.5,
    "SmolLM-360M": 361.8,
    "SmolLM-1.7B": 1711.4,
    "Llama-2-7b-hf": 6738.4,
    "Llama-2-13b-chat-hf": 13015.9,
    "meta-llama/Llama-2-70B": 68976.6,
    "Llama-3.2-1B-Instruct": 1235.8,
    "Llama-3.2-3B": 3212.7,
    "Llama-3.1-8B": 8030.3,
    "Llama-3.1-70B": 70553.7,
    "Llama-3.1-405B": 405853.4,
    "Mixtral-8x7B-v0.1": 46702.8,
    "Mixtral-8x22B-v0.1": 140620.6,
}


@pytest.mark.parametrize("name,millions", PUBLISHED.items())
def test_presets_have_the_published_number_of_parameters(name, millions):
    count = parameter_count(find_preset(name))
    assert count / 1e6 == pytest.approx(millions, abs=0.06)


def test_rope_settings_are_read_in_the_old_and_the_new_spelling():
    model_config = PRESETS["meta-llama/Llama-3.2-1B"]
    old = to_hf(model_config)
    assert old["rope_theta"] == 500_000.0 and old["rope_scaling"]["rope_type"] == "llama3"
    new = dict(old)
    scaling = new.pop("rope_scaling")
    new["rope_parameters"] = scaling | {"rope_theta": new.pop("rope_theta")}
    assert from_hf(old) == from_hf(new) == model_config
    with_null = old | {"rope_scaling": None}
    assert from_hf(with_null) == model_config.override(rope_scaling=None)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_survives_a_round_trip_through_transformers(name):
    there = transformers.AutoConfig.for_model(**to_hf(PRESETS[name])).to_dict()
    assert from_hf(there) == PRESETS[name]


def test_a_missing_number_is_the_one_that_transformers_takes():
    hf = {"model_type": "llama"} | {name: getattr(BASE, name) for name in SIZES}
    theirs = transformers.LlamaConfig(**hf)
    ours = from_hf(hf)
    for name in ("rms_norm_eps", "tie_word_embeddings", "max_position_embeddings", "head_dim"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert ours.rope_theta == theirs.rope_parameters["rope_theta"]
    del hf["num_key_value_heads"]
    assert from_hf(hf).num_key_value_heads == from_hf(hf | {"head_dim": None}).num_attention_heads


EXPERTS = BASE.override(num_local_experts=8, moe_intermediate_size=16)
SIGMOID = EXPERTS.override(
    scoring_func="sigmoid",
    mlp_only_layers=(0,),
    num_experts_per_tok=3,
    n_shared_experts=2,
    n_group=4,
    topk_group=2,
    routed_scaling_factor=2.5,
)
GATED = EXPERTS.override(
    n_shared_experts=2, moe_shared_expert_gate=True, norm_topk_prob=False, mlp_only_layers=(1,)
)
LLAMA, GLM = to_hf(BASE.override(rope_scaling=RopeScaling(8.0))), to_hf(SIGMOID)
FILES = {"llama": LLAMA, "mixtral": to_hf(EXPERTS), "glm4_moe": GLM}
FILES |= {"qwen2_moe": to_hf(GATED), "qwen3": to_hf(NORMED)}


@pytest.mark.parametrize(
    "model_config",
    [
        EXPERTS,
        EXPERTS.override(tie_word_embeddings=True, rope_scaling=RopeScaling(8.0)),
        SIGMOID,
        SIGMOID.override(norm_topk_prob=False, n_shared_experts=0, mlp_only_layers=()),
        SIGMOID.override(mlp_only_layers=(0, 1), rope_scaling=RopeScaling(2.0), n_group=2),
        GATED,
        GATED.override(norm_topk_prob=True, head_dim=16),
        EXPERTS.override(norm_topk_prob=False),
        EXPERTS.override(mlp_only_layers=(0, 2)),
        EXPERTS.override(num_experts_per_tok=1, norm_topk_prob=False),
        NORMED,
        NORMED.override(qk_norm=False),
    ],
)
def test_every_model_has_an_architecture(model_config):
    hf = to_hf(model_config)
    there = transformers.AutoConfig.for_model(**hf)
    assert type(there) is not transformers.PreTrainedConfig
    assert (hf["model_type"] == "qwen3") == model_config.qk_norm
    if hf["model_type"] == "mixtral":  # which has no other MLPs
        model_config = model_config.override(intermediate_size=model_config.moe_intermediate_size)
    assert from_hf(hf) == from_hf(there.to_dict()) == model_config


@pytest.mark.parametrize("numbers", [{"decoder_sparse_step": 2}, {"mlp_only_layers": [0, 2, 7]}])
def test_layers_without_experts_are_those_of_transformers(numbers):
    hf = FILES["qwen2_moe"] | {"mlp_only_layers": []} | numbers
    with torch.device("meta"):
        theirs = transformers.Qwen2MoeForCausalLM(transformers.Qwen2MoeConfig(**hf))
    model_config = from_hf(hf)
    assert model_config.mlp_only_layers == (0, 2)
    for i, layer in enumerate(theirs.model.layers):
        assert hasattr(layer.mlp, "experts") == model_config.has_experts(i)


YARN = {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}


def stretched(**changes):
    return {"rope_scaling": LLAMA["rope_scaling"] | changes}


REFUSED = {  # what this model does not compute, or nobody
    "llama": [
        ({"model_type": "mistral"}, "model_type='mistral' is not supported: only 'llama', 'mixtr"),
        ({"attention_bias": True}, "attention_bias=True is not supported: only False"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported: only 'silu'"),
        (YARN, "rope_type='yarn' is not supported: only 'default' or 'llama3'"),
        (stretched(factor=0), "factor=0: must be greater than 0"),
        (stretched(low_freq_factor=-1.0), "low_freq_factor=-1.0: must be greater than 0"),
        (stretched(high_freq_factor=1.0), "low_freq_factor=1.0 must be below high_freq_factor=1.0"),
        ({"rope_scaling": None, "rope_theta": 0.0}, "rope_theta=0.0: must be greater than 0"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported: only 1.0"),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3 does not divide"),
        (
            {"num_attention_heads": 3, "head_dim": None},
            r"hidden size \(32\) is not a multiple .* heads \(3\)",
        ),
        ({"head_dim": 7}, "even rotary dimension, but got .head_dim.=7"),
        ({"vocab_size": 0}, "vocab_size=0: must be greater than or equal to 1"),
        ({"vocab_size": 0, "rope_theta": -1.0}, "vocab_size=0: .*; rope_theta=-1.0: must be"),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers=1000000000000: must be .* to 10000"),
        ({"hidden_size": "32"}, "'hidden_size' expected int, got str"),
        ({"rope_scaling": "llama3"}, "transformers cannot read it: .*rope_parameters"),
    ],
    "mixtral": [
        ({"sliding_window": 4096}, "sliding_window=4096 is not supported: only None"),
        ({"router_jitter_noise": 0.1}, "router_jitter_noise=0.1 is not supported: only 0.0"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        (YARN, "rope_type='yarn'"),
        ({"layer_types": ["sliding_attention"] * 3}, r"layer_types=\['sliding_attention'"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok=9 exceeds num_local_experts=8"),
        ({"num_experts_per_tok": 1}, "makes every weight 1, and the router learns nothing"),
    ],
    "glm4_moe": [
        ({"use_qk_norm": True}, "use_qk_norm=True is not supported: only False"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported: only 1.0"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
        ({"first_k_dense_replace": 3}, "must name some, not all, of the layers 0 to 2"),
        ({"n_group": 3}, "n_group=3 does not cut num_local_experts=8"),
        ({"topk_group": 5}, "topk_group=5 does not fit"),
    ],
    "qwen2_moe": [
        ({"qkv_bias": True}, "qkv_bias=True is not supported: only False"),
        ({"use_sliding_window": True}, "use_sliding_window=True"),
        ({"shared_expert_intermediate_size": 40}, "=40: must be a multiple of moe_int.*=16"),
        ({"decoder_sparse_step": 4}, "must name some, not all, of the layers 0 to 2"),
        ({"mlp_only_layers": [0, 1, 2]}, "must name some, not all, of the layers 0 to 2"),
    ],
    "qwen3": [({"attention_bias": True}, "attention_bias=True is not supported: only False")],
}


@pytest.mark.parametrize(
    "model_type,change,message", [(t, *case) for t, cases in REFUSED.items() for case in cases]
)
def test_a_model_that_would_be_computed_differently_is_refused(model_type, change, message):
    assert from_hf(FILES[model_type])
    with pytest.raises(ValueError, match=message):
        from_hf(FILES[model_type] | change)


ABSENT = {  # key: whose file, and what transformers takes for it
    "partial_rotary_factor": ("glm4_moe", 0.5),
    "qkv_bias": ("qwen2_moe", True),
}


@pytest.mark.parametrize("key,model_type,value", [(k, *v) for k, v in ABSENT.items()])
def test_an_absent_key_means_what_transformers_takes(key, model_type, value):
    lacking = {k: v for k, v in FILES[model_type].items() if k != key}
    with pytest.raises(ValueError, match=f"{key}={value} is not supported"):
        from_hf(lacking)


ANY_VALUES = (None, True, False, 0, 1, -1, 7, 10**12, 10**400, 0.0, -1e-5, 1e300, float("nan"))
ANY_VALUES += (float("inf"), "", "llama3", "8", [], [1], {}, {"factor": 0}, [[]] * 99)


@pytest.mark.parametrize("model_type", FILES)
def test_any_value_of_any_key_gives_a_model_or_a_value_error(model_type):
    file = FILES[model_type]
    for key in [*file, *LLAMA["rope_scaling"], "rope_parameters", "layer_types"]:
        for value in ANY_VALUES:
            try:
                model_config = from_hf(file | {key: value})
            except ValueError as error:
                assert 0 < len(str(error)) < 600, (key, value)
            else:
                assert sum(map(len, model_config.parameter_shapes().values())) > 0


def test_a_model_that_no_architecture_describes_is_not_exported(tmp_path, monkeypatch):
    monkeypatch.delitem(ARCHITECTURES, "qwen3")
    weights = {name: torch.zeros(shape) for name, shape in NORMED.parameter_shapes().items()}
    name = "model.layers.0.self_attn.q_norm.weight"
    message = rf"'llama' of transformers is another model: {name} is absent there, and \(16,\) here"
    with pytest.raises(ValueError, match=message):
        export_hf(tmp_path / "hf", weights, NORMED, BytesTokenizer())
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    "model,tokenizer",
    {
        "tiny": "bytes",
        "SmolLM-135M": "HuggingFaceTB/SmolLM-135M",
        "huggingfacetb/smollm-135m-instruct": "huggingfacetb/smollm-135m-instruct",
        "Llama-2-7B": "meta-llama/Llama-2-7b-hf",
        "llama-3.2-1B-Instruct": "meta-llama/Llama-3.2-1B",
        "someone/a-llama": "someone/a-llama",
        "./folder": "./folder",
    }.items(),
)
def test_a_model_has_a_tokenizer_of_its_own(model, tokenizer):
    assert tokenizer_of(model) == tokenizer
