"""Extensions: the places in the build of a model, and in a step, where they plug in.

    build    Llama -> keep my stage -> [swap] -> narrow -> tensor, context parallel -> [connect]
             -> allocate -> [wrap] -> gradient buckets, [parameters], [gradients] -> pipeline
    step     [begin] -> forward, backward -> [counts] in the message of the loss -> update
             -> [weights_changed] -> [updated] -> [measures]

An extension is a subclass with the methods that it needs, in a folder of its own. The core calls
them in the order of the run's list, and imports no extension; this base class does nothing. What an
extension changes in the placement table is among the `rules` of the layout (placement.py), because
a run can be planned without a model.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from picotron_min.model import Llama
from picotron_min.placement import Table


class Gradients(Protocol):
    """What holds gradients: data_parallel.GradientBuckets, or what an extension has instead."""

    def begin(self, num_backwards: int) -> None: ...  # gradients are zero
    def wait(self) -> None: ...  # until they are sums over the ranks
    def scale(self, factor: float) -> None: ...


class Extension:
    """What an extension adds to a run; see above for when each method is called."""

    def swap(self, model: Llama) -> None:
        """On the meta device, weights still whole: put other modules in a stage."""

    def connect(self, model: Llama, table: Table) -> None:
        """On the meta device, weights cut: put messages in, or take weights out."""

    def wrap(self, model: Llama) -> None:
        """Memory is allocated, its content is not yet there: change how a stage computes."""

    def parameters(self) -> dict[str, nn.Parameter]:
        """What the optimizer updates beside the parameters of the modules, by saved name."""
        return {}

    def gradients(self) -> Sequence[Gradients]:
        """What holds the gradients of these parameters."""
        return ()

    def begin(self) -> None:
        """A step begins."""

    def counts(self) -> Tensor:
        """Numbers of this rank that are summed over all ranks, with the loss: float64, flat."""
        return torch.empty(0, dtype=torch.float64)

    def updated(self, totals: Tensor) -> None:
        """The optimizer has stepped; `totals` is the sum of all ranks' counts."""

    def measures(self, totals: Tensor) -> dict[str, object]:
        """What the metrics of the step report of these, by name; `totals` is on the host."""
        return {}

    def weights_changed(self) -> None:
        """An update or a load has changed the weights: make again what was made from them."""
