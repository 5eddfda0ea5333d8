"""A Llama is defined by a dozen numbers: they give each parameter its name and its shape.

    token ids -> embed_tokens -> layer 0, 1, ... -> norm -> lm_head -> a score for each token
    [B, S]       [vocab, E]      attention, MLP     [E]     [vocab, E]  [B, S, vocab]

E is `hidden_size`; all names are Hugging Face's. Standard library only, to plan without torch.
"""

from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields, replace


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3's stretching of the slow rotary frequencies (`rope_type` "llama3")."""

    factor: float  # by which slow ones are stretched
    low_freq_factor: float = 1.0  # slow: fewer turns than this in the original context
    high_freq_factor: float = 4.0  # fast, not stretched: more than this; interpolated between
    original_max_position_embeddings: int = 8192


@dataclass(frozen=True)
class ModelConfig:
    """All that defines a Llama but its weights. Raises ValueError if numbers contradict others."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int  # of the MLP
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int  # each serves the same number of attention heads
    head_dim: int | None = None  # None: hidden_size / num_attention_heads
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = False  # one matrix is both embed_tokens and lm_head
    max_position_embeddings: int = 2048  # the longest sequence that it is meant for

    # Mixture of experts, see experts/moe.py; without experts the rest has no meaning.
    num_local_experts: int = 0  # MLPs of a layer, of which each token uses some; 0: one MLP for all
    num_experts_per_tok: int = 2
    moe_intermediate_size: int | None = None  # of an expert; None: intermediate_size
    n_shared_experts: int = 0  # every token also uses an MLP of so many times an expert's size
    moe_shared_expert_gate: bool = False  # which a learned number between 0 and 1 scales
    mlp_only_layers: tuple[int, ...] = ()  # layers without experts
    scoring_func: str = "softmax"  # or "sigmoid": how a router's logits become scores
    norm_topk_prob: bool = True  # the weights of a token's experts add up to 1
    n_group: int = 1  # with sigmoid: a token's experts are in the best topk_group of n_group
    topk_group: int = 1
    routed_scaling_factor: float = 1.0  # of the weights

    def __post_init__(self) -> None:
        heads, kv_heads, E = self.num_attention_heads, self.num_key_value_heads, self.hidden_size
        if heads % kv_heads:
            why = f"num_key_value_heads={kv_heads} does not divide num_attention_heads={heads}"
            good = [n for n in range(1, heads + 1) if heads % n == 0]
            raise ValueError(f"{why}: use one of {good}")
        if self.head_dim is None and E % heads:
            why = f"num_attention_heads={heads} does not divide hidden_size={E}"
            raise ValueError(f"{why}: change one of them, or give head_dim")
        object.__setattr__(self, "head_dim", self.head_dim or E // heads)  # the class is frozen
        if (D := self.head_dim) % 2:
            raise ValueError(f"head_dim={D} is odd, but RoPE turns pairs: change it or hidden_size")
        inner = self.moe_intermediate_size or self.intermediate_size
        object.__setattr__(self, "moe_intermediate_size", inner)
        object.__setattr__(self, "mlp_only_layers", tuple(self.mlp_only_layers))
        if self.num_local_experts and (problems := list(self._expert_problems())):
            raise ValueError("; ".join(problems))

    def _expert_problems(self) -> Iterator[str]:
        """What contradicts itself, or what no published architecture computes."""
        X, k, dense = self.num_local_experts, self.num_experts_per_tok, set(self.mlp_only_layers)
        groups, best, layers = self.n_group, self.topk_group, self.num_hidden_layers
        if k > X:
            yield f"num_experts_per_tok={k} exceeds num_local_experts={X}: use at most {X}"
        if k == 1 and self.norm_topk_prob:
            why = "makes every weight 1, and the router learns nothing"
            yield f"num_experts_per_tok=1 with norm_topk_prob=true {why}: use 2, or false"
        if dense and not dense < set(range(layers)):
            why = f"must name some, not all, of the layers 0 to {layers - 1}"
            yield f"mlp_only_layers={sorted(dense)}: {why}"
        if groups > 1 and (X % groups or X // groups < 2):
            why = f"does not cut num_local_experts={X} into equal groups of two or more"
            good = [n for n in range(1, X // 2 + 1) if X % n == 0]
            yield f"n_group={groups} {why}: use one of {good}"
        elif k <= X and (best > groups or best * (X // groups) < k):
            lowest = -(-k // (X // groups))
            why = f"num_experts_per_tok={k} of n_group={groups} groups of {X // groups}"
            yield f"topk_group={best} does not fit {why}: use {lowest} to {groups}"
        if self.scoring_func == "softmax":
            if groups > 1 or self.routed_scaling_factor != 1:
                yield 'n_group and routed_scaling_factor other than 1 need scoring_func="sigmoid"'
            if self.n_shared_experts and not self.moe_shared_expert_gate:
                why = 'with scoring_func="softmax" needs moe_shared_expert_gate=true'
                yield f"n_shared_experts={self.n_shared_experts} {why}, or scoring_func sigmoid"
        elif self.moe_shared_expert_gate:
            yield 'moe_shared_expert_gate needs scoring_func="softmax": set it to false'
        elif dense != set(range(len(dense))):
            why = 'with scoring_func="sigmoid" only the first layers can be without experts'
            yield f"mlp_only_layers={sorted(dense)}: {why}, as in {list(range(len(dense)))}"
        if self.moe_shared_expert_gate and not self.n_shared_experts:
            yield "moe_shared_expert_gate=true needs n_shared_experts of 1 or more"

    def has_experts(self, layer: int) -> bool:
        return self.num_local_experts > 0 and layer not in self.mlp_only_layers

    def override(self, **changes) -> "ModelConfig":
        """A copy with some numbers changed; those that follow from others do so unless given."""
        if self.head_dim * self.num_attention_heads == self.hidden_size:
            changes = {"head_dim": None} | changes
        if self.moe_intermediate_size == self.intermediate_size:
            changes = {"moe_intermediate_size": None} | changes
        return replace(self, **changes)

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every parameter's full shape by its Hugging Face name, in order of use."""
        V, E, inner = self.vocab_size, self.hidden_size, self.intermediate_size
        D, Q, K = self.head_dim, self.num_attention_heads, self.num_key_value_heads
        layer = {
            "input_layernorm": (E,),
            "self_attn.q_proj": (Q * D, E),  # as torch's linear: [outputs, inputs]
            "self_attn.k_proj": (K * D, E),
            "self_attn.v_proj": (K * D, E),
            "self_attn.o_proj": (E, Q * D),
            "post_attention_layernorm": (E,),
        }
        dense, experts = _mlp("mlp", E, inner), {"mlp.gate": (self.num_local_experts, E)}
        for e in range(self.num_local_experts):
            experts |= _mlp(f"mlp.experts.{e}", E, self.moe_intermediate_size)
        if self.n_shared_experts:
            size = self.n_shared_experts * self.moe_intermediate_size
            experts |= _mlp("mlp.shared_experts", E, size)
        if self.moe_shared_expert_gate:
            experts |= {"mlp.shared_expert_gate": (1, E)}
        shapes = {"model.embed_tokens": (V, E)}
        for i in range(self.num_hidden_layers):
            names = layer | (experts if self.has_experts(i) else dense)
            shapes |= {f"model.layers.{i}.{name}": shape for name, shape in names.items()}
        shapes |= {"model.norm": (E,)} | ({} if self.tie_word_embeddings else {"lm_head": (V, E)})
        return {f"{name}.weight": shape for name, shape in shapes.items()}

    def buffer_shapes(self) -> dict[str, tuple[int, ...]]:
        """What is saved beside the parameters: biases that are updated without a gradient."""
        layers = range(self.num_hidden_layers) if self.scoring_func == "sigmoid" else ()
        name, shape = "mlp.gate.e_score_correction_bias", (self.num_local_experts,)
        return {f"model.layers.{i}.{name}": shape for i in layers if self.has_experts(i)}


def _mlp(name: str, hidden: int, inner: int) -> dict[str, tuple[int, ...]]:
    shapes = {
        "gate_proj": (inner, hidden),
        "up_proj": (inner, hidden),
        "down_proj": (hidden, inner),
    }
    return {f"{name}.{projection}": shape for projection, shape in shapes.items()}


SIZES = tuple(field.name for field in fields(ModelConfig) if field.default is MISSING)
