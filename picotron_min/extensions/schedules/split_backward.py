"""Split backward: B as the core runs it, then W, from the queue."""

from collections.abc import Callable

from torch import Tensor

from picotron_min.data import Batch
from picotron_min.pipeline_parallel import Pipeline, Watch
from picotron_min.pipeline_schedule import Action, Kind, Plan


class SplitBackwardPipeline(Pipeline):
    """B leaves a queue of weight gradients (overlap/linear.py), which its W runs."""

    def run(self, plan: Plan, read: Callable[[int], Batch], watch: Watch | None = None) -> Tensor:
        self.pending: dict[tuple, tuple] = {}  # micro-batch, chunk -> queue, gradient of the output
        return super().run(plan, read, watch)

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
