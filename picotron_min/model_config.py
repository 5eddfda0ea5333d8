"""A Llama is defined by a dozen numbers: they give each parameter its name and its shape.

    token ids -> embed_tokens -> layer 0, 1, ... -> norm -> lm_head -> a score for each token
    [B, S]       [vocab, E]      attention, MLP     [E]     [vocab, E]  [B, S, vocab]

E is `hidden_size`; all names are Hugging Face's. Standard library only, so that a run can be
planned, and a mistake reported, without torch.
"""

from dataclasses import MISSING, dataclass, fields, replace


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3's stretching of the slow rotary frequencies (`rope_type` "llama3").

    Wavelengths above `original_max_position_embeddings / low_freq_factor` are stretched by
    `factor`, those below `... / high_freq_factor` are kept, and the rest are interpolated.
    """

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


@dataclass(frozen=True)
class ModelConfig:
    """All that defines a Llama except its weights. ValueError for numbers that define none."""

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

    def __post_init__(self) -> None:
        for name in SIZES:
            if type(value := getattr(self, name)) is not int or value < 1:
                raise ValueError(f"{name}={value!r}: must be a whole number of at least 1")
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        if heads % kv_heads:
            good = [n for n in range(1, heads + 1) if heads % n == 0]
            why = f"num_key_value_heads={kv_heads} does not divide num_attention_heads={heads}"
            raise ValueError(f"{why}: use one of {good}")
        if self.head_dim is None:
            if self.hidden_size % heads:
                why = f"num_attention_heads={heads} does not divide hidden_size={self.hidden_size}"
                raise ValueError(f"{why}: change one of them, or give head_dim")
            object.__setattr__(self, "head_dim", self.hidden_size // heads)  # the class is frozen
        if self.head_dim % 2:
            why = "rotary embedding turns pairs of numbers: change head_dim or hidden_size"
            raise ValueError(f"head_dim={self.head_dim} is odd, and {why}")

    def override(self, **changes) -> "ModelConfig":
        """A copy with some numbers changed; head_dim follows unless it is given too."""
        derived = self.head_dim == self.hidden_size / self.num_attention_heads
        if derived and "head_dim" not in changes:
            changes["head_dim"] = None
        return replace(self, **changes)

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every parameter's full shape by its Hugging Face name, in order of use."""
        embed, heads = self.hidden_size, self.num_attention_heads * self.head_dim
        kv_heads, inner = self.num_key_value_heads * self.head_dim, self.intermediate_size
        layer = {
            "input_layernorm": (embed,),
            "self_attn.q_proj": (heads, embed),  # as torch's linear: [outputs, inputs]
            "self_attn.k_proj": (kv_heads, embed),
            "self_attn.v_proj": (kv_heads, embed),
            "self_attn.o_proj": (embed, heads),
            "post_attention_layernorm": (embed,),
            "mlp.gate_proj": (inner, embed),
            "mlp.up_proj": (inner, embed),
            "mlp.down_proj": (embed, inner),
        }
        shapes = {"model.embed_tokens.weight": (self.vocab_size, embed)}
        for i in range(self.num_hidden_layers):
            shapes |= {f"model.layers.{i}.{name}.weight": shape for name, shape in layer.items()}
        shapes["model.norm.weight"] = (embed,)
        if not self.tie_word_embeddings:
            shapes["lm_head.weight"] = (self.vocab_size, embed)
        return shapes


SIZES = tuple(field.name for field in fields(ModelConfig) if field.default is MISSING)
