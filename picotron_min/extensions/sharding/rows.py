"""Rows: where sharded matrices lie, in the placement table and in a buffer.

    row shardings    every rank has some rows of every matrix
    layerwise        every hidden matrix has one owner, which has all of it; other matrices as above

Matrices that travel together lie in a buffer [n, R]: row r of the buffer is rank r's part of all of
them. Standard library only, so that a run can be planned anywhere.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from picotron_min.layout import Layout
from picotron_min.placement import HIDDEN, Cut, Placement, Table


def shard_of(placement: Placement) -> Cut | None:
    """What sharding cuts beyond what a rank computes with; None where it cuts nothing."""
    return placement.further[0] if placement.further else None


def sharded_rows(
    shapes: Mapping[str, Sequence[int]], table: Table, num_layers: Sequence[int], layout: Layout
) -> Table:
    """Matrices are cut once more, over dp x cp; all ranks update norms, which are small."""
    rows = {name: _sharded(placement, layout) for name, placement in table.items()}
    return with_owners(rows, shapes, layout, num_layers)


def _sharded(placement: Placement, layout: Layout, owner: int | None = None) -> Placement:
    axis = placement.sums[0]  # dp_cp, or edp of experts
    if not placement.cuts or layout.axis_sizes[axis] == 1:
        return placement
    copies = tuple(name for name in placement.copies if name != axis)
    return placement._replace(further=(Cut(axis, 0, owner),), copies=copies)


def with_owners(
    table: dict[str, Placement],
    shapes: Mapping[str, Sequence[int]],
    layout: Layout,
    num_layers: Sequence[int],
) -> dict[str, Placement]:
    """With "layerwise" sharding, an owner for each hidden matrix; `num_layers` of the stages."""
    owned, first = {}, 0
    for number in num_layers if layout.sharding == "layerwise" else ():
        for window in windows(range(first, first + number), shapes, layout):
            groups = defaultdict(list)  # an ep rank assigns its own experts
            for name in (name for i in window for name in matrices_of_layer(i, shapes)):
                if shard_of(table[name]):
                    axis, first_cut = shard_of(table[name]).axis, table[name].cuts[0]
                    groups[axis, first_cut.owner].append(name)
            for (axis, _), names in groups.items():
                sizes = [math.prod(shapes[name]) for name in names]
                owners, _ = deal(sizes, layout.axis_sizes[axis])
                for name, owner in zip(names, owners, strict=True):
                    owned[name] = _sharded(table[name], layout, owner)
        first += number
    return table | owned


def matrices_of_layer(layer: int, shapes: Mapping[str, Sequence[int]]) -> list[str]:
    """The hidden matrices of a layer, by name."""
    prefix = f"model.layers.{layer}."
    return [n for n in shapes if n.startswith(prefix) and n.split(".")[-2] in HIDDEN]


def deal(sizes: Sequence[int], n: int) -> tuple[list[int], list[int]]:
    """Assign sizes to n ranks, largest first, each to the least loaded: owners, and loads."""
    owners, loads = [0] * len(sizes), [0] * n
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):  # equal ones stay in order
        owners[i] = loads.index(min(loads))
        loads[owners[i]] += sizes[i]
    return owners, loads


def windows(
    layers: Sequence[int], shapes: Mapping[str, Sequence[int]], layout: Layout
) -> list[Sequence[int]]:
    """Which layers of a stage are gathered and reduced together.

    Each by itself; with owners, enough layers that the fullest owner has at most a quarter more
    than the mean: every rank's part of a message is as long as the fullest one's.
    """
    width, n, L = 1, layout.dp * layout.cp, len(layers)
    if layout.sharding == "layerwise":
        names = matrices_of_layer(layers[0], shapes)
        sizes = [math.prod(shapes[name]) for name in names if ".experts." not in name]
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
    pieces, full_to, beyond = {}, 0, Counter()  # elements of every rank; and of owners behind them
    for name, (rows, columns) in shapes.items():
        owner = shards[name].owner
        ranks = range(n) if owner is None else range(owner, owner + 1)
        each = -(-rows // len(ranks))
        if owner is None:
            start = full_to + max(beyond.values(), default=0)
            full_to, beyond = start + each * columns, Counter()
        else:
            start = full_to + beyond[owner]
            beyond[owner] += each * columns
        full, rest = divmod(rows, each)  # 10 rows over 4 ranks: three have 3, and one has 1
        first, end = ranks.start, ranks.start + full
        pieces[name] = [Piece(slice(first, end), slice(0, full * each), start, each * columns)]
        if rest:
            last = slice(full * each, rows)
            pieces[name].append(Piece(slice(end, end + 1), last, start, rest * columns))
    return pieces, full_to + max(beyond.values(), default=0)
