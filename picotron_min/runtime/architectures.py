"""Architectures of transformers that our model computes: their config.json, and their tensors.

                          ours                         mixtral
    a number              moe_intermediate_size        intermediate_size
    a tensor's name       mlp.experts.0.gate_proj      block_sparse_moe.experts.0.w1
    not computed                                       sliding_window, unless it is null

ARCHITECTURES has them by their `model_type`. Standard library only, to plan without torch.
"""

from collections.abc import Callable
from typing import NamedTuple

from picotron_min.extensions.settings import SIZES, ModelConfig


class Architecture(NamedTuple):
    """How transformers names what our model has, and what of the rest we compute."""

    class_name: str
    keys: dict[str, str]  # of config.json, for fields of ModelConfig
    defaults: dict[str, object]  # of those that a file may lack
    only: dict[str, tuple]  # other keys: what an absent one means, and the values that we compute
    more: tuple[str, ...] = ()  # further keys, which these two turn into fields, and back
    read: Callable[[dict], dict] = lambda hf: {}
    write: Callable[[ModelConfig], dict] = lambda model_config: {}
    tensors: tuple[tuple[str, str], ...] = ()  # parts of our names, and of theirs


def _same(*names: str) -> dict[str, str]:
    return {name: name for name in names}


NUMBERS = _same(*SIZES, "head_dim", "rope_theta", "rms_norm_eps", "tie_word_embeddings")
NUMBERS |= _same("max_position_embeddings")
LIMITS = {"hidden_act": ("silu", ["silu"]), "partial_rotary_factor": (1.0, [1.0])}
NO_BIAS = {"attention_bias": (False, [False])}

LLAMA = Architecture(
    class_name="LlamaForCausalLM",
    keys=NUMBERS,
    defaults={
        "num_key_value_heads": None,  # num_attention_heads
        "head_dim": None,  # hidden_size / num_attention_heads
        "rope_theta": 10_000.0,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "max_position_embeddings": 2048,
    },
    only=LIMITS | NO_BIAS | {"mlp_bias": (False, [False])},
)

MIXTRAL = Architecture(
    class_name="MixtralForCausalLM",
    keys=NUMBERS
    | _same("num_local_experts", "num_experts_per_tok")
    | {"moe_intermediate_size": "intermediate_size"},  # no layer has another MLP
    defaults={"head_dim": None},
    only=LIMITS | {"sliding_window": (None, [None]), "router_jitter_noise": (0.0, [0.0])},
    tensors=(
        (".mlp.", ".block_sparse_moe."),
        (".gate_proj.", ".w1."),
        (".up_proj.", ".w3."),
        (".down_proj.", ".w2."),
    ),
)

# What glm4_moe and solar_open share: DeepSeek-V3's router.
SIGMOID = NUMBERS | {"num_local_experts": "n_routed_experts"}
SIGMOID |= _same("num_experts_per_tok", "moe_intermediate_size", "n_shared_experts")
SIGMOID |= _same("norm_topk_prob", "n_group", "topk_group", "routed_scaling_factor")
NO_NORM = {"use_qk_norm": (False, [False])}  # norms of queries and keys


def _read_glm4_moe(hf: dict) -> dict:
    dense, layers = hf["first_k_dense_replace"], hf["num_hidden_layers"]
    if dense >= layers:
        raise ValueError(f"first_k_dense_replace={dense}: must be below num_hidden_layers={layers}")
    return {"scoring_func": "sigmoid", "mlp_only_layers": tuple(range(dense))}


GLM4_MOE = Architecture(
    class_name="Glm4MoeForCausalLM",
    keys=SIGMOID,
    defaults={"head_dim": None},
    only=LIMITS
    | NO_BIAS
    | NO_NORM
    | {
        "partial_rotary_factor": (0.5, [1.0]),
        "num_nextn_predict_layers": (1, [0]),  # layers that predict tokens further ahead
    },
    more=("first_k_dense_replace",),
    read=_read_glm4_moe,
    write=lambda config: {"first_k_dense_replace": len(config.mlp_only_layers)},
)

SOLAR_OPEN = Architecture(
    class_name="SolarOpenForCausalLM",
    keys=SIGMOID | {"intermediate_size": "moe_intermediate_size"},  # no layer has another MLP
    defaults={},  # an absent head_dim would mean 128
    only=LIMITS | NO_BIAS | NO_NORM | {"first_k_dense_replace": (0, [0])},
    read=lambda hf: {"scoring_func": "sigmoid"},
)


def _read_qwen2_moe(hf: dict) -> dict:
    inner, shared = hf["moe_intermediate_size"], hf["shared_expert_intermediate_size"]
    if shared % inner:
        why = f"must be a multiple of moe_intermediate_size={inner}, the size of an expert"
        raise ValueError(f"shared_expert_intermediate_size={shared}: {why}")
    given, step, layers = hf["mlp_only_layers"], hf["decoder_sparse_step"], hf["num_hidden_layers"]
    dense = [i for i in range(layers) if i in given or (i + 1) % step]
    if len(dense) == layers:
        why = f"mlp_only_layers={given!r:.60} and decoder_sparse_step={step} leave no layer"
        raise ValueError(f"{why} with experts: use [] and 1 for experts in all")
    fields = {"n_shared_experts": shared // inner, "moe_shared_expert_gate": shared > 0}
    return fields | {"mlp_only_layers": tuple(dense)}


def _write_qwen2_moe(model_config: ModelConfig) -> dict:
    shared = model_config.n_shared_experts * model_config.moe_intermediate_size
    layers = {"mlp_only_layers": list(model_config.mlp_only_layers), "decoder_sparse_step": 1}
    return {"shared_expert_intermediate_size": shared} | layers


QWEN2_MOE = Architecture(
    class_name="Qwen2MoeForCausalLM",
    keys=NUMBERS
    | _same("num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob")
    | {"num_local_experts": "num_experts"},
    defaults={"head_dim": None},
    only=LIMITS | {"qkv_bias": (True, [False]), "use_sliding_window": (False, [False])},
    more=("shared_expert_intermediate_size", "mlp_only_layers", "decoder_sparse_step"),
    read=_read_qwen2_moe,
    write=_write_qwen2_moe,
    tensors=((".shared_experts.", ".shared_expert."),),
)

ARCHITECTURES = {
    "llama": LLAMA,
    "mixtral": MIXTRAL,
    "glm4_moe": GLM4_MOE,
    "solar_open": SOLAR_OPEN,
    "qwen2_moe": QWEN2_MOE,
}
# Others with experts, and what our model lacks for them.
REFUSED = {
    "qwen3_moe": "it has norms of queries and keys",
    "olmoe": "it has norms of queries and keys",
    "deepseek_v2": "it has latent attention",
    "deepseek_v3": "it has latent attention",
}


def model_type(model_config: ModelConfig) -> str:
    """The architecture that computes a model in transformers; every ModelConfig has one."""
    if not model_config.num_local_experts:
        return "llama"
    if model_config.scoring_func == "sigmoid":
        return "glm4_moe"  # also what solar_open computes
    has_mlps = model_config.mlp_only_layers or model_config.n_shared_experts
    return "qwen2_moe" if has_mlps or not model_config.norm_topk_prob else "mixtral"


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
