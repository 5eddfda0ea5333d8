"""Biases of queries, keys and values in numbers, and Qwen2; standard library only."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from picotron_min.extensions.family import Family, by_names
from picotron_min.layout import Layout
from picotron_min.model_config import ModelConfig
from picotron_min.placement import Cut, Placement, Table

NAMES = ("self_attn.q_bias", "self_attn.k_bias", "self_attn.v_bias")


@dataclass(frozen=True)
class QkvBiases(ModelConfig):
    qkv_bias: bool = False  # a vector is added to queries, keys and values

    def attention_shapes(self) -> dict[str, tuple[int, ...]]:
        D, Q, K = self.head_dim, self.num_attention_heads, self.num_key_value_heads
        sizes = zip(NAMES, (Q * D, K * D, K * D), strict=True)
        biases = {name: (size,) for name, size in sizes if self.qkv_bias}
        return super().attention_shapes() | biases


def bias_rows(
    shapes: Mapping[str, Sequence[int]], table: Table, num_layers: Sequence[int], layout: Layout
) -> Table:
    # Cut as the rows of its matrix are. A rank's heads see all tokens, also with sequence
    # parallelism: so tp ranks, which have other parts, add nothing.
    row = Placement((Cut("tp", 0),), copies=("dp_cp",), sums=("dp_cp",))
    return {name: row for name in shapes if name.removesuffix(".weight").endswith(NAMES)}


QWEN2 = {
    "class_name": "Qwen2ForCausalLM",
    "fixed": {"use_sliding_window": False},
    "read": lambda hf: {"qkv_bias": True},
    "tensors": tuple((f".{x}_bias.weight", f".{x}_proj.bias") for x in "qkv"),
}


_qwen = {"qkv_bias": True, "rope_theta": 1e6, "rms_norm_eps": 1e-6}
_small = _qwen | {"tie_word_embeddings": True, "max_position_embeddings": 32_768}
_large = _qwen | {"max_position_embeddings": 131_072}
FAMILY = Family(
    QkvBiases,
    extension="QkvBias",
    kind=by_names,
    modules=("q_bias", "k_bias", "v_bias"),
    rows=bias_rows,
    architectures={"qwen2": QWEN2},
    presets={
        "Qwen/Qwen2.5-0.5B": QkvBiases(151_936, 896, 4864, 24, 14, 2, **_small),
        "Qwen/Qwen2.5-1.5B": QkvBiases(151_936, 1536, 8960, 28, 12, 2, **_small),
        "Qwen/Qwen2.5-7B": QkvBiases(152_064, 3584, 18_944, 28, 28, 4, **_large),
    },
)
