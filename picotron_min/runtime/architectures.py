"""Architectures: how transformers names the numbers and tensors of models that we compute.

                          ours                         mixtral
    a number              moe_intermediate_size        intermediate_size
    a tensor's name       mlp.experts.0.gate_proj      block_sparse_moe.experts.0.w1
    not computed                                       sliding_window, unless it is null

Each is a row of ARCHITECTURES; an extension that adds to the model adds its row at the end.
"""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import asdict, fields
from typing import NamedTuple

from picotron_min.extensions import settings
from picotron_min.extensions.settings import SIZES, ModelConfig
from picotron_min.model_config import RopeScaling
from picotron_min.runtime.config import Numbers, RopeNumbers
from picotron_min.runtime.wording import choice

# What all of them have: fields of ModelConfig, and keys with the only value that we compute.
NUMBERS = (*SIZES, "head_dim", "rope_theta", "rms_norm_eps", "tie_word_embeddings")
NUMBERS += ("max_position_embeddings",)
FIXED = {"hidden_act": "silu", "partial_rotary_factor": 1.0}


class Architecture(NamedTuple):
    """What the config.json and the tensors of one `model_type` mean for our model."""

    class_name: str
    fits: Callable[[ModelConfig], bool]  # a model is written as the last row that fits
    fixed: dict[str, object]  # keys with the only value that we compute, beside FIXED
    fields: tuple[str, ...] = ()  # of ModelConfig, beside NUMBERS
    renamed: tuple[tuple[str, str], ...] = ()  # fields with another key in config.json
    read: Callable[[dict], dict] = lambda hf: {}  # what other keys make of fields
    write: Callable[[ModelConfig], dict] = lambda model_config: {}
    tensors: tuple[tuple[str, str], ...] = ()  # parts of our names, and of theirs

    @property
    def keys(self) -> dict[str, str]:
        """Field of ModelConfig -> key of config.json."""
        return {name: name for name in NUMBERS + self.fields} | dict(self.renamed)


def _read_glm4_moe(hf: dict) -> dict:
    dense = [i for i in range(hf["num_hidden_layers"]) if i < hf["first_k_dense_replace"]]
    return {"scoring_func": "sigmoid", "mlp_only_layers": dense}


def _read_qwen2_moe(hf: dict) -> dict:
    inner, shared = hf["moe_intermediate_size"], hf["shared_expert_intermediate_size"]
    if shared % inner:
        why = f"must be a multiple of moe_intermediate_size={inner}, the size of an expert"
        raise ValueError(f"shared_expert_intermediate_size={shared}: {why}")
    dense = [i for i in range(hf["num_hidden_layers"]) if i in hf["mlp_only_layers"]]
    fields = {"n_shared_experts": shared // inner, "moe_shared_expert_gate": shared > 0}
    return fields | {"mlp_only_layers": dense}


def _write_qwen2_moe(model_config: ModelConfig) -> dict:
    shared = model_config.n_shared_experts * model_config.moe_intermediate_size
    layers = {"mlp_only_layers": list(model_config.mlp_only_layers)}
    return {"shared_expert_intermediate_size": shared} | layers


def _needs_qwen2_moe(c: ModelConfig) -> bool:
    more_than_mixtral = c.mlp_only_layers or c.n_shared_experts or not c.norm_topk_prob
    return c.num_local_experts > 0 and c.scoring_func == "softmax" and bool(more_than_mixtral)


DEPTHS = "num_nextn_predict_layers"
EXPERTS = ("num_local_experts", "num_experts_per_tok", "moe_intermediate_size")
SIGMOID = ("n_shared_experts", "norm_topk_prob", "n_group", "topk_group", "routed_scaling_factor")
EXPERT_MATRICES = ((".gate_proj.", ".w1."), (".up_proj.", ".w3."), (".down_proj.", ".w2."))

ARCHITECTURES = {
    "llama": Architecture(
        class_name="LlamaForCausalLM",
        fits=lambda model_config: True,
        fixed={"attention_bias": False, "mlp_bias": False},
        read=lambda hf: {DEPTHS: hf.get("num_mtp_layers", 0)},  # transformers' name, for any model
        write=lambda c: {"num_mtp_layers": depths} if (depths := getattr(c, DEPTHS)) else {},
    ),
    "mixtral": Architecture(
        class_name="MixtralForCausalLM",
        fits=lambda model_config: model_config.num_local_experts > 0,
        fixed={"sliding_window": None, "router_jitter_noise": 0.0},
        fields=EXPERTS,
        renamed=(("moe_intermediate_size", "intermediate_size"),),  # no layer has another MLP
        tensors=((".mlp.", ".block_sparse_moe."), *EXPERT_MATRICES),
    ),
    "glm4_moe": Architecture(
        class_name="Glm4MoeForCausalLM",
        fits=lambda c: c.num_local_experts > 0 and c.scoring_func == "sigmoid",
        fixed={"attention_bias": False, "use_qk_norm": False},
        fields=(*EXPERTS, *SIGMOID, DEPTHS),
        renamed=(("num_local_experts", "n_routed_experts"),),
        read=_read_glm4_moe,
        write=lambda model_config: {"first_k_dense_replace": len(model_config.mlp_only_layers)},
    ),
    "qwen2_moe": Architecture(
        class_name="Qwen2MoeForCausalLM",
        fits=_needs_qwen2_moe,
        fixed={"qkv_bias": False, "use_sliding_window": False, "decoder_sparse_step": 1},
        fields=(*EXPERTS, "norm_topk_prob"),
        renamed=(("num_local_experts", "num_experts"),),
        read=_read_qwen2_moe,
        write=_write_qwen2_moe,
        tensors=((".shared_experts.", ".shared_expert."),),
    ),
}
ARCHITECTURES |= {name: Architecture(**row) for name, row in settings.ARCHITECTURES.items()}


def from_hf(hf: dict) -> ModelConfig:
    """Read a Hugging Face `config.json`.

    ValueError for what this model would not compute; transformers has errors of its own kinds.
    """
    from transformers import AutoConfig

    name = hf.get("model_type", "llama")
    if str(name) not in ARCHITECTURES:
        only = ", ".join(map(repr, ARCHITECTURES))
        raise ValueError(f"model_type={name!r:.60} is not supported: only {only} can be trained")
    # It checks types, fills in what is absent, and reads both spellings of rope.
    hf = AutoConfig.for_model(**deepcopy(hf) | {"model_type": name}).to_dict()
    return _model(name, hf | hf["rope_parameters"])


def _model(name: str, hf: dict) -> ModelConfig:
    """The model of a config.json that has every key, rope's at the top level."""
    architecture = ARCHITECTURES[name]
    fixed = {key: [value] for key, value in (FIXED | architecture.fixed).items()}
    fixed["rope_type"] = ["default", "llama3"]
    fixed["layer_types"] = [None, ["full_attention"] * hf["num_hidden_layers"]]  # others: windows
    for key, good in fixed.items():
        if (value := hf.get(key, good[0])) not in [*good, None]:
            only = choice(map(repr, good))
            raise ValueError(f"{key}={value!r:.60} is not supported: only {only:.60}")
    numbers = {field: hf[key] for field, key in architecture.keys.items()} | architecture.read(hf)
    if hf["rope_type"] == "llama3":
        given = {field.name: hf.get(field.name) for field in fields(RopeScaling)}
        numbers["rope_scaling"] = RopeScaling(**dict(RopeNumbers(**given)))
    return ModelConfig(**dict(Numbers(**numbers)))


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
    theirs = _model(name, hf | (hf["rope_scaling"] or {"rope_type": "default"}))
    if other := {*all_shapes(model_config).items()} ^ {*all_shapes(theirs).items()}:
        problem = f"model_type={name!r} of transformers is another model: only one has {min(other)}"
        raise ValueError(f"{problem}: add an architecture for it to architectures.py")
    return hf


def all_shapes(model_config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor that is saved."""
    return model_config.parameter_shapes() | model_config.buffer_shapes()


def model_type(model_config: ModelConfig) -> str:
    """The architecture that computes a model in transformers."""
    return [name for name, row in ARCHITECTURES.items() if row.fits(model_config)][-1]


def their_name(tensor: str, model_config: ModelConfig) -> str:
    """What transformers calls a tensor of the model in its files."""
    for ours, theirs in ARCHITECTURES[model_type(model_config)].tensors:
        tensor = tensor.replace(ours, theirs)
    return tensor


def our_name(tensor: str) -> str:
    """What we call a tensor of a file of any of the architectures."""
    for architecture in ARCHITECTURES.values():
        for ours, theirs in architecture.tensors:
            tensor = tensor.replace(theirs, ours)
    return tensor
