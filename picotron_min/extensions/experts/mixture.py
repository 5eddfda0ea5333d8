"""Mixture: the shape of a model with experts, and where its parameters lie.

    layers.1.mlp.gate                  [X, E]    the router
    layers.1.mlp.experts.3.up_proj     [F, E]    expert 3, of X; and gate_proj, down_proj
    layers.1.mlp.shared_experts        [n F, E]  an MLP for all tokens, and its gate [1, E]

X experts of size F; a token uses k of them. Standard library only, to plan without torch.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from picotron_min.extensions.family import Family, by_names
from picotron_min.layout import Layout
from picotron_min.model_config import ModelConfig, mlp
from picotron_min.placement import ROW_PARALLEL, Cut, Placement, Table

ROUTER = (".mlp.gate.weight", ".mlp.gate.e_score_correction_bias")
MOST_EXPERTS = 100_000  # of all layers; each has three names, in tables of all parameters
EXPERT = re.compile(r"\.experts\.(\d+)\.")  # its number


@dataclass(frozen=True)
class Mixture(ModelConfig):
    """A model some of whose layers have experts; without experts the numbers have no meaning."""

    num_local_experts: int = 0  # MLPs of a layer, of which each token uses some; 0: one MLP for all
    num_experts_per_tok: int = 2  # chosen by the router
    moe_intermediate_size: int | None = None  # of an expert; None: intermediate_size
    n_shared_experts: int = 0  # every token also uses an MLP of this many times an expert's size
    moe_shared_expert_gate: bool = False  # which a learned number between 0 and 1 scales
    mlp_only_layers: tuple[int, ...] = ()  # layers without experts
    scoring_func: Literal["softmax", "sigmoid"] = "softmax"  # turns a router's logits into scores
    norm_topk_prob: bool = True  # the weights of a token's experts add up to 1
    n_group: int = 1  # with sigmoid: a token's experts are in the best topk_group of n_group
    topk_group: int = 1  # of a token: see n_group
    routed_scaling_factor: float = 1.0  # of the weights

    def __post_init__(self) -> None:
        super().__post_init__()
        inner = self.moe_intermediate_size or self.intermediate_size
        object.__setattr__(self, "moe_intermediate_size", inner)  # the class is frozen
        object.__setattr__(self, "mlp_only_layers", tuple(self.mlp_only_layers))
        if self.num_local_experts and (problems := list(self._expert_problems())):
            raise ValueError("; ".join(problems))

    def _expert_problems(self) -> Iterator[str]:
        """What contradicts itself, or what no published architecture computes."""
        X, k, dense = self.num_local_experts, self.num_experts_per_tok, set(self.mlp_only_layers)
        groups, best, layers = self.n_group, self.topk_group, self.num_hidden_layers
        each = X // groups
        if X * layers > MOST_EXPERTS:
            most = MOST_EXPERTS // layers
            why = f"num_local_experts={X} in {layers} layers are more than {MOST_EXPERTS:,} in all"
            yield f"{why}: use at most {most}, or fewer layers"
        if k > X:
            yield f"num_experts_per_tok={k} exceeds num_local_experts={X}: use at most {X}"
        if k == 1 and self.norm_topk_prob:
            why = "makes every weight 1, and the router learns nothing"
            yield f"num_experts_per_tok=1 with norm_topk_prob=true {why}: use 2, or false"
        if dense and not dense < set(range(layers)):
            why = f"must name some, not all, of the layers 0 to {layers - 1}"
            yield f"mlp_only_layers={sorted(dense)}: {why}"
        if groups > 1 and (X % groups or each < 2):
            good = [n for n in range(1, X // 2 + 1) if X % n == 0]
            why = f"does not cut num_local_experts={X} into equal groups of two or more"
            yield f"n_group={groups} {why}: use one of {good}"
        elif k <= X and not -(-k // each) <= best <= groups:
            why = f"num_experts_per_tok={k} of n_group={groups} groups of {each}"
            yield f"topk_group={best} does not fit {why}: use {-(-k // each)} to {groups}"
        shared, gate, first = self.n_shared_experts, self.moe_shared_expert_gate, len(dense)
        if self.scoring_func == "sigmoid":
            fits = not gate and dense == set(range(first))
            needs = f"moe_shared_expert_gate=false, and of {first} dense layers the first ones"
        else:
            fits = groups == self.routed_scaling_factor == 1 and gate == (shared > 0)
            needs = "n_group=1, routed_scaling_factor=1, and moe_shared_expert_gate=true exactly "
            needs += f"if n_shared_experts={shared} is above 0"
        if not fits:
            yield f'scoring_func="{self.scoring_func}" needs {needs}: change these, or it'

    def has_experts(self, layer: int) -> bool:
        return self.num_local_experts > 0 and layer not in self.mlp_only_layers

    def override(self, **changes) -> "Mixture":
        if self.moe_intermediate_size == self.intermediate_size:
            changes = {"moe_intermediate_size": None} | changes
        return super().override(**changes)

    def mlp_shapes(self, layer: int) -> dict[str, tuple[int, ...]]:
        if not self.has_experts(layer):
            return super().mlp_shapes(layer)
        E, F, n = self.hidden_size, self.moe_intermediate_size, self.n_shared_experts
        shapes = {"post_attention_layernorm": (E,), "mlp.gate": (self.num_local_experts, E)}
        for e in range(self.num_local_experts):
            shapes |= mlp(f"mlp.experts.{e}", E, F)
        shapes |= mlp("mlp.shared_experts", E, n * F) if n else {}
        return shapes | ({"mlp.shared_expert_gate": (1, E)} if self.moe_shared_expert_gate else {})

    def mlp_parameters(self, layer: int) -> dict[str, int]:
        if not self.has_experts(layer):
            return super().mlp_parameters(layer)
        # Those that a token uses cost as much as one MLP of the sum of their sizes. Three matrices
        # of shared experts, as of any MLP; their gate has a single output.
        E, F, k = self.hidden_size, self.moe_intermediate_size, self.num_experts_per_tok
        shared = 3 * self.n_shared_experts * F + self.moe_shared_expert_gate
        always = {"router": E * self.num_local_experts, "shared experts": E * shared}
        return always | {"gate, up": 2 * E * k * F, "down": k * F * E}

    def idle_parameters(self, layer: int) -> int:
        unused = self.num_local_experts - self.num_experts_per_tok
        expert = 3 * self.hidden_size * self.moe_intermediate_size
        return unused * expert if self.has_experts(layer) else 0

    def buffer_shapes(self) -> dict[str, tuple[int, ...]]:
        """The biases of routers."""
        layers = range(self.num_layers) if self.scoring_func == "sigmoid" else ()
        name, shape = "mlp.gate.e_score_correction_bias", (self.num_local_experts,)
        return {f"model.layers.{i}.{name}": shape for i in layers if self.has_experts(i)}


def expert_rows(
    shapes: Mapping[str, Sequence[int]], table: Table, num_layers: Sequence[int], layout: Layout
) -> Table:
    """The placement of experts and routers."""
    num_experts = len({match[1] for match in map(EXPERT.search, shapes) if match})
    rows = {name: _placement(name, layout, num_experts) for name in shapes}
    return {name: row for name, row in rows.items() if row}


def _placement(name: str, layout: Layout, num_experts: int) -> Placement | None:
    if expert := EXPERT.search(name):  # an ep rank has consecutive experts
        dim = 1 if name.removesuffix(".weight").endswith(ROW_PARALLEL) else 0
        owner = int(expert[1]) * layout.ep // num_experts
        cuts = (Cut("ep", 0, owner), Cut("etp", dim))
        return Placement(cuts, copies=("edp",), sums=("edp",), is_hidden_matrix=True)
    if name.endswith(ROUTER):  # each tp rank sees other tokens, also without sequence parallelism
        return Placement((), copies=("dp_cp", "tp"), sums=("dp_cp_tp",))
    if name.endswith("shared_expert_gate.weight"):  # on all of the tokens that its rank has
        sums = ("dp_cp_tp",) if layout.sequence_parallel else ("dp_cp",)
        return Placement((), copies=("dp_cp", "tp"), sums=sums)
    return None


def _tiny(c: Mixture, layout: Layout, num_layers: int) -> dict[str, object]:
    if not c.num_local_experts:
        return {}
    groups = min(2, c.n_group)  # a token uses the better one
    unit = math.lcm(layout.ep, groups)
    return {
        "num_local_experts": unit * -(-4 // unit),
        "num_experts_per_tok": 2,
        "moe_intermediate_size": layout.etp * -(-16 // layout.etp),
        "n_shared_experts": min(1, c.n_shared_experts),
        "mlp_only_layers": (0,) if c.mlp_only_layers else (),
        "n_group": groups,
        "topk_group": 1,
    }


EXPERTS = ("num_local_experts", "num_experts_per_tok", "moe_intermediate_size")
SIGMOID = ("n_shared_experts", "norm_topk_prob", "n_group", "topk_group", "routed_scaling_factor")
MATRICES = ((".gate_proj.", ".w1."), (".up_proj.", ".w3."), (".down_proj.", ".w2."))
MIXTRAL = {
    "class_name": "MixtralForCausalLM",
    "fixed": {"sliding_window": None, "router_jitter_noise": 0.0},
    "fields": EXPERTS,
    "renamed": (("moe_intermediate_size", "intermediate_size"),),  # no layer has another MLP
    "tensors": ((".mlp.", ".block_sparse_moe."), *MATRICES),
}
GLM4_MOE = {
    "class_name": "Glm4MoeForCausalLM",
    "fixed": {"attention_bias": False, "use_qk_norm": False},
    "fields": (*EXPERTS, *SIGMOID, "num_nextn_predict_layers"),
    "renamed": (("num_local_experts", "n_routed_experts"),),
    "read": lambda hf: {
        "scoring_func": "sigmoid",
        "mlp_only_layers": [*range(hf["first_k_dense_replace"])],
    },
    "write": lambda c: {"first_k_dense_replace": len(c.mlp_only_layers)},
}

_mixtral = {"rope_theta": 1e6, "num_local_experts": 8}
FAMILY = Family(
    Mixture,
    extension=None,
    kind=by_names,
    modules=("gate", "shared_expert_gate"),
    rows=expert_rows,
    architectures={"mixtral": MIXTRAL, "glm4_moe": GLM4_MOE},
    presets={
        "mistralai/Mixtral-8x7B-v0.1": Mixture(
            *(32_000, 4096, 14_336, 32, 32, 8), max_position_embeddings=32_768, **_mixtral
        ),
        "mistralai/Mixtral-8x22B-v0.1": Mixture(
            *(32_000, 6144, 16_384, 56, 48, 8), max_position_embeddings=65_536, **_mixtral
        ),
    },
    tiny=_tiny,
)
