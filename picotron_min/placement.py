"""The placement table: where every parameter lies, and over which ranks its gradient is summed.

    q_proj      cut by rows over tp       each part is held alike by the dp x cp ranks, which sum
    o_proj      cut by columns over tp    its gradient
    layernorm   not cut                   held alike by dp x cp x tp

Everything that is done per parameter derives from this table: narrowing a matrix, initial weights,
reading and saving weights, gradient buckets, the gradient norm. A new cut is a new row here.
Names are those of the saved model. Standard library only.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from picotron_min.layout import Layout


class Cut(NamedTuple):
    """Something is divided among the ranks of an axis."""

    axis: str  # its name in mesh.Axes
    dim: int
    owner: int | None = None  # None: pieces as torch.chunk makes them; else this rank has all of it


class Placement(NamedTuple):
    """Where one parameter lies."""

    cuts: tuple[Cut, ...]  # what a rank computes with; each cuts what the one before has left
    shard: Cut | None  # what the optimizer has of that; None: all of it
    copies: tuple[str, ...]  # axes whose ranks hold the same part: it counts where rank is 0 on all
    sums: tuple[str, ...]  # axes that its gradient is added over, in this order
    is_hidden_matrix: bool = False  # one that Muon may update


def placements(names: Iterable[str], layout: Layout, tied: bool) -> dict[str, Placement]:
    """The placement of every parameter, by its saved name; `tied`: lm_head is embed_tokens, too."""
    return {name: _placement(name, layout, tied) for name in names}


def saved_name(name: str, tied: bool) -> str:
    """The name that a module's parameter is saved by: a tied lm_head has no weight of its own."""
    return "model.embed_tokens.weight" if tied and name == "lm_head.weight" else name


COLUMN_PARALLEL = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")  # [out, in] cut by out
ROW_PARALLEL = ("o_proj", "down_proj")  # cut by in
VOCABULARY_PARALLEL = ("embed_tokens", "lm_head")  # [V, E] cut by V


def _placement(name: str, layout: Layout, tied: bool) -> Placement:
    module = name.removesuffix(".weight").split(".")[-1]
    cuts = (Cut("tp", 1 if module in ROW_PARALLEL else 0),)
    if module in COLUMN_PARALLEL + ROW_PARALLEL:
        return Placement(cuts, None, ("dp_cp",), sums=("dp_cp",), is_hidden_matrix=True)
    if module in VOCABULARY_PARALLEL:
        # The first and the last stage each have a copy of a tied embedding, and add its gradients.
        axes = ("dp_cp", "ends") if tied and layout.pp > 1 else ("dp_cp",)
        return Placement(cuts, None, copies=axes, sums=axes)
    # Norms. With sequence parallelism each tp rank has seen another part of the sequence.
    sums = ("dp_cp_tp",) if layout.sequence_parallel else ("dp_cp",)
    return Placement((), None, copies=("dp_cp", "tp"), sums=sums)


def part(
    shape: Sequence[int], cuts: Sequence[Cut], rank: Mapping[str, int], size: Mapping[str, int]
) -> tuple[slice, ...]:
    """The part of a tensor that cuts leave to a rank, one slice a dim; `rank`, `size` by axis."""
    slices = [slice(0, length) for length in shape]
    for cut in cuts:
        start, stop = slices[cut.dim].start, slices[cut.dim].stop
        if cut.owner is not None:
            slices[cut.dim] = slice(start, stop if rank[cut.axis] == cut.owner else start)
            continue
        each = -(-(stop - start) // size[cut.axis])  # 10 / 4: 3, 3, 3, 1, as torch.chunk, DTensor
        first = min(start + rank[cut.axis] * each, stop)
        slices[cut.dim] = slice(first, min(first + each, stop))
    return tuple(slices)
