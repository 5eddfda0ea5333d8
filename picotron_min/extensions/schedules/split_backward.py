"""Split backward: B as the core runs it, then W, from the queue."""

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from picotron_min.pipeline_parallel import Pipeline
from picotron_min.pipeline_schedule import Action, Kind


@dataclass
class SplitBackwardPipeline(Pipeline):
    """B leaves a queue of weight gradients (overlap/linear.py), which its W runs."""

    # Of a micro-batch and a chunk between B and W: the queue, and the gradient of the output.
    pending: dict[tuple, tuple] = field(default_factory=dict)

    def methods(self) -> dict[Kind, Callable[[Action], None]]:
        return super().methods() | {Kind.WEIGHT: self._weight}

    def _backward(self, action: Action) -> None:
        self.gradient = None
        super()._backward(action)
        queue = self.chunks[action.chunk].model.boundary.queue
        self.pending[action.micro_batch, action.chunk] = queue.detach(), self.gradient

    def free_gradient(self, i: int, c: int, gradient: Tensor) -> None:
        self.gradient = gradient  # not free yet: it is also dy of the stage's last linear

    def _weight(self, action: Action) -> None:
        queue, gradient = self.pending.pop((action.micro_batch, action.chunk))
        with self.watch(action):
            queue.run()
        if gradient is not None:
            self.free.append(gradient)
