"""Sharding: data-parallel ranks divide optimizer state, gradients and weights among them."""

from collections.abc import Sequence

import torch
from torch import nn

from picotron_min.costs import layers_of_stages
from picotron_min.extension import Extension
from picotron_min.extensions.settings import Layout, ModelConfig, Workload
from picotron_min.extensions.sharding.units import ShardedUnit, apply_sharding, build_units
from picotron_min.mesh import Axes
from picotron_min.model import Llama
from picotron_min.placement import placements


class Sharding(Extension):
    def __init__(
        self,
        model_config: ModelConfig,
        layout: Layout,
        workload: Workload,
        axes: Axes,
        device: torch.device,
    ) -> None:
        shapes = model_config.parameter_shapes() | model_config.buffer_shapes()
        num_layers = layers_of_stages(model_config, layout, workload.seq_length)
        table = placements(shapes, layout, model_config.tie_word_embeddings, num_layers)
        self.settings = layout, table, axes, getattr(torch, workload.dtype), device
        self.units: dict[str, ShardedUnit] = {}

    def connect(self, model: Llama) -> None:
        self.uses = build_units(model, *self.settings, self.units)  # takes weights out

    def wrap(self, model: Llama) -> None:
        apply_sharding(self.uses)  # last: weights must be here before a layer runs again

    def parameters(self) -> dict[str, nn.Parameter]:
        return {name: p for unit in self.units.values() for name, p in unit.masters.items()}

    def gradients(self) -> Sequence[ShardedUnit]:
        return list(self.units.values())

    def weights_changed(self) -> None:
        for unit in self.units.values():
            unit.invalidate()
