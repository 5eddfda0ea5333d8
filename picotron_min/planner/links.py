"""Which ranks an axis joins, and how long messages take inside a node and between nodes.

    16 ranks, nodes of 4       stride 1:  0 1 2 3 | 4 5 6 7 | ...    a ring of 8 spans two nodes
                               stride 4:  0       | 4       | ...    a ring of 4 spans four nodes

A collective is a ring: every rank sends to the next one. Where the ring crosses to another node it
is as fast as the network cards of its ranks in one node.
"""

import math
from itertools import product
from typing import NamedTuple

from picotron_min.extensions.settings import Layout
from picotron_min.runtime.hardware import Gpu


def ranks_of_axis(layout: Layout, axis: str, rank: int) -> list[int]:
    """The row of ranks along an axis that has this rank in it, as in mesh.build_axes."""
    if axis == "ends":  # the first and the last stage
        pipeline = ranks_of_axis(layout, "pp", rank)
        ends = sorted({pipeline[0], pipeline[-1]})
        return ends if rank in ends else [rank]
    grid = next(grid for grid in layout.grids if axis in grid.axes)
    first, stride, steps = rank, 1, {}
    for name, size in reversed(grid.sizes.items()):
        if name in grid.axes[axis]:
            first -= rank // stride % size * stride
            steps[name] = range(0, size * stride, stride)
        stride *= size
    return [first + sum(step) for step in product(*(steps[name] for name in grid.axes[axis]))]


class Link(NamedTuple):
    """Between the ranks of one row of an axis."""

    size: int  # ranks
    bandwidth: float  # bytes/s of a ring
    latency: float  # seconds, of a collective
    is_network: bool
    alone: float  # bytes/s of one rank to its neighbour
    start: float  # seconds until the first byte arrives

    def message(self, whole: float) -> float:
        """Seconds to gather or reduce-scatter `whole` bytes; an all-reduce is two of these."""
        if self.size == 1:
            return 0.0
        return (self.size - 1) / self.size * whole / self.bandwidth + self.latency

    def send(self, sent: float) -> float:
        """Seconds of a message from a rank to its neighbour, which uses one network card."""
        return sent / self.alone + self.start if self.size > 1 else 0.0


def link(gpu: Gpu, size: int, stride: int) -> Link:
    """The link of `size` ranks, each `stride` ranks from the next."""
    inside, is_network = gpu.link_share * gpu.nvlink, size * stride > gpu.gpus_per_node
    card = gpu.network_share * gpu.network if is_network else math.inf
    each = max(1, min(size, gpu.gpus_per_node // stride))  # ranks of the row in a node
    latency = gpu.latency + gpu.hop * (each - 1 + math.ceil(size / each) - 1)
    speeds = min(inside, each * card), min(inside, card)
    return Link(size, speeds[0], latency, is_network, speeds[1], gpu.latency)
