"""Sharding: data-parallel ranks divide optimizer state, gradients and weights among them.

A stage's sharded matrices are in units (units.py): of a layer, or of a window of layers, and of
each end of the model. A module gathers its units when it runs, and begins to gather the next ones.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence

import torch
from torch import nn

from picotron_min.extension import Extension
from picotron_min.extensions.settings import Layout, Workload
from picotron_min.extensions.sharding.rows import shard_of, windows
from picotron_min.extensions.sharding.units import ShardedUnit
from picotron_min.mesh import Axes
from picotron_min.model import DecoderLayer, Head, Llama
from picotron_min.placement import Table, saved_name

Units = list[ShardedUnit]


class Sharding(Extension):
    def __init__(
        self, layout: Layout, workload: Workload, axes: Axes, device: torch.device
    ) -> None:
        self.layout, self.kind = layout, (axes, getattr(torch, workload.dtype), device)
        self.units: dict[str, ShardedUnit] = {}  # of all chunks, by the name of the first matrix

    def connect(self, model: Llama, table: Table) -> None:
        """Take the sharded weights out of the modules, into units."""
        tied, modules = model.config.tie_word_embeddings, defaultdict(list)  # by saved name
        for name, _ in model.named_parameters(remove_duplicate=False):
            if shard_of(table[saved := saved_name(name, tied)]):
                modules[saved].append(model.get_submodule(name.removesuffix(".weight")))
        shapes = model.config.parameter_shapes()
        layers = windows([*map(int, model.model.layers)], shapes, self.layout)
        groups = [[f"model.layers.{i}" for i in window] for window in layers]
        travelling = []  # reductions of this chunk
        self.uses = []  # modules in the order of the forward, with the units that each uses
        for names in [["model.embed_tokens"], *groups, ["lm_head"]]:
            users = [model.get_submodule(name) for name in names]
            inside = {module for user in users for module in user.modules()}
            by_sums = defaultdict(dict)  # the gradients of experts are summed over other axes
            for name, of in modules.items():
                if not inside.isdisjoint(of):
                    by_sums[table[name].sums][name] = of
            # Empty where nothing is sharded, or another stage has the module.
            units = [self._unit(group, table, travelling) for group in by_sums.values()]
            self.uses += [(user, units) for user in users if units]

    def _unit(
        self, group: dict[str, list[nn.Module]], table: Table, travelling: list
    ) -> ShardedUnit:
        name, users = next(iter(group.items()))
        if name not in self.units:
            args = table, *self.kind, self.layout.sharding, travelling
            self.units[name] = ShardedUnit(group, *args)
        elif users[0] not in self.units[name].modules[name]:
            # A tied head, and the embedding is in another chunk of this rank, as in a V.
            self.units[name].modules[name].extend(users)
            self.units[name].uses += 1
        return self.units[name]

    def wrap(self, model: Llama) -> None:
        """Last of all extensions: weights must be here before a layer runs again."""
        uses = self.uses
        for i, (module, units) in enumerate(uses):
            # The next units that are others: consecutive layers may share theirs, see `windows`.
            after = next((others for _, others in uses[i:] if others != units), units)
            before = None  # the backward of an embedding, and of lm_head (loss.py), reads no weight
            if isinstance(module, DecoderLayer):
                before = uses[i - 1][1] if i and isinstance(uses[i - 1][0], DecoderLayer) else units
            module.forward = _gathering(module.forward, units, after, before)
            if isinstance(module, Head):  # training calls this instead
                module.loss = _gathering(module.loss, units, after, before)

    def parameters(self) -> dict[str, nn.Parameter]:
        return {name: p for unit in self.units.values() for name, p in unit.masters.items()}

    def gradients(self) -> Sequence[ShardedUnit]:
        return list(self.units.values())

    def weights_changed(self) -> None:
        for unit in self.units.values():
            unit.is_current = False  # the next use gathers again


def _gathering(forward: Callable, units: Units, after: Units, before: Units | None) -> Callable:
    def gather(then: Units) -> None:
        for unit in units + then:  # `then` travels while this module computes
            unit.start()
        for unit in units:
            unit.finish()

    def free(_=None) -> None:
        for unit in units:
            unit.free()

    def gathered(x, *rest):
        gather(after)
        if not units[0].frees:
            return forward(x, *rest)
        if before and x.requires_grad:
            x = x.view_as(x)  # so that this hook runs before one of x, which gathers
            x.register_hook(free)  # backward is through this module: no product needs a weight now
        out = forward(x, *rest)
        free()
        if before and out.requires_grad:
            out.register_hook(lambda _: gather(before))  # backward has come to this module
        return out

    return gathered
