"""Prediction layers in numbers: shapes, FLOPs and placement; standard library only.

    layers.L.enorm, .hnorm         [E]       norms of an embedding, and of the hidden state before
    layers.L.eh_proj               [E, 2E]   makes one vector of both
    layers.L.self_attn, .mlp, ...            as in a decoder layer
    layers.L.shared_head.norm      [E]       the last norm, before the model's own lm_head

L decoder layers have the numbers 0 to L - 1, D prediction layers L to L + D - 1.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from picotron_min.extensions.family import Family, by_names
from picotron_min.layout import Layout
from picotron_min.model_config import ModelConfig
from picotron_min.pipeline_schedule import ends_share_rank
from picotron_min.placement import Placement, Table


@dataclass(frozen=True)
class Depths(ModelConfig):
    """Layers behind the last one, each of which predicts one token further."""

    num_nextn_predict_layers: int = 0  # D, tokens that are predicted beside the next one

    @property
    def num_layers(self) -> int:
        return self.num_hidden_layers + self.num_nextn_predict_layers

    def mlp_shapes(self, layer: int) -> dict[str, tuple[int, ...]]:
        E, shapes = self.hidden_size, super().mlp_shapes(layer)
        if layer >= self.num_hidden_layers:
            shapes |= dict.fromkeys(("enorm", "hnorm", "shared_head.norm"), (E,))
            shapes |= {"eh_proj": (E, 2 * E)}
        return shapes

    def mlp_parameters(self, layer: int) -> dict[str, int]:
        parts = super().mlp_parameters(layer)
        is_further = layer >= self.num_hidden_layers
        return parts | ({"eh_proj": 2 * self.hidden_size**2} if is_further else {})


def depth_rows(
    shapes: Mapping[str, Sequence[int]], table: Table, num_layers: Sequence[int], layout: Layout
) -> Table:
    """The placement of what prediction layers add, and of the embedding, which they need."""
    # A cut eh_proj would need a message of its own. With sequence parallelism each tp rank has
    # other tokens; without, all of them compute the same.
    sums = ("dp_cp_tp",) if layout.sequence_parallel else ("dp_cp",)
    whole = Placement((), copies=("dp_cp", "tp"), sums=sums)
    names = ("enorm.weight", "hnorm.weight", "eh_proj.weight")
    rows = {name: whole for name in shapes if name.endswith(names)}
    if rows and not ends_share_rank(layout.schedule, layout.pp, layout.pp_chunks):
        axes, name = ("dp_cp", "ends"), "model.embed_tokens.weight"  # the last stage has a copy
        rows[name] = table[name]._replace(copies=axes, sums=axes)
    return rows


# Of Llama, which says the rest. The key is transformers' for any model.
LLAMA = {
    "read": lambda hf: {"num_nextn_predict_layers": hf.get("num_mtp_layers", 0)},
    "write": lambda c: {"num_mtp_layers": D} if (D := c.num_nextn_predict_layers) else {},
}
FAMILY = Family(
    Depths,
    extension=None,
    kind=by_names,
    modules=("enorm", "hnorm", "eh_proj", "norm"),
    rows=depth_rows,
    architectures={"llama": LLAMA},
)
