"""How long messages take between ranks of a node, and between nodes.

    16 ranks, nodes of 4       stride 1:  0 1 2 3 | 4 5 6 7 | ...    a ring of 8 spans two nodes
                               stride 4:  0       | 4       | ...    a ring of 4 spans four nodes

A collective is a ring: every rank sends to the next one. Where the ring crosses to another node it
is as fast as the network cards of those of its ranks that are in one node.
"""

import math
from typing import NamedTuple

from picotron_min.runtime.hardware import Gpu


class Link(NamedTuple):
    """Between the ranks of one row of an axis."""

    size: int  # ranks
    bandwidth: float  # bytes/s
    latency: float  # seconds, of a collective
    is_network: bool

    def message(self, whole: float) -> float:
        """Seconds of an all-gather or a reduce-scatter of a tensor with so many bytes."""
        if self.size == 1:
            return 0.0
        return (self.size - 1) / self.size * whole / self.bandwidth + self.latency

    def all_reduce(self, whole: float) -> float:
        return 2 * self.message(whole)  # a reduce-scatter and an all-gather


def link(gpu: Gpu, size: int, stride: int) -> Link:
    """The link of `size` ranks, each `stride` ranks from the next."""
    inside = gpu.link_share * gpu.nvlink
    if size * stride <= gpu.gpus_per_node:
        return Link(size, inside, gpu.latency + gpu.hop * (size - 1), is_network=False)
    each = max(1, min(size, gpu.gpus_per_node // stride))  # ranks of the row in a node
    hops = each - 1 + math.ceil(size / each) - 1
    bandwidth = min(inside, gpu.network_share * gpu.network * each)
    return Link(size, bandwidth, gpu.latency + gpu.hop * hops, is_network=True)


def send_seconds(gpu: Gpu, size: int, stride: int, sent: float) -> float:
    """Seconds of a message from a rank to its neighbour, which uses one network card."""
    if size == 1:
        return 0.0
    speed = gpu.link_share * gpu.nvlink
    if size * stride > gpu.gpus_per_node:
        speed = min(speed, gpu.network_share * gpu.network)
    return sent / speed + gpu.latency
