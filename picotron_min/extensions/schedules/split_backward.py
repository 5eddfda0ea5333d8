"""Split backward: B as the core runs it, then W, from the queue."""

from collections.abc import Callable
from dataclasses import dataclass, field

from picotron_min.extensions.overlap.linear import WeightGradients
from picotron_min.pipeline_parallel import Pipeline
from picotron_min.pipeline_schedule import Action, Kind


@dataclass
class SplitBackwardPipeline(Pipeline):
    """B leaves a queue of weight gradients (overlap/linear.py), which its W runs."""

    queues: dict[tuple, WeightGradients] = field(default_factory=dict)  # by micro-batch, chunk

    def methods(self) -> dict[Kind, Callable[[Action], None]]:
        return super().methods() | {Kind.WEIGHT: self._weight}

    def _backward(self, action: Action) -> None:
        super()._backward(action)
        queue = self.chunks[action.chunk].model.boundary.queue
        self.queues[action.micro_batch, action.chunk] = queue.detach()

    def _weight(self, action: Action) -> None:
        queue = self.queues.pop((action.micro_batch, action.chunk))
        with self.watch(action):
            queue.run()
