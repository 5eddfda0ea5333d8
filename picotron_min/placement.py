"""Placement: where every parameter lies, and over which ranks its gradient is summed.

    q_proj      cut by rows over tp       each part is held alike by the dp x cp ranks, which sum
    o_proj      cut by columns over tp    its gradient
    layernorm   not cut                   held alike by dp x cp x tp

Everything that is done per parameter derives from this table: narrowing a matrix, initial weights,
reading and saving weights, gradient buckets, the gradient norm. A new cut is a new row here.
Names are as in the saved model. Standard library only.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from picotron_min.layout import Layout
from picotron_min.pipeline_schedule import ends_share_rank


class Cut(NamedTuple):
    """Something is divided among the ranks of an axis."""

    axis: str  # its name in mesh.Axes
    dim: int
    owner: int | None = None  # None: pieces as torch.chunk makes them; else this rank has the whole


class Placement(NamedTuple):
    """Where one parameter lies."""

    cuts: tuple[Cut, ...]  # of what a rank computes with; each cuts what is left by the one before
    copies: tuple[str, ...]  # axes whose ranks hold the same part: the first on each counts it
    sums: tuple[str, ...]  # axes that its gradient is added over, in this order
    is_hidden_matrix: bool = False  # of attention or an MLP
    further: tuple[Cut, ...] = ()  # cuts of what a rank updates and saves, where that is less

    @property
    def owned(self) -> tuple[Cut, ...]:
        """The cuts that lead to what a rank initialises, updates and saves."""
        return self.cuts + self.further


Table = dict[str, Placement]
# What an extension changes in the table: (shapes, table, layers of each stage) -> new rows.
Rule = Callable[[Mapping[str, Sequence[int]], Table, Sequence[int]], Table]


def placements(
    shapes: Mapping[str, Sequence[int]], layout: Layout, tied: bool, num_layers: Sequence[int] = ()
) -> Table:
    """The placement of every parameter, by its saved name; `tied`: lm_head is embed_tokens, too.

    `num_layers` of each stage are for rules that need them. KeyError for a name that no rule knows.
    """
    rows = {name: _placement(name, layout, tied) for name in shapes}
    table = {name: row for name, row in rows.items() if row}
    for rule in layout.rules:
        table |= rule(shapes, table, num_layers)
    if unknown := [name for name in shapes if name not in table]:
        # Taken for a norm, for example, its gradient might not be summed, without an error.
        raise KeyError(f"no rule of the placement table knows {unknown[0]}: add a row for it")
    return {name: table[name] for name in shapes}


def saved_name(name: str, tied: bool) -> str:
    """The name that a module's parameter is saved by: a tied lm_head has no weight of its own."""
    return "model.embed_tokens.weight" if tied and name == "lm_head.weight" else name


# Megatron names the columns and rows of W^T: a weight here is W, [out, in].
COLUMN_PARALLEL = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")  # cut by out
ROW_PARALLEL = ("o_proj", "down_proj")  # cut by in
HIDDEN = COLUMN_PARALLEL + ROW_PARALLEL
VOCABULARY_PARALLEL = ("embed_tokens", "lm_head")  # [V, E] cut by V
NORMS = ("input_layernorm", "post_attention_layernorm", "norm")


def _placement(name: str, layout: Layout, tied: bool) -> Placement | None:
    module = name.removesuffix(".weight").split(".")[-1]
    cuts = (Cut("tp", 1 if module in ROW_PARALLEL else 0),)
    if module in HIDDEN:
        return Placement(cuts, ("dp_cp",), sums=("dp_cp",), is_hidden_matrix=True)
    if module in VOCABULARY_PARALLEL:
        # The first and the last stage each have a copy of a tied embedding, and add its gradients,
        # unless they are on one rank.
        share_rank = ends_share_rank(layout.schedule, layout.pp, layout.pp_chunks)
        axes = ("dp_cp", "ends") if tied and not share_rank else ("dp_cp",)
        return Placement(cuts, copies=axes, sums=axes)
    if module in NORMS:  # with sequence parallelism each tp rank sees other tokens
        sums = ("dp_cp_tp",) if layout.sequence_parallel else ("dp_cp",)
        return Placement((), copies=("dp_cp", "tp"), sums=sums)
    return None


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
