"""What exercise 16 observes: outputs that are alive, and messages with a graph."""

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


class Outputs:
    """How many outputs are alive, now and when each forward began."""

    def __init__(self) -> None:
        self.alive, self.counts = 0, []
        self.now, self.awaited = "", []  # the forward that runs, and those that wait while they run

    def copy(self, values: Tensor) -> Tensor:
        """The same values, in memory that counts as long as any tensor or view lies in it."""
        memory = np.array(values.detach().numpy())
        self.alive += 1
        weakref.finalize(memory, self._released)
        return torch.from_numpy(memory)  # its storage keeps `memory` alive

    def _released(self) -> None:
        self.alive -= 1

    def counted_at_forwards(self, names: list[str]) -> Callable:
        """A `watch` for Pipeline.run: counts, and adds names of forwards, which stay sorted."""

        @contextlib.contextmanager
        def watch(action) -> Iterator[None]:
            if action.kind.value == "F":
                self.counts.append(self.alive)
                names.append(f"F{action.micro_batch}")
                names.sort()
                self.now = f"F{action.micro_batch}"
            yield
            self.now = ""

        return watch

    def note_arrivals(self, pipeline: Any) -> None:
        arrived = pipeline._arrived

        def noted(*key: Any) -> Tensor:
            self.awaited += [self.now] if self.now else []
            return arrived(*key)

        pipeline._arrived = noted


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, outputs, x):  # saves nothing: backward needs no values
        return outputs.copy(x)

    @staticmethod
    def backward(ctx, dy):
        return None, dy


class PartOfModel(nn.Module):
    """A stage; `forward_of` is a function of its weights."""

    def __init__(
        self, weights: list[Tensor], is_first: bool, forward_of: Callable, outputs: Outputs
    ) -> None:
        super().__init__()
        self.weights = nn.ParameterList(weights)
        self.is_first, self.forward_of, self.outputs = is_first, forward_of, outputs

    def forward(self, x: Tensor, positions: Tensor, targets: Tensor | None, *extra) -> Tensor:
        out = self.forward_of(list(self.weights), x, self.is_first, positions, targets, *extra)
        return _Copy.apply(self.outputs, out)


def note_graphs(axis, seen: dict[str, Any]) -> None:
    """Note whether anything that is sent requires a gradient: the ledger sees all of it."""
    record = axis.ledger.record

    def inspect(collective: str, tensor: Tensor, *share: float) -> None:
        seen["has a graph"] |= tensor.requires_grad
        record(collective, tensor, *share)

    axis.ledger.record = inspect
