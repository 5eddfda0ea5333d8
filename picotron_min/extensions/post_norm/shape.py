"""Norms behind sublayers in numbers: shapes, placement and OLMo 2; standard library only."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from picotron_min.extensions.family import Family, by_names
from picotron_min.layout import Layout
from picotron_min.model_config import ModelConfig
from picotron_min.placement import Cut, Placement, Table

BEHIND_MLP = "post_feedforward_layernorm"


@dataclass(frozen=True)
class PostNorms(ModelConfig):
    post_norm: bool = False  # norms behind sublayers, and over all heads' queries, and keys

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.post_norm and getattr(self, "qk_norm", False):
            raise ValueError("post_norm has norms of all heads, qk_norm of each: set one to false")

    def attention_shapes(self) -> dict[str, tuple[int, ...]]:
        shapes, E = super().attention_shapes(), self.hidden_size
        if self.post_norm:
            del shapes["input_layernorm"]
            for x in "qk":
                shapes[f"self_attn.{x}_norm"] = shapes[f"self_attn.{x}_proj"][:1]
            shapes[BEHIND_MLP] = (E,)  # not in mlp_shapes, which other families replace
        return shapes


def norm_rows(
    shapes: Mapping[str, Sequence[int]], table: Table, num_layers: Sequence[int], layout: Layout
) -> Table:
    behind = [name for name in shapes if name.endswith(f"{BEHIND_MLP}.weight")]
    rows = {name: table[name.replace("feedforward", "attention")] for name in behind}
    # Cut as the rows of their matrices. A rank's heads see all tokens, so tp ranks add nothing.
    row = Placement((Cut("tp", 0),), copies=("dp_cp",), sums=("dp_cp",))
    names = (name.replace(BEHIND_MLP, f"self_attn.{x}_norm") for name in behind for x in "qk")
    return rows | dict.fromkeys(names, row)


OLMO2 = {
    "class_name": "Olmo2ForCausalLM",
    "fixed": {"attention_bias": False},
    "read": lambda hf: {"post_norm": True},
}
FAMILY = Family(
    PostNorms,
    extension=None,
    kind=by_names,
    modules=("q_norm", "k_norm", BEHIND_MLP),
    rows=norm_rows,
    architectures={"olmo2": OLMO2},
    presets={
        "allenai/OLMo-2-0425-1B": PostNorms(
            *(100_352, 2048, 8192, 16, 16, 16),
            post_norm=True,
            rope_theta=5e5,
            rms_norm_eps=1e-6,
            max_position_embeddings=4096,
        )
    },
)
