"""Rows: where sharded matrices lie, in the placement table and in a buffer.

    row shardings    every rank has some rows of every matrix
    layerwise        every hidden matrix has one owner, which has all rows; other matrices as above

Matrices that travel together lie in a buffer [n, R]: row r of the buffer is rank r's part of all of
them. Standard library only, so that a run can be planned anywhere.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise, starmap
from typing import NamedTuple

from picotron_min.layout import Layout
from picotron_min.placement import HIDDEN, Cut, Placement, Table


def shard_of(placement: Placement) -> Cut | None:
    """What sharding cuts beyond what a rank computes with; None where it cuts nothing."""
    return placement.further[0] if placement.further else None


def sharded_rows(
    shapes: Mapping[str, Sequence[int]], table: Table, num_layers: Sequence[int], layout: Layout
) -> Table:
    """Matrices are cut once more, over dp x cp; all ranks update vectors, which are small."""
    owners = _owners(shapes, table, num_layers, layout) if layout.sharding == "layerwise" else {}
    rows, sizes = {}, layout.axis_sizes
    for name, placement in table.items():
        axis = placement.sums[0]  # dp_cp, or edp of experts
        if placement.cuts and len(shapes[name]) == 2 and sizes[axis] > 1:
            further = (Cut(axis, 0, owners.get(name)),)
            copies = tuple(other for other in placement.copies if other != axis)
            rows[name] = placement._replace(further=further, copies=copies)
    return rows


def _owners(
    shapes: Mapping[str, Sequence[int]], table: Table, num_layers: Sequence[int], layout: Layout
) -> dict[str, int]:
    """The rank that has all of a hidden matrix, by name; `num_layers` of the stages."""
    owners, stops = {}, [0, *accumulate(num_layers)]
    for layers in starmap(range, pairwise(stops)):
        for window in windows(layers, shapes, layout):
            groups = defaultdict(list)  # an ep rank assigns its own experts
            for name in (name for i in window for name in matrices_of_layer(i, shapes)):
                groups[table[name].sums[0], table[name].cuts[0].owner].append(name)
            for (axis, _), names in groups.items():
                sizes = [math.prod(shapes[name]) for name in names]
                of_names, _ = deal(sizes, layout.axis_sizes[axis])
                owners |= zip(names, of_names, strict=True)
    return owners


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
    pieces, ends = {}, Counter()  # elements so far, by owner
    for name, (rows, columns) in shapes.items():
        owner = shards[name].owner
        first, ranks = (0, n) if owner is None else (owner, 1)
        each = -(-rows // ranks)
        start, width = ends[owner], each * columns
        ends[owner] += width
        full, rest = divmod(rows, each)  # 10 rows over 4 ranks: three have 3, and one has 1
        end = first + full
        pieces[name] = [Piece(slice(first, end), slice(0, full * each), start, width)]
        if rest:
            last = slice(full * each, rows)
            pieces[name].append(Piece(slice(end, end + 1), last, start, rest * columns))
    assert None not in ends or len(ends) == 1, "either all of them have an owner, or none"
    return pieces, max(ends.values(), default=0)
