"""Places: which part of a whole tensor each rank should have.

Written apart from the code that is checked, on purpose: nothing here asks a placement table, a mesh
or a context-parallel module. (Two exceptions: rows that sharding gives a rank, and the cuts of
parameters that a new extension has added, are the run's own.)
"""

import re
from collections.abc import Collection, Iterator, Sequence
from itertools import chain, combinations
from typing import NamedTuple

from torch import Tensor

from difference.taps import LAYER, Key
from picotron_min.extensions.settings import Layout

Indices = list[Sequence[int]]  # for each dim of the whole, those that a rank has
OUT, IN = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), ("o_proj", "down_proj")
# Of the core and the experts, whatever a table says; yours may have other names that end so.
UNCUT = r"(input|post_attention)_layernorm|self_attn\.[qk]_norm|mlp\.(gate|shared_expert_gate)"
UNCUT = re.compile(rf"model\.norm|{LAYER}\.({UNCUT})")


class Here(NamedTuple):
    """A rank's coordinates."""

    rank: int
    pp: int
    dp: int
    cp: int
    tp: int
    ep: int
    etp: int

    def __str__(self) -> str:
        return f"rank {self.rank}"


def here(rank: int, layout: Layout) -> Here:
    stage, inner = divmod(rank, layout.dp * layout.cp * layout.tp)
    grid = inner // (layout.cp * layout.tp), inner // layout.tp % layout.cp, inner % layout.tp
    return Here(rank, stage, *grid, inner // layout.etp % layout.ep, inner % layout.etp)


def along(at: Here, ranks: Collection[Here]) -> Iterator[tuple[str, list[Here]]]:
    """For some axes, the ranks that differ from one in their places on these axes alone."""
    for some in chain.from_iterable(combinations(("dp", "cp", "tp", "pp"), n) for n in (1, 2, 3)):
        free = dict.fromkeys(some, 0)
        row = [o for o in ranks if o._replace(**free)[1:5] == at._replace(**free)[1:5]]
        if all(len({getattr(o, axis) for o in row}) > 1 for axis in some):
            yield " and ".join(some), row


def positions(at: Here, layout: Layout, length: int) -> list[int]:
    """Of a sequence, those that a context-parallel rank has."""
    if layout.cp_engine == "ulysses" or layout.cp == 1:
        each = length // layout.cp
        return [*range(at.cp * each, (at.cp + 1) * each)]
    half, last = length // (2 * layout.cp), 2 * layout.cp - 1 - at.cp  # zigzag: early, late
    return [*range(at.cp * half, (at.cp + 1) * half), *range(last * half, (last + 1) * half)]


def chunk(indices: Sequence[int], rank: int, size: int) -> Sequence[int]:
    """Pieces whose length is rounded up: 10 over 4 ranks gives 3, 3, 3 and 1."""
    each = -(-len(indices) // size)
    return indices[rank * each : (rank + 1) * each]


def indices_of(
    key: Key, shape: Sequence[int], at: Here, layout: Layout, cuts: Sequence = ()
) -> Indices:
    """A rank's part of the whole tensor; `cuts` are what the rank has reported of a parameter."""
    indices, dim = [range(n) for n in shape], None
    name = key.name.split(" of ")[-1].removesuffix(".weight")
    module, rank, size = name.removesuffix(".input").split(".")[-1], at.tp, layout.tp
    if shape and key.phase in ("forward", "backward"):
        of_cp = 2 if ".core_attention" in name else 1
        indices[of_cp] = positions(at, layout, shape[of_cp])
        is_routed = name.endswith((".gate.experts", ".gate.weights"))  # no token twice
        is_stream = layout.sequence_parallel and name not in ("tokens", "targets", "loss")
        dim = 1 if ".core_attention" in name or is_routed or is_stream else None
        dim = 2 if module in OUT + IN else dim
    elif shape:
        rank, size = (at.etp, layout.etp) if ".experts." in name else (rank, size)
        dim = 0 if module in (*OUT, "embed_tokens", "lm_head") else 1 if module in IN else None
        if len(cuts) and dim is None and not UNCUT.fullmatch(name):
            indices = [range(*pair) for pair in cuts[:-1]]
    if dim is not None:
        indices[dim] = chunk(indices[dim], rank, size)
    if len(cuts) and shape:
        indices[0] = indices[0][slice(*cuts[-1])]
    return indices


def take(whole: Tensor, indices: Indices) -> Tensor:
    for dim, of_dim in enumerate(indices):
        if len(of_dim) < whole.shape[dim]:
            whole = whole[(slice(None),) * dim + ([*of_dim],)]
    return whole
