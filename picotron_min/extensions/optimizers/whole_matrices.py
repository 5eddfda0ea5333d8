"""Whole matrices: which hidden matrices are made whole together, each on another rank.

    4 matrices over dp_cp 2 x tp 2        rank 0 gets the four parts of the first, rank 1 of
    a batch of 4 for 4 ranks              the second, ...: each orthogonalises one matrix

Standard library only, so that a run can be planned anywhere.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import NamedTuple

from picotron_min.placement import Table, part


class Batch(NamedTuple):
    """Matrices of one shape that are cut alike: at most one for each rank that has a part."""

    shape: tuple[int, int]
    names: list[str]
    axis: str  # of these ranks: dp_cp_tp where dp_cp and tp cut; empty: the parts are whole
    parts: list[tuple[slice, ...]]  # of each rank

    def numbers(self, rank: int) -> tuple[list[int], list[int]]:
        """How many numbers it sends to each rank to make the matrices whole, and gets from each."""
        sizes = [math.prod(s.stop - s.start for s in slices) for slices in self.parts]
        gets = [i < len(self.names) for i in range(len(sizes))]
        return [sizes[rank] * here for here in gets], [size * gets[rank] for size in sizes]


def batches(
    names: Iterable[str],
    shapes: Mapping[str, Sequence[int]],
    table: Table,
    rank: Mapping[str, int],
    size: Mapping[str, int],
) -> Iterator[Batch]:
    """The hidden ones of the parameters of a rank's layers; `rank` and `size` by axis."""
    alike = defaultdict(list)
    for name in (name for name in names if table[name].is_hidden_matrix):
        owned = table[name].owned
        if all(cut.owner in (None, rank[cut.axis]) for cut in owned):
            cuts = tuple(cut for cut in owned if cut.owner is None and size[cut.axis] > 1)
            alike[tuple(shapes[name]), cuts].append(name)
    for (shape, cuts), members in alike.items():
        axes = [cut.axis for cut in reversed(cuts)]  # tp cuts first, and varies fastest
        places = product(*(range(size[axis]) for axis in axes))
        parts = [part(shape, cuts, dict(zip(axes, place, strict=True)), size) for place in places]
        for i in range(0, len(members), len(parts)):
            yield Batch(shape, members[i : i + len(parts)], "_".join(axes), parts)
