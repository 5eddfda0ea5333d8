"""The shape of a Llama: its numbers, its parameters by name, and the public models by name.

Standard library only, so that a run can be planned, and a mistake told, before torch is imported.
Field names are Hugging Face's, and `from_hf`/`to_hf` read and write their `config.json`.
"""

from dataclasses import asdict, dataclass, fields, replace


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
class LlamaConfig:
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

    @classmethod
    def from_hf(cls, hf: dict) -> "LlamaConfig":
        """Read a Hugging Face `config.json`, with rotary settings in the old or the new spelling.

        Raises ValueError for anything this model would silently compute differently.
        """
        required = {
            "model_type": "llama",
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
        }
        for key, value in required.items():
            if hf.get(key, value) != value:
                raise ValueError(f"{key}={hf[key]!r} is not supported: only {value!r} is")
        if missing := [name for name in SIZES if name not in hf and name != "num_key_value_heads"]:
            raise ValueError(f"the model's config.json lacks {', '.join(missing)}")
        # transformers 5 writes all rotary settings into rope_parameters; older files have
        # rope_theta at the top level and the stretching, if any, in rope_scaling.
        rope = {"rope_theta": hf.get("rope_theta", cls.rope_theta)}
        rope |= hf.get("rope_scaling") or {}
        rope |= hf.get("rope_parameters") or {}
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind not in ("default", "llama3"):
            raise ValueError(f"rope_type={kind!r} is not supported: only default and llama3 are")
        if rope.get("partial_rotary_factor", hf.get("partial_rotary_factor", 1.0)) != 1.0:
            raise ValueError("partial_rotary_factor other than 1 is not supported")
        known = {f.name for f in fields(cls)} & hf.keys() - {"rope_scaling", "rope_theta"}
        values = {name: hf[name] for name in known}
        values.setdefault("num_key_value_heads", hf["num_attention_heads"])
        values["rope_theta"] = float(rope["rope_theta"])
        if kind == "llama3":
            scaling = {f.name: rope[f.name] for f in fields(RopeScaling) if f.name in rope}
            values["rope_scaling"] = RopeScaling(**scaling)
        return cls(**values)

    def to_hf(self) -> dict:
        """The `config.json` that `transformers.AutoModelForCausalLM` loads (any version)."""
        hf = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu"}
        hf |= {"attention_bias": False, "mlp_bias": False} | asdict(self)
        if self.rope_scaling:
            hf["rope_scaling"]["rope_type"] = "llama3"
        return hf

    def override(self, **changes) -> "LlamaConfig":
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


def _llama(vocab, hidden, inner, layers, heads, kv_heads, **more) -> LlamaConfig:
    return LlamaConfig(vocab, hidden, inner, layers, heads, kv_heads, **more)


def _llama_3(hidden, inner, layers, heads, kv_heads, factor, tied=False) -> LlamaConfig:
    return LlamaConfig(
        128_256, hidden, inner, layers, heads, kv_heads,
        rope_theta=500_000.0, rope_scaling=RopeScaling(factor),
        tie_word_embeddings=tied, max_position_embeddings=131_072,
    )  # fmt: skip


_smol = {"tie_word_embeddings": True}
_llama_2 = {"max_position_embeddings": 4096}

# Facts of the public models' config.json files, so that planning a run needs no network.
PRESETS = {
    "tiny": _llama(257, 128, 384, 4, 4, 2),
    "HuggingFaceTB/SmolLM-135M": _llama(49_152, 576, 1536, 30, 9, 3, **_smol),
    "HuggingFaceTB/SmolLM-360M": _llama(49_152, 960, 2560, 32, 15, 5, **_smol),
    "HuggingFaceTB/SmolLM-1.7B": _llama(49_152, 2048, 8192, 24, 32, 32, **_smol),
    "meta-llama/Llama-2-7B": _llama(32_000, 4096, 11_008, 32, 32, 32, **_llama_2),
    "meta-llama/Llama-2-13B": _llama(32_000, 5120, 13_824, 40, 40, 40, **_llama_2),
    "meta-llama/Llama-2-70B": _llama(32_000, 8192, 28_672, 80, 64, 8, **_llama_2),
    "meta-llama/Llama-3.2-1B": _llama_3(2048, 8192, 16, 32, 8, 32.0, tied=True),
    "meta-llama/Llama-3.2-3B": _llama_3(3072, 8192, 28, 24, 8, 32.0, tied=True),
    "meta-llama/Llama-3.1-8B": _llama_3(4096, 14_336, 32, 32, 8, 8.0),
    "meta-llama/Llama-3.1-70B": _llama_3(8192, 28_672, 80, 64, 8, 8.0),
    "meta-llama/Llama-3.1-405B": _llama_3(16_384, 53_248, 126, 128, 8, 8.0),
}


def find_preset(name: str) -> LlamaConfig | None:
    """The built-in model of that name, with or without its owner; variants share its shape.

    `SmolLM-360M`, `HuggingFaceTB/SmolLM-360M-Instruct` and `meta-llama/Llama-2-7b-hf` are found.
    """
    wanted = name.lower()
    for suffix in ("-instruct", "-chat-hf", "-hf"):
        wanted = wanted.removesuffix(suffix)
    for preset, config in PRESETS.items():
        if wanted in (preset.lower(), preset.lower().rsplit("/")[-1]):
            return config
    return None
