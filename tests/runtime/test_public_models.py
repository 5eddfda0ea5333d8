"""Public models by name, and every field of a Hugging Face config.json, right or wrong."""

import pytest
import torch
import transformers

from picotron_min.extensions.experts.moe import apply_moe
from picotron_min.extensions.experts.router import RoutingCounts
from picotron_min.extensions.settings import SIZES, ModelConfig, Routing
from picotron_min.model import Llama
from picotron_min.model_config import RopeScaling
from picotron_min.runtime.architectures import ARCHITECTURES
from picotron_min.runtime.hugging_face import export_hf
from picotron_min.runtime.public_models import (
    PRESETS,
    find_preset,
    from_hf,
    to_hf,
    tokenizer_of,
)
from picotron_min.runtime.tokenizer import BytesTokenizer

BASE = ModelConfig(97, 32, 56, 3, 4, 4)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_the_parameters_that_transformers_builds(name):
    model_config = PRESETS[name]
    with torch.device("meta"):
        ours = Llama(model_config)
        apply_moe(ours, Routing(), RoutingCounts(model_config, torch.device("meta")))
        their_config = transformers.AutoConfig.for_model(**to_hf(model_config))
        theirs = transformers.AutoModelForCausalLM.from_config(their_config)
    theirs.tie_weights()  # 5.0 did not, without memory
    shapes = {name: tuple(p.shape) for name, p in ours.named_parameters()}
    assert shapes == unstacked({name: tuple(p.shape) for name, p in theirs.named_parameters()})
    assert shapes == model_config.parameter_shapes()


def unstacked(shapes: dict[str, tuple]) -> dict[str, tuple]:
    """Their parameters, with the matrices of each expert apart, as in files."""
    apart = {}
    for name, shape in shapes.items():
        base, is_stack, kind = name.partition(".experts.")
        if not is_stack:
            apart[name] = shape
            continue
        num_experts, rows, columns = shape
        rows = rows // 2 if kind == "gate_up_proj" else rows
        for e in range(num_experts):
            for projection in kind.replace("gate_up", "gate_proj,up").split(","):
                apart[f"{base}.experts.{e}.{projection}.weight"] = rows, columns
    return apart


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
    shapes = find_preset(name).parameter_shapes().values()
    count = sum(torch.Size(shape).numel() for shape in shapes)
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


def test_config_survives_a_round_trip_through_transformers():
    for model_config in PRESETS.values():
        there = transformers.AutoConfig.for_model(**to_hf(model_config)).to_dict()
        assert from_hf(there) == model_config


@pytest.mark.parametrize(
    "change,message",
    [
        ({"model_type": "mistral"}, "model_type='mistral'"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type='yarn'"),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3 does not divide"),
        ({"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": None}, "heads=3"),
        ({"head_dim": 7}, "head_dim=7 is odd"),
        ({"vocab_size": 0}, "vocab_size=0"),
    ],
)
def test_a_model_that_would_be_computed_differently_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        from_hf(to_hf(BASE) | change)


def test_a_missing_number_is_the_one_that_transformers_takes():
    hf = {"model_type": "llama"} | {name: getattr(BASE, name) for name in SIZES}
    theirs = transformers.LlamaConfig(**hf)
    ours = from_hf(hf)
    for name in ("rms_norm_eps", "tie_word_embeddings", "max_position_embeddings", "head_dim"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert ours.rope_theta == theirs.rope_parameters["rope_theta"]
    del hf["num_key_value_heads"]
    assert from_hf(hf).num_key_value_heads == from_hf(hf | {"head_dim": None}).num_attention_heads


STRETCHED = to_hf(BASE.override(rope_scaling=RopeScaling(8.0)))


@pytest.mark.parametrize(
    "change,message",
    [
        ({"rms_norm_eps": -1e-5}, "rms_norm_eps=-1e-05: must be a number from 1e-30 up to"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps='1e-5': must be a number"),
        ({"hidden_size": None}, "hidden_size=None: must be a whole number from 1 up to 10,000,000"),
        ({"hidden_size": [32]}, r"hidden_size=\[32\]: must be a whole number"),
        ({"hidden_size": 32.0}, "hidden_size=32.0: must be a whole number"),
        ({"num_hidden_layers": True}, "num_hidden_layers=True: must be a whole number"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000: must be .* to 10,000"),
        ({"rope_theta": 0}, "rope_theta=0: must be a number"),
        ({"rope_theta": float("nan")}, "rope_theta=nan: must be a number"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings='false': must be true or false"),
        ({"tie_word_embeddings": 0}, "tie_word_embeddings=0: must be true or false"),
        ({"attention_bias": None}, "attention_bias=None is not supported"),
        ({"attention_bias": 0}, "attention_bias=0 is not supported"),
        ({"hidden_act": ["silu"]}, r"hidden_act=\['silu'\] is not supported"),
        ({"rope_scaling": "llama3"}, "rope_scaling='llama3': must be an object"),
        ({"rope_parameters": [1]}, r"rope_parameters=\[1\]: must be an object"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported"),
        ({"head_dim": "8"}, "head_dim='8': must be a whole number"),
        ({"max_position_embeddings": 0}, "max_position_embeddings=0: must be a whole number"),
        ({"vocab_size": "97", "rms_norm_eps": 0}, "vocab_size='97'.*; rms_norm_eps=0: must be"),
    ],
)
def test_a_wrong_number_is_refused_with_its_key_and_the_remedy(change, message):
    with pytest.raises(ValueError, match=message):
        from_hf(to_hf(BASE) | change)


@pytest.mark.parametrize(
    "change,message",
    [
        ({"factor": 0}, "factor=0: must be a number from 1 up to"),
        ({"factor": None}, "factor=None: must be a number from 1 up to"),
        ({"low_freq_factor": 4.0}, "high_freq_factor=4.0: must be above low_freq_factor=4.0"),
        ({"low_freq_factor": 5}, "high_freq_factor=4.0: must be above low_freq_factor=5"),
        ({"original_max_position_embeddings": 8192.5}, "embeddings=8192.5: must be a whole"),
        ({"rope_type": ["llama3"]}, r"rope_type=\['llama3'\] is not supported"),
        ({"high_freq_factor": "4"}, "high_freq_factor='4': must be a number"),
    ],
)
def test_a_wrong_rotary_setting_is_refused_in_both_spellings(change, message):
    scaling = STRETCHED["rope_scaling"] | change
    for spelling in ({"rope_scaling": scaling}, {"rope_scaling": None, "rope_parameters": scaling}):
        with pytest.raises(ValueError, match=message):
            from_hf(STRETCHED | spelling)
    for name in ("factor", "low_freq_factor", "original_max_position_embeddings"):
        lacking = {key: value for key, value in STRETCHED["rope_scaling"].items() if key != name}
        with pytest.raises(ValueError, match=f"config.json lacks {name}"):
            from_hf(STRETCHED | {"rope_scaling": lacking})


ANY_VALUES = (
    *(None, True, False, 0, 1, -1, 7, 10**6, 10**12, 10**400, 0.0, 1e-9, -1e-5, 1e300, 2.0),
    *(
        float("nan"),
        float("inf"),
        "",
        "false",
        "llama3",
        "8",
        [],
        [1],
        {},
        {"factor": 0},
        [[]] * 99,
    ),
)
FIELDS = sorted(
    {*STRETCHED, "rope_parameters", "rope_type", "type", "partial_rotary_factor"}
    - {"architectures"}
)


@pytest.mark.parametrize("key", [*FIELDS, *STRETCHED["rope_scaling"]])
def test_any_value_of_any_key_gives_a_model_or_a_value_error_that_names_it(key):
    refused = 0
    for value in ANY_VALUES:
        changed = [STRETCHED | {key: value}]
        if key not in ("rope_scaling", "rope_parameters"):
            changed.append(STRETCHED | {"rope_scaling": STRETCHED["rope_scaling"] | {key: value}})
        for hf in changed:
            try:
                model_config = from_hf(hf)
            except ValueError as error:
                refused += 1
                named = ("lacks", "factor") if key in ("rope_scaling", "rope_parameters") else ()
                assert any(name in str(error) for name in (key, "head_dim", *named)), (value, error)
                assert len(str(error)) < 300
            else:
                assert sum(map(len, model_config.parameter_shapes().values())) > 0
    is_read = key not in ("type",)  # rope_type is given
    assert refused > len(ANY_VALUES) / 3 or not is_read


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
GLM = to_hf(SIGMOID)
SOLAR = GLM | {"model_type": "solar_open", "first_k_dense_replace": 0}
del SOLAR["num_nextn_predict_layers"]
FILES = {"mixtral": to_hf(EXPERTS), "glm4_moe": GLM, "solar_open": SOLAR, "qwen2_moe": to_hf(GATED)}


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
    ],
)
def test_every_model_with_experts_has_an_architecture(model_config):
    hf = to_hf(model_config)
    there = transformers.AutoConfig.for_model(**hf)
    assert type(there) is not transformers.PreTrainedConfig
    if hf["model_type"] == "mixtral":  # which has no other MLPs
        model_config = model_config.override(intermediate_size=model_config.moe_intermediate_size)
    assert from_hf(hf) == from_hf(there.to_dict()) == model_config


def test_solar_open_is_a_glm_without_dense_layers():
    solar = {key: value for key, value in SOLAR.items() if key != "intermediate_size"}
    there = transformers.SolarOpenConfig(**solar)
    assert there.head_dim == SIGMOID.head_dim
    expected = SIGMOID.override(mlp_only_layers=(), intermediate_size=16)
    assert from_hf(solar) == from_hf(SOLAR) == from_hf(there.to_dict()) == expected
    assert from_hf(to_hf(expected)) == expected


@pytest.mark.parametrize("numbers", [{"decoder_sparse_step": 2}, {"mlp_only_layers": [0, 2, 7]}])
def test_layers_without_experts_are_those_of_transformers(numbers):
    hf = FILES["qwen2_moe"] | {"mlp_only_layers": []} | numbers
    with torch.device("meta"):
        theirs = transformers.Qwen2MoeForCausalLM(transformers.Qwen2MoeConfig(**hf))
    model_config = from_hf(hf)
    assert model_config.mlp_only_layers == (0, 2)
    for i, layer in enumerate(theirs.model.layers):
        assert hasattr(layer.mlp, "experts") == model_config.has_experts(i)


REFUSED = {
    "mixtral": [
        ({"sliding_window": 4096}, "sliding_window=4096 is not supported: only None can be"),
        ({"router_jitter_noise": 0.1}, "router_jitter_noise=0.1 is not supported: only 0.0"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope_type='yarn'"),
        ({"layer_types": ["sliding_attention"] * 3}, r"layer_types=\['sliding_attention'"),
        ({"layer_types": 3}, "layer_types=3 is not supported"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok=9 exceeds num_local_experts=8"),
        ({"num_experts_per_tok": 1}, "makes every weight 1, and the router learns nothing"),
        ({"num_local_experts": 0}, "num_local_experts=0: model_type='mixtral' needs 1 or more"),
    ],
    "glm4_moe": [
        ({"use_qk_norm": True}, "use_qk_norm=True is not supported: only False"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported: only 1.0"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
        ({"num_nextn_predict_layers": 1}, "num_nextn_predict_layers=1 is not supported: only 0"),
        ({"first_k_dense_replace": 3}, "replace=3: must be below num_hidden_layers=3"),
        ({"n_group": 3}, "n_group=3 does not cut num_local_experts=8"),
        ({"topk_group": 5}, "topk_group=5 does not fit"),
        ({"n_routed_experts": "8"}, "n_routed_experts='8': must be a whole number"),
    ],
    "solar_open": [
        ({"use_qk_norm": True}, "use_qk_norm=True is not supported"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"first_k_dense_replace": 1}, "first_k_dense_replace=1 is not supported: only 0"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope_type='yarn'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
    ],
    "qwen2_moe": [
        ({"qkv_bias": True}, "qkv_bias=True is not supported: only False"),
        ({"use_sliding_window": True}, "use_sliding_window=True"),
        ({"shared_expert_intermediate_size": 40}, "=40: must be a multiple of moe_int.*=16"),
        ({"decoder_sparse_step": 4}, "decoder_sparse_step=4 leave no layer with experts: use"),
        ({"mlp_only_layers": [0, 1, 2]}, r"mlp_only_layers=\[0, 1, 2\] and .* leave no layer"),
        ({"mlp_only_layers": [-1]}, r"mlp_only_layers=\[-1\]: must be a list of layers"),
        ({"mlp_only_layers": None}, "mlp_only_layers=None: must be a list of layers"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step=0: must be a whole number from 1"),
        ({"num_experts": 0}, "num_experts=0: must be a whole number from 1"),
    ],
}


@pytest.mark.parametrize(
    "model_type,change,message", [(t, *case) for t, cases in REFUSED.items() for case in cases]
)
def test_experts_that_would_be_computed_differently_are_refused(model_type, change, message):
    assert from_hf(FILES[model_type]).num_local_experts == 8
    with pytest.raises(ValueError, match=message):
        from_hf(FILES[model_type] | change)


@pytest.mark.parametrize(
    "model_type,reason",
    {
        "qwen3_moe": "it has norms of queries and keys",
        "olmoe": "it has norms of queries and keys",
        "deepseek_v2": "it has latent attention",
        "deepseek_v3": "it has latent attention",
        "gpt_oss": "is not supported: only",
    }.items(),
)
def test_other_architectures_are_refused_with_the_reason(model_type, reason):
    with pytest.raises(ValueError, match=f"model_type='{model_type}' is not supported") as error:
        from_hf(GLM | {"model_type": model_type})
    assert reason in str(error.value)
    assert "only 'llama', 'mixtral', 'glm4_moe', 'solar_open', 'qwen2_moe', 'qwen3'" in str(
        error.value
    )


# What transformers would take for some of these is another number than ours, or another model.
DEMANDED = {
    "mixtral": ["rope_theta", "num_key_value_heads", "num_local_experts", "rms_norm_eps"],
    "glm4_moe": ["rope_theta", "n_group", "first_k_dense_replace", "norm_topk_prob"],
    "solar_open": ["rope_theta", "head_dim", "n_shared_experts", "moe_intermediate_size"],
    "qwen2_moe": ["rope_theta", "mlp_only_layers", "decoder_sparse_step", "num_experts"],
}
ABSENT = {
    "partial_rotary_factor": ("glm4_moe", 0.5),
    "num_nextn_predict_layers": ("glm4_moe", 1),
    "qkv_bias": ("qwen2_moe", True),
}


@pytest.mark.parametrize("model_type", DEMANDED)
def test_what_a_file_with_experts_lacks_is_demanded(model_type):
    for key in DEMANDED[model_type]:
        lacking = {k: value for k, value in FILES[model_type].items() if k != key}
        with pytest.raises(ValueError, match=f"config.json lacks {key}$"):
            from_hf(lacking)
    if model_type != "solar_open":
        hf = {k: value for k, value in FILES[model_type].items() if k != "head_dim"}
        assert from_hf(hf).head_dim == 8 == from_hf(hf | {"head_dim": None}).head_dim


@pytest.mark.parametrize("key,model_type,value", [(k, *v) for k, v in ABSENT.items()])
def test_an_absent_key_means_what_transformers_takes(key, model_type, value):
    lacking = {k: v for k, v in FILES[model_type].items() if k != key}
    there = transformers.AutoConfig.for_model(**lacking)
    assert (there.to_dict() | there.rope_parameters)[key] == value
    with pytest.raises(ValueError, match=rf"{key}={value} \(the default, as config.json lacks"):
        from_hf(lacking)


@pytest.mark.parametrize("model_type", FILES)
def test_any_value_of_any_key_of_experts_gives_a_model_or_a_value_error(model_type):
    ours = {"n_routed_experts": "num_local_experts", "num_experts": "num_local_experts"}
    for key in FILES[model_type].keys() - {"architectures", "model_type", "rope_scaling"}:
        refused = 0
        for value in ANY_VALUES:
            try:
                model_config = from_hf(FILES[model_type] | {key: value})
            except ValueError as error:
                refused += 1
                names = (key, ours.get(key, key), "head_dim", "moe_intermediate_size")
                assert any(name in str(error) for name in names), (key, value, error)
                assert len(str(error)) < 400
            else:
                assert model_config.num_local_experts > 0
        free = model_type == "solar_open" and key == "intermediate_size"  # it has none
        free |= key in ("mlp_only_layers", "norm_topk_prob", "tie_word_embeddings")
        assert refused > len(ANY_VALUES) / 3 or free, key


NORMED = ModelConfig(97, 32, 56, 3, 4, 2, head_dim=16, qk_norm=True)


def test_an_extension_adds_an_architecture_by_a_row():
    hf = to_hf(NORMED)
    there = transformers.AutoConfig.for_model(**hf)
    assert type(there) is transformers.Qwen3Config
    assert from_hf(hf) == from_hf(there.to_dict()) == NORMED
    with torch.device("meta"):
        theirs = transformers.AutoModelForCausalLM.from_config(there)
    shapes = {name: tuple(p.shape) for name, p in theirs.named_parameters()}
    assert shapes == NORMED.parameter_shapes()
    with pytest.raises(ValueError, match="attention_bias=True is not supported: only False"):
        from_hf(hf | {"attention_bias": True})
    with pytest.raises(ValueError, match=r"config\.json lacks head_dim$"):
        from_hf({key: value for key, value in hf.items() if key != "head_dim"})
    plain = NORMED.override(qk_norm=False)
    assert to_hf(plain)["model_type"] == "llama" and from_hf(to_hf(plain)) == plain


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
