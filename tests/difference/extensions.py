"""Right extensions, as a reader might write them; `install` puts one into every run."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from difference import whole
from picotron_min import loss
from picotron_min.collectives import all_gather, all_reduce
from picotron_min.data_parallel import GradientBuckets
from picotron_min.extension import Extension
from picotron_min.extensions import build
from picotron_min.extensions.settings import Layout, ModelConfig
from picotron_min.mesh import Axes
from picotron_min.model import Head, Llama
from picotron_min.placement import Placement, Table


class Yours(Extension):
    def __init__(self, axes: Axes) -> None:
        self.axes = axes


class ZLoss(Yours):
    """Adds to each token's loss the square of the logarithm of its softmax's denominator."""

    def connect(self, model: Llama, table: Table) -> None:
        if isinstance(head := model.lm_head, Head):
            self.tp, of_head = self.axes.tp, head.stripe_loss
            head.stripe_loss = partial(self.stripe_loss, of_head)

    def stripe_loss(self, of_head: Callable, x: Tensor, weight: Tensor, targets: Tensor) -> tuple:
        losses, gradient = of_head(x, weight, targets)
        logits, counts = x @ weight.T, targets != loss.IGNORE_INDEX
        z = all_reduce(logits.exp().sum(-1), self.tp).log()
        p = (logits - z[:, None]).exp()
        return losses + 0.1 * z.square() * counts, gradient + (0.2 * z * counts)[:, None] * p


class EveryThird(Yours):
    """Trains on every third position alone; with Ulysses, whose ranks have consecutive ones."""

    def wrap(self, model: Llama) -> None:
        if isinstance(head := model.lm_head, Head):
            of_head, rank = head.loss, self.axes.cp.rank

            def of_some(x: Tensor, targets: Tensor) -> Tensor:
                positions = torch.arange(targets.shape[1]) + rank * targets.shape[1]
                return of_head(x, targets.where(positions % 3 == 0, loss.IGNORE_INDEX))

            head.loss = of_some


class Shrinking(Yours):
    """After each step makes all weights smaller, by a number that the step has counted."""

    def begin(self) -> None:
        self.calls = torch.zeros(1, dtype=torch.float64)

    def wrap(self, model: Llama) -> None:
        self.model = model
        if isinstance(model.lm_head, Head):
            model.model.norm.register_forward_hook(self.count)

    def count(self, _, args: tuple, out: Tensor) -> None:
        self.calls += (self.axes.tp.rank + self.axes.cp.rank == 0) * out.shape[0]

    def counts(self) -> Tensor:
        return self.calls

    def updated(self, totals: Tensor) -> None:
        for parameter in self.model.parameters():
            parameter.data *= 1 - totals.item() / 1000


class Scaled(Yours):
    """Scales the embeddings by numbers that it owns, and gathers an axis on the way."""

    name = "model.scale"

    def __init__(self, axes: Axes) -> None:
        super().__init__(axes)
        self.scale = nn.Parameter(torch.empty(32, dtype=torch.float64))

    def wrap(self, model: Llama) -> None:
        all_gather(torch.zeros(2), self.axes.tp, dim=0)
        model.model.embed_tokens.register_forward_hook(lambda _, args, out: out * self.scale)

    def parameters(self) -> dict[str, nn.Parameter]:
        return {self.name: self.scale}

    def gradients(self) -> Sequence[GradientBuckets]:
        return [GradientBuckets(self.parameters(), self.axes.dp_cp)]


def install(*kinds: type[Yours]) -> None:
    """Every run from here on has them, with their parameters in the tables."""
    chosen, shapes, rules = build.extensions_of, ModelConfig.parameter_shapes, Layout.rules.fget

    def extensions_of(*settings) -> list[Extension]:
        return [*chosen(*settings), *(kind(settings[3]) for kind in kinds)]

    build.extensions_of = whole.extensions_of = extensions_of
    if Scaled in kinds:
        name, row = Scaled.name, Placement((), copies=("dp_cp", "tp"), sums=("dp_cp",))
        ModelConfig.parameter_shapes = lambda self: shapes(self) | {name: (self.hidden_size,)}
        Layout.rules = property(lambda self: [*rules(self), lambda *_: {name: row}])
