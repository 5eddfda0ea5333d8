"""The placement table: where every parameter lies, and over which ranks its gradient is summed.

    q_proj      cut by rows over tp       each part is held alike by the dp x cp ranks, which sum
    o_proj      cut by columns over tp    its gradient
    layernorm   not cut                   held alike by dp x cp x tp

Everything that is done per parameter derives from this table: narrowing a matrix, initial weights,
reading and saving weights, gradient buckets, the gradient norm. A new cut is a new row here.
Names are those of the saved model. Standard library only.
"""

import math
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

    @property
    def owned(self) -> tuple[Cut, ...]:
        """The cuts that lead to what the optimizer has: it is initialised, updated and saved."""
        return (*self.cuts, self.shard) if self.shard else self.cuts


def placements(names: Iterable[str], layout: Layout, tied: bool) -> dict[str, Placement]:
    """The placement of every parameter, by its saved name; `tied`: lm_head is embed_tokens, too."""
    return {name: _sharded(_placement(name, layout, tied), layout) for name in names}


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


def _sharded(placement: Placement, layout: Layout) -> Placement:
    """Cut matrices once more, by rows over dp x cp; all ranks update norms, which are small."""
    if not placement.cuts or layout.sharding == "none" or layout.dp * layout.cp == 1:
        return placement
    copies = tuple(axis for axis in placement.copies if axis != "dp_cp")
    return placement._replace(shard=Cut("dp_cp", 0), copies=copies)


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


def with_owners(
    table: dict[str, Placement],
    shapes: Mapping[str, Sequence[int]],
    layout: Layout,
    num_layers: Sequence[int],
) -> dict[str, Placement]:
    """With "layerwise" sharding, an owner for each hidden matrix; `num_layers` of the stages."""
    n, owned, first = layout.dp * layout.cp, {}, 0
    if layout.sharding != "layerwise" or n == 1:
        return table
    for number in num_layers:
        for window in windows(range(first, first + number), shapes, layout):
            names = [name for i in window for name in matrices_of_layer(i, shapes)]
            owners, _ = deal([math.prod(shapes[name]) for name in names], n)
            for name, owner in zip(names, owners, strict=True):
                owned[name] = table[name]._replace(shard=Cut("dp_cp", 0, owner))
        first += number
    return table | owned


def matrices_of_layer(layer: int, shapes: Mapping[str, Sequence[int]]) -> list[str]:
    prefix = f"model.layers.{layer}."
    return [name for name, shape in shapes.items() if name.startswith(prefix) and len(shape) > 1]


def deal(sizes: Sequence[int], n: int) -> tuple[list[int], list[int]]:
    """Give things to n ranks, the largest first, each to the rank with least: owners, and loads."""
    owners, loads = [0] * len(sizes), [0] * n
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):  # equal ones stay in order
        owners[i] = loads.index(min(loads))
        loads[owners[i]] += sizes[i]
    return owners, loads


def windows(
    layers: Sequence[int], shapes: Mapping[str, Sequence[int]], layout: Layout
) -> list[Sequence[int]]:
    """Which layers of a stage are gathered and reduced together.

    Each by itself; with owners so many that the fullest rank has at most a quarter more than the
    mean: every rank's part of a message is as long as the fullest one's.
    """
    width, n, L = 1, layout.dp * layout.cp, len(layers)
    sizes = [math.prod(shapes[name]) for name in matrices_of_layer(layers[0], shapes)]
    if layout.sharding == "layerwise":
        while width < L and max(deal(sizes * width, n)[1]) > 1.25 * sum(sizes) * width / n:
            width += 1
    count = max(1, L // width)
    return [layers[i * L // count : (i + 1) * L // count] for i in range(count)]


class Piece(NamedTuple):
    """Consecutive rows of a matrix, an equal part for each of some ranks, in a buffer [n, R]."""

    ranks: slice
    rows: slice  # of the matrix
    start: int  # within each rank's row of the buffer
    width: int  # elements of a rank


def lay_out(
    shapes: Mapping[str, Sequence[int]], shards: Mapping[str, Cut], n: int
) -> tuple[dict[str, list[Piece]], int]:
    """Where matrices that are gathered together lie in a buffer [n, R], by name; and R."""
    pieces, used = {}, [0] * n  # elements of each rank
    for name, (rows, columns) in shapes.items():
        owner = shards[name].owner
        ranks = range(n) if owner is None else range(owner, owner + 1)
        each = -(-rows // len(ranks))
        start = max(used[rank] for rank in ranks)
        for rank in ranks:
            used[rank] = start + each * columns
        full, rest = divmod(rows, each)  # 10 rows over 4 ranks: three have 3, and one has 1
        first, end = ranks.start, ranks.start + full
        pieces[name] = [Piece(slice(first, end), slice(0, full * each), start, each * columns)]
        if rest:
            last = slice(full * each, rows)
            pieces[name].append(Piece(slice(end, end + 1), last, start, rest * columns))
    return pieces, max(used)
