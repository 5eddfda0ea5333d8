"""Model config: a dozen numbers give each parameter of a Llama its name and shape.

    token ids -> embed_tokens -> layer 0, 1, ... -> norm -> lm_head -> a score for each token
    [B, S]       [vocab, E]      attention, MLP     [E]     [vocab, E]  [B, S, vocab]

E is `hidden_size`; all names are Hugging Face's. Standard library only, to plan without torch.
"""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3's stretching of the slow rotary frequencies (`rope_type` "llama3")."""

    factor: float  # by which slow ones are stretched
    low_freq_factor: float = 1.0  # slow: fewer turns than this in the original context
    high_freq_factor: float = 4.0  # fast, not stretched: more than this; interpolated between
    original_max_position_embeddings: int = 8192

    def __post_init__(self) -> None:
        low, high = self.low_freq_factor, self.high_freq_factor
        if low >= high:
            raise ValueError(f"low_freq_factor={low} must be below high_freq_factor={high}")


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a Llama. ValueError if its numbers contradict each other."""

    vocab_size: int  # token ids
    hidden_size: int  # numbers of a token between layers
    intermediate_size: int  # of the MLP
    num_hidden_layers: int  # decoder layers
    num_attention_heads: int  # of queries
    num_key_value_heads: int  # each serves the same number of attention heads
    head_dim: int | None = None  # None: hidden_size / num_attention_heads
    rope_theta: float = 10_000.0  # the base of rotary frequencies
    rope_scaling: RopeScaling | None = None
    rms_norm_eps: float = 1e-5  # added below the root of a norm
    tie_word_embeddings: bool = False  # one matrix is both embed_tokens and lm_head
    max_position_embeddings: int = 2048  # the longest sequence that it is meant for

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

    @property
    def num_layers(self) -> int:
        """Decoder layers, and those behind the norm, of extensions: each uses lm_head once more."""
        return self.num_hidden_layers

    def override(self, **changes) -> "ModelConfig":
        """A copy with some numbers changed; those that follow from others do so unless given."""
        if self.head_dim * self.num_attention_heads == self.hidden_size:
            changes = {"head_dim": None} | changes
        return replace(self, **changes)

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every parameter's full shape by its Hugging Face name, in order of use."""
        V, E = self.vocab_size, self.hidden_size
        shapes = {"model.embed_tokens": (V, E)}
        for i in range(self.num_layers):
            of_layer = self.attention_shapes() | self.mlp_shapes(i)
            shapes |= {f"model.layers.{i}.{name}": shape for name, shape in of_layer.items()}
        shapes |= {"model.norm": (E,)} | ({} if self.tie_word_embeddings else {"lm_head": (V, E)})
        return {f"{name}.weight": shape for name, shape in shapes.items()}

    def attention_shapes(self) -> dict[str, tuple[int, ...]]:
        """The first half of a layer."""
        E, D = self.hidden_size, self.head_dim
        Q, K = self.num_attention_heads, self.num_key_value_heads
        return {
            "input_layernorm": (E,),
            "self_attn.q_proj": (Q * D, E),  # as torch's linear: [outputs, inputs]
            "self_attn.k_proj": (K * D, E),
            "self_attn.v_proj": (K * D, E),
            "self_attn.o_proj": (E, Q * D),
        }

    def mlp_shapes(self, layer: int) -> dict[str, tuple[int, ...]]:
        """The second half of a layer."""
        E = self.hidden_size
        return {"post_attention_layernorm": (E,)} | mlp("mlp", E, self.intermediate_size)

    def mlp_parameters(self, layer: int) -> dict[str, int]:
        """Parameters of a layer's second half that a token is multiplied with."""
        E, M = self.hidden_size, self.intermediate_size
        return {"gate, up": 2 * E * M, "down": M * E}

    def idle_parameters(self, layer: int) -> int:
        """Parameters of a layer's matrices that a token is not multiplied with."""
        return 0

    def buffer_shapes(self) -> dict[str, tuple[int, ...]]:
        """What is saved beside the parameters: numbers that are updated without a gradient."""
        return {}


def mlp(name: str, hidden: int, inner: int) -> dict[str, tuple[int, ...]]:
    projections = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden)}
    projections["down_proj"] = (hidden, inner)
    return {f"{name}.{projection}": shape for projection, shape in projections.items()}
