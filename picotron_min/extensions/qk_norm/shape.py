"""Query and key norms in numbers: shapes, placement and Qwen3; standard library only."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from picotron_min.extensions.family import Family, by_names
from picotron_min.layout import Layout
from picotron_min.model_config import ModelConfig
from picotron_min.placement import Placement, Table

NAMES = ("self_attn.q_norm", "self_attn.k_norm")  # [D], one for all heads of a layer


@dataclass(frozen=True)
class QkNorms(ModelConfig):
    qk_norm: bool = False  # queries and keys are normalised, each head by itself

    def attention_shapes(self) -> dict[str, tuple[int, ...]]:
        norms = dict.fromkeys(NAMES, (self.head_dim,)) if self.qk_norm else {}
        return super().attention_shapes() | norms


def norm_rows(
    shapes: Mapping[str, Sequence[int]], table: Table, num_layers: Sequence[int], layout: Layout
) -> Table:
    # Every tensor-parallel rank has other heads: so their gradients differ, and are summed, always.
    row = Placement((), copies=("dp_cp", "tp"), sums=("dp_cp_tp",))
    return {name: row for name in shapes if name.removesuffix(".weight").endswith(NAMES)}


QWEN3 = {
    "class_name": "Qwen3ForCausalLM",
    "fixed": {"attention_bias": False, "use_sliding_window": False},
    "read": lambda hf: {"qk_norm": True},
}
FAMILY = Family(
    QkNorms,
    extension="QkNorm",
    kind=by_names,
    modules=("q_norm", "k_norm"),
    rows=norm_rows,
    architectures={"qwen3": QWEN3},
    presets={
        "Qwen/Qwen3-0.6B": QkNorms(
            *(151_936, 1024, 3072, 28, 16, 8),
            head_dim=128,
            qk_norm=True,
            rope_theta=1e6,
            rms_norm_eps=1e-6,
            tie_word_embeddings=True,
            max_position_embeddings=40_960,
        )
    },
)
