"""Query and key norms in numbers: shapes, placement and Qwen3; standard library only."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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
    shapes: Mapping[str, Sequence[int]], table: Table, num_layers: Sequence[int]
) -> Table:
    # Every tensor-parallel rank has other heads: so their gradients differ, and are summed, always.
    row = Placement((), copies=("dp_cp", "tp"), sums=("dp_cp_tp",))
    return {name: row for name in shapes if name.removesuffix(".weight").endswith(NAMES)}


QWEN3 = {  # a row of runtime/architectures.py
    "class_name": "Qwen3ForCausalLM",
    "fits": lambda model_config: model_config.qk_norm,
    "fixed": {"attention_bias": False, "use_sliding_window": False},
    "read": lambda hf: {"qk_norm": True},
}
