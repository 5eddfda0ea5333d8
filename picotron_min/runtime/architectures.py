"""Architectures: how transformers names the numbers and tensors of models that we compute.

                          ours                         mixtral
    a number              moe_intermediate_size        intermediate_size
    a tensor's name       mlp.experts.0.gate_proj      block_sparse_moe.experts.0.w1
    not computed                                       sliding_window, unless it is null

Each is a row of ARCHITECTURES; an extension that adds to the model adds its row at the end.
Standard library only, to plan without torch.
"""

from collections.abc import Callable
from typing import NamedTuple

from picotron_min.extensions import settings
from picotron_min.extensions.settings import SIZES, ModelConfig

# What all of them have: fields of ModelConfig, and keys with the only value that we compute.
NUMBERS = (*SIZES, "head_dim", "rope_theta", "rms_norm_eps", "tie_word_embeddings")
NUMBERS += ("max_position_embeddings",)
FIXED = {"hidden_act": "silu", "partial_rotary_factor": 1.0}


class Architecture(NamedTuple):
    """What the config.json and the tensors of one `model_type` mean for our model."""

    class_name: str
    fits: Callable[[ModelConfig], bool]  # a model is written as the last row that fits
    fixed: dict[str, object]  # keys with the only value that we compute, beside FIXED
    defaults: dict[str, object]  # what absent keys mean; else the fixed value, or a mistake
    fields: tuple[str, ...] = ()  # of ModelConfig, beside NUMBERS
    renamed: tuple[tuple[str, str], ...] = ()  # fields with another key in config.json
    more: tuple[str, ...] = ()  # keys that `read` turns into fields, and `write` back
    read: Callable[[dict], dict] = lambda hf: {}
    write: Callable[[ModelConfig], dict] = lambda model_config: {}
    tensors: tuple[tuple[str, str], ...] = ()  # parts of our names, and of theirs

    @property
    def keys(self) -> dict[str, str]:
        """Field of ModelConfig -> key of config.json."""
        return {name: name for name in NUMBERS + self.fields} | dict(self.renamed)


def _read_glm4_moe(hf: dict) -> dict:
    dense, layers = hf["first_k_dense_replace"], hf["num_hidden_layers"]
    if dense >= layers:
        raise ValueError(f"first_k_dense_replace={dense}: must be below num_hidden_layers={layers}")
    return {"scoring_func": "sigmoid", "mlp_only_layers": tuple(range(dense))}


def _read_qwen2_moe(hf: dict) -> dict:
    inner, shared = hf["moe_intermediate_size"], hf["shared_expert_intermediate_size"]
    if shared % inner:
        why = f"must be a multiple of moe_intermediate_size={inner}, the size of an expert"
        raise ValueError(f"shared_expert_intermediate_size={shared}: {why}")
    given, step, layers = hf["mlp_only_layers"], hf["decoder_sparse_step"], hf["num_hidden_layers"]
    dense = tuple(i for i in range(layers) if i in given or (i + 1) % step)
    if len(dense) == layers:
        why = f"mlp_only_layers={given!r:.60} and decoder_sparse_step={step} leave no layer"
        raise ValueError(f"{why} with experts: use [] and 1 for experts in all")
    fields = {"n_shared_experts": shared // inner, "moe_shared_expert_gate": shared > 0}
    return fields | {"mlp_only_layers": dense}


def _write_qwen2_moe(model_config: ModelConfig) -> dict:
    shared = model_config.n_shared_experts * model_config.moe_intermediate_size
    layers = {"mlp_only_layers": list(model_config.mlp_only_layers), "decoder_sparse_step": 1}
    return {"shared_expert_intermediate_size": shared} | layers


def _needs_qwen2_moe(c: ModelConfig) -> bool:
    more_than_mixtral = c.mlp_only_layers or c.n_shared_experts or not c.norm_topk_prob
    return c.num_local_experts > 0 and c.scoring_func == "softmax" and bool(more_than_mixtral)


EXPERTS = ("num_local_experts", "num_experts_per_tok", "moe_intermediate_size")
SIGMOID = ("n_shared_experts", "norm_topk_prob", "n_group", "topk_group", "routed_scaling_factor")
EXPERT_MATRICES = ((".gate_proj.", ".w1."), (".up_proj.", ".w3."), (".down_proj.", ".w2."))

ARCHITECTURES = {
    "llama": Architecture(
        class_name="LlamaForCausalLM",
        fits=lambda model_config: True,
        fixed={"attention_bias": False, "mlp_bias": False},
        defaults={
            "num_key_value_heads": None,  # num_attention_heads
            "head_dim": None,  # hidden_size / num_attention_heads
            "rope_theta": 10_000.0,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": False,
            "max_position_embeddings": 2048,
        },
    ),
    "mixtral": Architecture(
        class_name="MixtralForCausalLM",
        fits=lambda model_config: model_config.num_local_experts > 0,
        fixed={"sliding_window": None, "router_jitter_noise": 0.0},
        defaults={"head_dim": None},
        fields=EXPERTS,
        renamed=(("moe_intermediate_size", "intermediate_size"),),  # no layer has another MLP
        tensors=((".mlp.", ".block_sparse_moe."), *EXPERT_MATRICES),
    ),
    "glm4_moe": Architecture(
        class_name="Glm4MoeForCausalLM",
        fits=lambda c: c.num_local_experts > 0 and c.scoring_func == "sigmoid",
        fixed={"attention_bias": False, "use_qk_norm": False, "num_nextn_predict_layers": 0},
        defaults={"head_dim": None, "partial_rotary_factor": 0.5, "num_nextn_predict_layers": 1},
        fields=EXPERTS + SIGMOID,
        renamed=(("num_local_experts", "n_routed_experts"),),
        more=("first_k_dense_replace",),
        read=_read_glm4_moe,
        write=lambda model_config: {"first_k_dense_replace": len(model_config.mlp_only_layers)},
    ),
    "solar_open": Architecture(
        class_name="SolarOpenForCausalLM",
        fits=lambda model_config: False,  # glm4_moe computes the same
        fixed={"attention_bias": False, "use_qk_norm": False, "first_k_dense_replace": 0},
        defaults={},  # an absent head_dim would mean 128
        fields=EXPERTS + SIGMOID,
        renamed=(
            ("num_local_experts", "n_routed_experts"),
            ("intermediate_size", "moe_intermediate_size"),  # no layer has another MLP
        ),
        read=lambda hf: {"scoring_func": "sigmoid"},
    ),
    "qwen2_moe": Architecture(
        class_name="Qwen2MoeForCausalLM",
        fits=_needs_qwen2_moe,
        fixed={"qkv_bias": False, "use_sliding_window": False},
        defaults={"head_dim": None, "qkv_bias": True},
        fields=(*EXPERTS, "norm_topk_prob"),
        renamed=(("num_local_experts", "num_experts"),),
        more=("shared_expert_intermediate_size", "mlp_only_layers", "decoder_sparse_step"),
        read=_read_qwen2_moe,
        write=_write_qwen2_moe,
        tensors=((".shared_experts.", ".shared_expert."),),
    ),
}
ARCHITECTURES |= {name: Architecture(**row) for name, row in settings.ARCHITECTURES.items()}
# Others with experts, and what our model lacks for them.
REFUSED = dict.fromkeys(["qwen3_moe", "olmoe"], "it has norms of queries and keys")
REFUSED |= dict.fromkeys(["deepseek_v2", "deepseek_v3"], "it has latent attention")


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
