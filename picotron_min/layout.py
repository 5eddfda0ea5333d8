"""Layout: how a run lies on processes, what a step computes, and how weights are updated.

Ranks are numbered row by row over (pp, dp, cp, tp):

    pp 2, dp 2, tp 2     pp 0   dp 0: ranks 0 1    dp 1: ranks 2 3
                         pp 1   dp 0: ranks 4 5    dp 1: ranks 6 7

So tensor-parallel ranks, which communicate most, are neighbours and share a node. Extensions add
fields of their own, in extensions/settings.py. Standard library only.
"""

import math
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice, product
from typing import Literal, NamedTuple

from picotron_min.pipeline_schedule import SCHEDULES, Schedule

# Rows (tokens) that loss.py takes at a time. Each stripe reads and writes the gradient of lm_head,
# 12 bytes an element, beside 6 FLOPs a row. A GPU does 230 FLOPs in the time of a byte: that adds
# 45% to the products of 1024 rows, 11% to 4096.
STRIPE_ROWS = {"cpu": 1024, "cuda": 4096}
BUCKET_BYTES = 25 * 2**20  # of gradients that data_parallel.py sends at a time: as in DDP

Coordinates = namedtuple("Coordinates", ["pp", "dp", "cp", "tp"])  # of a rank in the grid


class Grid(NamedTuple):
    """All ranks, numbered row by row, and axes: the coordinates in which their ranks differ."""

    sizes: dict[str, int]
    axes: dict[str, tuple[str, ...]]

    def size(self, axis: str) -> int:
        return math.prod(self.sizes[name] for name in self.axes[axis])


@dataclass(frozen=True)
class Layout:
    """The size of each axis of the mesh, and what belongs to it."""

    pp: int = 1  # pipeline parallel: each rank has some of the layers
    dp: int = 1  # data parallel: each rank has some of the batch
    cp: int = 1  # context parallel: every sequence is split
    tp: int = 1  # tensor parallel: every matrix is split
    pp_engine: str = "1f1b"  # a name in pipeline_schedule.SCHEDULES
    pp_chunks: int = 1  # stages of a rank, for schedules that take several
    pp_layers: tuple[int, ...] | None = None  # of each stage; None: balanced, see costs.py
    cp_engine: Literal["ring", "ulysses"] = "ring"  # how attention reaches across the cuts
    sequence_parallel: bool = False  # with tp: norms and residuals are cut along the sequence

    @property
    def sizes(self) -> Coordinates:
        return Coordinates(self.pp, self.dp, self.cp, self.tp)

    @property
    def grids(self) -> list[Grid]:
        """What mesh.py makes axes from; joint axes vary several coordinates."""
        axes = {name: (name,) for name in Coordinates._fields}
        axes |= {"dp_cp": ("dp", "cp"), "dp_cp_tp": ("dp", "cp", "tp")}
        return [Grid(self.sizes._asdict(), axes | {"world": Coordinates._fields})]

    @property
    def axis_sizes(self) -> dict[str, int]:
        """The size of each axis but `ends`, whose size differs between ranks."""
        return {axis: grid.size(axis) for grid in self.grids for axis in grid.axes}

    @property
    def world_size(self) -> int:
        return math.prod(self.sizes)

    @property
    def schedule(self) -> Schedule:
        return SCHEDULES[self.pp_engine]

    @property
    def num_stages(self) -> int:
        return self.pp * self.pp_chunks

    def split(self, layers: list[int], head: int) -> list[int]:
        """Equal layers over the stages, given the FLOPs of all layers and of the head."""
        L, others, head = len(layers), self.num_stages - 1, head / layers[0]
        choices = range(max(1, L // self.num_stages), 0, -1)  # of the last stage
        last = min(choices, key=lambda n: max(n + head, math.ceil((L - n) / others)))
        each, more = divmod(L - last, others)  # what is left is spread evenly
        return [each + (stage < more) for stage in range(others)] + [last]

    @property
    def rules(self) -> list[Callable]:
        """What extensions change in the placement table; each is a placement.Rule."""
        return []

    def coordinates(self, rank: int) -> Coordinates:
        """Where a rank is in the grid; known before there is any process group."""
        places = product(*map(range, self.sizes))  # the last is fastest
        return Coordinates(*next(islice(places, rank, None)))


@dataclass(frozen=True)
class Workload:
    """What one data-parallel rank computes in a step."""

    seq_length: int  # tokens
    micro_batch_size: int = 1  # sequences
    num_micro_batches: int = 1  # of a rank in a step; their gradients are added
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"  # of matmuls
    flash_attention: bool = True  # fused, where there is a kernel


@dataclass(frozen=True)
class Recipe:
    """How the weights are updated."""

    optimizer: Literal["adamw", "sgd"] = "adamw"
    learning_rate: float = 3e-4  # the highest
    min_learning_rate: float = 0.0  # where cosine and wsd end
    schedule: Literal["constant", "cosine", "wsd"] = "constant"  # after the warm-up
    warmup_steps: int = 0  # in which the rate rises
    total_train_steps: int = 200  # of the schedule, and of the run
    weight_decay: float = 0.1  # of matrices only
    betas: tuple[float, float] = (0.9, 0.95)  # of AdamW
    grad_clip: float | None = 1.0  # largest norm of the whole gradient; None: no clipping
    count_zeros: bool = False  # record how many elements of the gradient are exactly zero
    fused: bool = True  # one kernel for the whole update
