"""Layers without rotary embedding in numbers, and SmolLM3; standard library only."""

from dataclasses import dataclass

from picotron_min.extensions.family import Family
from picotron_min.model_config import ModelConfig


@dataclass(frozen=True)
class RopeFree(ModelConfig):
    no_rope_layers: tuple[int, ...] = ()  # of each layer 1: rotary embedding, 0: none; []: all 1

    def __post_init__(self) -> None:
        super().__post_init__()
        given, layers = tuple(self.no_rope_layers), self.num_layers
        if given and len(given) < layers:
            why = f"no_rope_layers has {len(given)} numbers for {layers} layers in all"
            raise ValueError(f"{why}: give one for each, or [] for rotary embedding in all")
        if wrong := {*given} - {0, 1}:
            raise ValueError(f"no_rope_layers has {min(wrong)}: use 1 for rotary embedding, else 0")
        object.__setattr__(self, "_given", given)  # the class is frozen
        given = given[:layers]  # of a published model, of which a run has the first layers
        # Models that compute the same are equal.
        object.__setattr__(self, "no_rope_layers", given if 0 in given else ())

    def override(self, **changes) -> "RopeFree":
        # With fewer layers and with more again it is the same model.
        return super().override(**{"no_rope_layers": self._given} | changes)

    @property
    def rope_free(self) -> set[int]:
        """The layers without rotary embedding."""
        return {layer for layer, rotates in enumerate(self.no_rope_layers) if not rotates}


SMOLLM3 = {
    "class_name": "SmolLM3ForCausalLM",
    "fixed": {"attention_bias": False, "mlp_bias": False, "use_sliding_window": False},
    "fields": ("no_rope_layers",),  # transformers makes it of no_rope_layer_interval
    "write": lambda c: {"no_rope_layers": [int(i not in c.rope_free) for i in range(c.num_layers)]},
}
FAMILY = Family(
    RopeFree,
    extension="NoRope",
    kind=lambda c, layer: layer in c.rope_free,
    architectures={"smollm3": SMOLLM3},
    presets={
        "HuggingFaceTB/SmolLM3-3B": RopeFree(
            *(128_256, 2048, 11_008, 36, 16, 4),
            rope_theta=5e6,
            rms_norm_eps=1e-6,
            tie_word_embeddings=True,
            max_position_embeddings=65_536,
            no_rope_layers=(1, 1, 1, 0) * 9,
        )
    },
    tiny=lambda c, layout, n: {"no_rope_layers": ((1, 0, 0) * n)[:n] if c.rope_free else ()},
)
