"""The shape of a Llama: its numbers, its parameters by name, and the public models by name.

Standard library only, so that a run can be planned, and a mistake told, before torch is imported.
Field names are Hugging Face's, and `from_hf`/`to_hf` read and write their `config.json`.
"""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3's stretching of the slow rotary frequencies (`rope_type` "llama3").

    Frequencies with a wavelength above `original_max_position_embeddings / low_freq_factor` are
    divided by `factor`, those below `... / high_freq_factor` are kept, the rest are interpolated.
    """

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


@dataclass(frozen=True)
class ModelConfig:
    """All that defines a Llama but its weights; ValueError where the numbers cannot be one."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int | None = None  # None: hidden_size / num_attention_heads
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = False
    max_position_embeddings: int = 2048

    def __post_init__(self) -> None:
        for name in SIZES:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}={value!r}: must be a whole number of at least 1")
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        if heads % kv_heads:
            good = [n for n in range(1, heads + 1) if heads % n == 0]
            raise ValueError(
                f"num_key_value_heads={kv_heads} does not divide num_attention_heads={heads}:"
                f" use one of {good}"
            )
        if self.head_dim is None:
            if self.hidden_size % heads:
                raise ValueError(
                    f"num_attention_heads={heads} does not divide hidden_size={self.hidden_size}:"
                    " change one of them, or give head_dim"
                )
            object.__setattr__(self, "head_dim", self.hidden_size // heads)
        if self.head_dim % 2 or self.head_dim < 2:
            raise ValueError(
                f"head_dim={self.head_dim} is odd: rotary embedding turns pairs of numbers,"
                " so hidden_size / num_attention_heads (or head_dim) must be even"
            )

    def override(self, **changes) -> "ModelConfig":
        """This config with some numbers changed; head_dim follows unless it is given too."""
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
            "self_attn.q_proj": (heads, embed),
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


SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
)
