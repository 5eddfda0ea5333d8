"""Family: what the project must know of a kind of model, in the shape.py of its folder.

    shape, rows, extension   numbers, parameters, their places and modules: so it is trained
    modules                  what they keep for backward: so its memory is planned
    architectures            what transformers calls it: so it is read and exported
    tiny, kind               a small model of it: so it is compared with one process

The lists in other folders are made from `settings.FAMILIES`. Standard library only.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from picotron_min.layout import Layout
from picotron_min.model_config import ModelConfig
from picotron_min.placement import Table


def by_names(c: ModelConfig, layer: int) -> None:
    """The kind of a layer, if the names of its parameters show it."""


class Family(NamedTuple):
    """Three are always given. What is left out does not exist: no published models, ..."""

    shape: type[ModelConfig]  # its numbers, each with a type; names and shapes of its parameters
    # Its class, in the folder's extension.py; None: build.py makes it from a run's settings.
    extension: str | None
    # What a layer is, beside the names of its parameters: else a layer of another kind could be
    # missing in the small model, which is compared with one process.
    kind: Callable[[ModelConfig, int], object]
    # The last part of the names of its parameters' modules. The formulas of planner/activations.py
    # have what these keep for backward; queries and keys that have norms among it.
    modules: tuple[str, ...] = ()
    rows: Callable[..., Table] = lambda shapes, table, num_layers, layout: {}  # see placement.Rule
    # Rows of runtime/architectures.py; of a row that is there, what it adds.
    architectures: Mapping[str, dict] = {}
    presets: Mapping[str, ModelConfig] = {}  # published models by their ids on the hub
    # Numbers of a small model of so many layers, in which each kind of layer is, at places that
    # are not the same in two pipeline stages.
    tiny: Callable[[ModelConfig, Layout, int], dict] = lambda c, layout, num_layers: {}

    def is_used(self, c: ModelConfig) -> bool:
        """Whether one of its numbers is not the default."""
        own = self.shape.__annotations__
        return any(getattr(c, name) != getattr(self.shape, name) for name in own)
