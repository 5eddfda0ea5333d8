"""A ring of messages behind products: its sums and its order.

That it trains the same model is in test_layouts.py; its bytes are in test_planner_traffic.py.
"""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from picotron_min import collectives
from picotron_min.collectives import Axis
from picotron_min.extensions.overlap.linear import WeightGradients
from picotron_min.extensions.overlap.ring import RingBoundary
from picotron_min.extensions.settings import Layout
from picotron_min.mesh import build_axes
from picotron_min.runtime.config import ConfigError
from tests.training import config_of

B, S, F, E = 2, 12, 5, 6
QUEUE = WeightGradients()


def inputs(rank: int, dtype: torch.dtype) -> tuple[list[Tensor], list[partial]]:
    """Two x [B, S, F] of a rank, and a product for each."""
    generator = torch.Generator().manual_seed(rank)
    xs = torch.randn(2, B, S, F, generator=generator, dtype=torch.float64).to(dtype)
    weights = torch.randn(2, F, E, generator=generator, dtype=torch.float64).to(dtype)
    return list(xs), [partial(torch.matmul, other=weight) for weight in weights]


def scattered(dtype: torch.dtype) -> Tensor:
    axis = build_axes(torch.device("cpu"), Layout(tp=dist.get_world_size())).tp
    return RingBoundary(axis, QUEUE).multiply_scatter(*inputs(axis.rank, dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_partial_sums_are_added_in_float32_from_rank_0_on(pool, dtype):
    n = 4
    for rank, total in enumerate(pool.run(n, scattered, dtype)):
        parts = [inputs(r, dtype) for r in range(n)]
        rows = [
            sum(f(x.chunk(n, dim=1)[rank]) for x, f in zip(xs, products, strict=True))
            for xs, products in parts
        ]
        assert torch.equal(total, sum(row.float() for row in rows).to(dtype)), "to the last bit"


class Events(list[str]):
    """What a ring of 4 does on rank 1, in order; messages bring back what was sent."""

    def __init__(self) -> None:
        super().__init__()
        self.axis = SimpleNamespace(rank=1, size=4, next=2)

    def shift(self, tensor: Tensor, axis: Axis, distance: int = 1) -> SimpleNamespace:
        number = sum(event.startswith("start") for event in self)
        self.append(f"start {number}")
        before = tensor.clone()

        def wait() -> Tensor:
            assert torch.equal(tensor, before), "a tensor that travels has changed"
            self.append(f"wait {number}")
            return tensor.clone()

        return SimpleNamespace(wait=wait)

    def product(self, x: Tensor) -> Tensor:
        self.append("product")
        return x + 1


@pytest.fixture
def events(monkeypatch) -> Events:
    events = Events()
    monkeypatch.setattr(collectives, "Shift", events.shift)
    monkeypatch.setattr("picotron_min.extensions.overlap.ring.Shift", events.shift)
    return events


def test_a_part_is_multiplied_while_the_next_one_arrives(events):
    x, products = torch.arange(6.0).view(1, 3, 2), [events.product] * 2
    RingBoundary(events.axis, QUEUE).gather_multiply(x, products)
    steps = [(f"start {i}", "product", "product", f"wait {i}") for i in range(3)]
    assert events == [*sum(steps, ()), "product", "product"]


def test_a_part_is_sent_while_the_next_one_is_multiplied(events):
    x, products = torch.arange(24.0).view(1, 12, 2), [events.product] * 2
    boundary = RingBoundary(events.axis, QUEUE)
    boundary.multiply_scatter([x, x], products, meanwhile=lambda: events.append("settle"))
    steps = [("product", "product", f"start {i}") for i in range(3)]
    own = ["product", "product", "settle"]
    assert events == [*sum(steps, ()), *own, "wait 0", "wait 1", "wait 2"]


def test_overlap_without_sequence_parallelism_is_refused():
    with pytest.raises(ConfigError, match=r"tp_overlap=true needs .*: set these, or tp_overlap"):
        config_of(tp=2, tp_overlap=True)
