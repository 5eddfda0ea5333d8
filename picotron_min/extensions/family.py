"""Family: what the project must know of a kind of model, in the shape.py of its folder.

    shape, rows       numbers, parameters and their places: so it is built, cut, summed and saved
    architectures     what transformers calls it: so it is read and exported
    modules, normed   what they keep for backward: so its memory is planned
    tiny, kind        a small model of it: so it is compared with one process

The lists in other folders are made from `settings.FAMILIES`. Standard library only.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from picotron_min.layout import Layout
from picotron_min.model_config import ModelConfig
from picotron_min.placement import Table


class Family(NamedTuple):
    """Whatever is left out does not exist: there are no parameters, no published models, ..."""

    shape: type[ModelConfig]  # its numbers, each with a type; names and shapes of its parameters
    rows: Callable[..., Table] = lambda shapes, table, num_layers, layout: {}  # see placement.Rule
    modules: tuple[str, ...] = ()  # the last part of the names of those parameters' modules
    normed: Callable[[ModelConfig], int] = lambda c: 0  # numbers per token that its norms read
    # Its class, in the folder's extension.py, unless build.py makes it from a run's settings.
    extension: str | None = None
    is_used: Callable[[ModelConfig], bool] = lambda c: False  # whether a model needs that class
    architectures: Mapping[str, dict] = {}  # rows of runtime/architectures.py
    presets: Mapping[str, dict] = {}  # numbers of published models by their ids on the hub
    # Numbers of a small model of so many layers, in which each kind of layer is, at places that
    # are not the same in two pipeline stages.
    tiny: Callable[[ModelConfig, Layout, int], dict] = lambda c, layout, num_layers: {}
    # What a layer is, where the names of its parameters do not show it.
    kind: Callable[[ModelConfig, int], object] = lambda c, layer: None
