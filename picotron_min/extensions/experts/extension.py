"""Experts: layers with many MLPs, of which a token uses few, divided among ranks."""

from dataclasses import dataclass
from functools import partial
from statistics import fmean

import torch
from torch import Tensor

from picotron_min.context_parallel import POSITIONS
from picotron_min.extension import Extension
from picotron_min.extensions.experts.dispatch import apply_expert_parallel, keep_experts
from picotron_min.extensions.experts.grouped import (
    Float8Stack,
    apply_grouped_experts,
    compute_together,
    has_kernel,
    in_8_bits,
    replace_linears,
)
from picotron_min.extensions.experts.moe import apply_moe, mixtures
from picotron_min.extensions.experts.router import LOSSES, Router, RoutingCounts, force_routing
from picotron_min.extensions.settings import Layout, ModelConfig, Workload
from picotron_min.mesh import Axes
from picotron_min.model import Llama
from picotron_min.placement import Table


@dataclass(eq=False)
class Experts(Extension):
    model_config: ModelConfig
    layout: Layout
    workload: Workload
    axes: Axes
    device: torch.device
    rows: object | None = None  # RowProducts of precision/float8_rows.py

    def __post_init__(self) -> None:
        self.tally = RoutingCounts(self.model_config, self.device)
        self.routers: list[Router] = []

    def swap(self, model: Llama) -> None:
        with torch.device("meta"):
            apply_moe(model, self.workload.routing, self.tally)
        model.to(next(model.parameters()).dtype)
        keep_experts(model, self.axes.ep)

    def connect(self, model: Llama, table: Table) -> None:
        engine, sequence_parallel = self.layout.ep_engine, self.layout.sequence_parallel
        apply_expert_parallel(model, self.axes, engine, sequence_parallel)
        for moe in in_8_bits(model, self.workload):
            replace_linears(moe)

    def wrap(self, model: Llama) -> None:
        dtype, queue = getattr(torch, self.workload.dtype), model.boundary.queue
        is_grouped = has_kernel(self.device, dtype)
        for moe in in_8_bits(model, self.workload):
            has_rows = is_grouped and self.device.type == "cuda"
            options = {"queue": queue, "has_kernel": has_rows, "rows": self.rows}
            compute_together(moe, partial(Float8Stack, **options))
        if is_grouped:  # else the loop of MoE.run remains
            apply_grouped_experts(model, dtype, self.layout.etp, queue)
        routers = [moe.gate for moe in mixtures(model)]
        self.routers += routers
        for bias in model.buffers():  # of routers
            bias.zero_()
        forced = self.workload.routing
        if forced.moe_router_force_load_balancing or forced.moe_router_force_biased:
            S, cp, tp = self.workload.seq_length, self.axes.cp, self.axes.tp
            positions = POSITIONS[self.layout.cp_engine](cp.rank, cp.size, S).to(self.device)
            # The router of a tensor-parallel rank sees a part of the sequence.
            force_routing(routers, S, positions.chunk(tp.size)[tp.rank])

    def begin(self) -> None:
        self.tally.begin()

    def counts(self) -> Tensor:
        return self.tally.table.flatten()

    def measures(self, totals: Tensor) -> dict[str, object]:
        """Means over the layers with experts, and lists of all layers.

        Losses are means over tokens, without their coefficient; None if the coefficient is 0. With
        equal scores a balance loss is 1 however uneven the choices are. Hence `load_imbalance`: the
        tokens of the busiest expert, divided by the mean; and `rank_imbalance`, the rows of the
        busiest ep rank, divided by an even share of all. `dropped` is a share of (token, expert).
        """
        self.routed = totals.view_as(self.tally.table)
        c, ep, routing = self.model_config, self.layout.ep, self.workload.routing
        X, k = c.num_local_experts, c.num_experts_per_tok
        counts, others = self.routed[:, :X], self.routed[:, X:].T
        columns = dict(zip(RoutingCounts.COLUMNS, others, strict=True))
        tokens, measures = columns["tokens"], {}
        of_layers = {n: columns[n] / tokens for n in LOSSES if getattr(routing, LOSSES[n])}
        of_layers["load_imbalance"] = counts.amax(1) / counts.mean(1)
        rows = counts.unflatten(1, (ep, -1)).sum(2)
        of_layers["rank_imbalance"] = rows.amax(1) * ep / (k * tokens)
        of_layers["dropped"] = columns["dropped"] / (k * tokens)
        lists = dict(zip(of_layers, torch.stack([*of_layers.values()]).tolist(), strict=True))
        known = [layer for layer in range(len(counts)) if c.has_experts(layer)]
        for name in LOSSES | of_layers:  # also the losses that are not used
            values = {layer: lists[name][layer] for layer in known if name in lists}
            measures[name] = fmean(values.values()) if values else None
            measures[f"{name}_per_layer"] = [*map(values.get, range(len(counts)))]
        return measures

    def updated(self, totals: Tensor) -> None:
        self.tally.update_biases(self.routers, totals.view_as(self.tally.table))
