"""Compare: all that the ranks have noted, beside the right run, and the first that is wrong.

The order is the right run's: phases, then tensors as it computed them, step after step. One
tolerance serves all but the norm: in float64 right layouts differ by 1e-12 of a tensor's largest
number at most (AdamW's weights), the norm by 1e-14; the rounding of float32 is 3e-8.

Which part of a whole tensor a rank should have is written apart from the code that is checked, on
purpose: no placement table, mesh or context-parallel module is asked. (Two exceptions: rows that
sharding gives a rank, and the cuts of parameters that an extension has added, are the run's own.)
"""

import re
from collections import namedtuple
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from difference.runs import Run
from difference.taps import LAYER, PHASES, Key
from difference.tiny import Trial
from picotron_min.extensions.settings import Layout

TOLERANCE = 1e-9  # of the whole tensor's largest number
OF_THE_NORM = 2e-11  # in which a small parameter may be counted wrongly
ROWS = "q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head"
COLUMNS = "o_proj", "down_proj"
# Of the core and the experts, whatever a table says; an extension may use names that end so.
UNCUT = r"(input|post_attention)_layernorm|mlp\.(gate|shared_expert_gate)"
UNCUT = re.compile(rf"model\.norm|{LAYER}\.({UNCUT})")
WHOLE = "positions", "tokens", "targets", "loss"  # on all tensor-parallel ranks
Indices = list[Sequence[int]]  # for each dim of a whole tensor, those that a rank has
AXES = "dp", "cp", "tp", "pp"
Here = namedtuple("Here", ["rank", "pp", "dp", "cp", "tp", "etp"])  # of a rank


def here(rank: int, layout: Layout) -> Here:
    grid = map(int, np.unravel_index(rank, layout.sizes))  # the last is fastest
    return Here(rank, *grid, rank % (layout.world_size // layout.pp) % layout.etp)


def chunk(indices: Sequence[int], rank: int, size: int) -> Sequence[int]:
    """Pieces whose length is rounded up: 10 over 4 ranks gives 3, 3, 3 and 1."""
    each = -(-len(indices) // size)
    return indices[rank * each : (rank + 1) * each]


def positions(at: Here, layout: Layout, length: int) -> Sequence[int]:
    """Of a sequence, those that a context-parallel rank has."""
    if layout.cp_engine == "ulysses":
        return chunk(range(length), at.cp, layout.cp)
    pieces = at.cp, 2 * layout.cp - 1 - at.cp  # zigzag: early, late
    return [i for piece in pieces for i in chunk(range(length), piece, 2 * layout.cp)]


def indices_of(key: Key, shape: Sequence[int], at: Here, layout: Layout, cuts: Sequence) -> Indices:
    """A rank's part of the whole tensor; `cuts` are what the rank has reported of a parameter."""
    indices, dim = [range(n) for n in shape], None
    name = key.name.removesuffix(".weight")
    module, rank, size = name.removesuffix(".input").split(".")[-1], at.tp, layout.tp
    if shape and key.phase in ("forward", "gradient"):
        is_attention = ".core_attention" in name  # [B, heads, S, D]
        of_cp = 2 if is_attention else min(1, len(shape) - 1)  # positions can be [S]
        indices[of_cp] = positions(at, layout, shape[of_cp])
        is_routed = ".gate." in name  # no token twice
        is_stream = layout.sequence_parallel and name not in WHOLE
        dim = 1 if is_attention or is_routed or is_stream else None
        dim = 2 if module in ROWS[:5] + COLUMNS else dim
    elif shape:
        rank, size = (at.etp, layout.etp) if ".experts." in name else (rank, size)
        dim = 0 if module in ROWS else 1 if module in COLUMNS else None
        if cuts and dim is None and not UNCUT.fullmatch(name):
            return [range(*pair) for pair in cuts]
    if dim is not None:
        indices[dim] = chunk(indices[dim], rank, size)
    if cuts and layout.sharding != "none":
        indices[0] = [i for i in indices[0] if i in range(*cuts[0])]
    return indices


def take(whole: Tensor, indices: Indices) -> Tensor:
    for dim, of_dim in enumerate(indices):
        whole = whole.index_select(dim, torch.tensor([*of_dim]).long())
    return whole


class Compared(NamedTuple):
    """A tensor of a rank, beside what it should be."""

    key: Key
    at: Here
    got: Tensor
    right: Tensor
    indices: Indices  # of the right whole
    error: float  # the largest difference, as a part of the whole tensor's largest number
    ran: list[str]  # functions: see Record


class Comparison:
    """Both runs, and what comes first among all that is wrong."""

    def __init__(self, trial: Trial, plain: Run, runs: Sequence[Run]) -> None:
        self.trial, self.whole = trial, {}
        for key, values, _ in plain.records:
            if key in self.whole and values.ndim != 1:  # of another sequence; 1: positions
                before = self.whole[key].numpy()
                values = np.concatenate([before, values]) if values.ndim else before + values
            self.whole[key] = torch.as_tensor(values)
        self.ran_plainly = {name for record in plain.records for name in record.ran}
        self.ranks = [here(rank, trial.layout) for rank in range(trial.layout.world_size)]
        pairs = zip(self.ranks, runs, strict=False)
        self.all = [one for at, run in pairs for one in self._beside(at, run)]
        order = {of: i for i, of in enumerate(dict.fromkeys(key[1:3] for key in self.whole))}

        def place(one: Compared) -> tuple:
            return one.key.step, PHASES.index(one.key.phase), order.get(one.key[1:3], 0)

        most = {"gradient norm": OF_THE_NORM}
        wrong = [o for o in self.all if not o.error <= most.get(o.key.phase, TOLERANCE)]  # or NaN
        least = min(map(place, wrong), default=None)
        # The same tensor on several ranks, or in several micro-batches.
        self.first = [one for one in wrong if place(one) == least]

    def _beside(self, at: Here, run: Run) -> Iterator[Compared]:
        """A rank's records, in the order in which it wrote them."""
        layout = self.trial.layout
        cuts = {key.name: got.tolist() for key, got, _ in run.records if key.phase == "cuts"}
        for key, values, ran in run.records:
            got, right = torch.as_tensor(values), self.whole.get(key)
            is_loss = key[1:3] == ("forward", "loss")
            if right is None or (is_loss and not right.ndim and layout.cp > 1):
                # It has no tap in the right run; or it is a part of what an extension has summed
                # over whole sequences: the step's loss, of all ranks, is compared.
                continue
            indices = indices_of(key, right.shape, at, layout, cuts.get(key.name, ()))
            part = take(right, indices)
            part = part.sum() if is_loss else part  # of each token in the right run
            yield Compared(key, at, got, part, indices, error_of(got, part, right), ran)


def error_of(got: Tensor, right: Tensor, whole: Tensor) -> float:
    if got.shape != right.shape:
        return float("inf")
    # 1e-300: both can be zero
    return float((got - right).abs().max() / (whole.abs().max() + 1e-300)) if got.numel() else 0.0
