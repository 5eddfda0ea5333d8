"""Experts: layers with many MLPs, of which a token uses few, divided among ranks."""

import torch
from torch import Tensor

from picotron_min.context_parallel import POSITIONS
from picotron_min.extension import Extension
from picotron_min.extensions.experts.balance import measure_balance
from picotron_min.extensions.experts.dispatch import apply_expert_parallel, keep_experts
from picotron_min.extensions.experts.float8_experts import (
    in_8_bits,
    replace_linears,
    run_in_8_bits,
)
from picotron_min.extensions.experts.grouped import apply_grouped_experts, has_kernel
from picotron_min.extensions.experts.moe import apply_moe, mixtures
from picotron_min.extensions.experts.router import Router, RoutingCounts, force_routing
from picotron_min.extensions.settings import Layout, ModelConfig, Workload
from picotron_min.mesh import Axes
from picotron_min.model import Llama
from picotron_min.placement import Table


class Experts(Extension):
    def __init__(
        self,
        model_config: ModelConfig,
        layout: Layout,
        workload: Workload,
        axes: Axes,
        device: torch.device,
        rows=None,
    ) -> None:
        """`rows`: products in 8 bits, see float8_experts.py; None: there are none."""
        self.rows = rows
        self.model_config, self.layout, self.workload = model_config, layout, workload
        self.axes, self.device = axes, device
        self.tally = RoutingCounts(model_config, device)
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
            run_in_8_bits(moe, queue, dtype, self.rows, has_rows)
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
        self.routed = totals.view_as(self.tally.table)
        ep, routing = self.layout.ep, self.workload.routing
        return measure_balance(self.routed, self.model_config, routing, ep)

    def updated(self, totals: Tensor) -> None:
        self.tally.update_biases(self.routers, totals.view_as(self.tally.table))
