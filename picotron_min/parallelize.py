"""Build one rank's model: from a plain Llama, in the order in which the parallelisms must come.

    on the meta device, without memory:
        Llama -> keep my stage -> narrow matrices -> queue of weight gradients -> tensor parallel
        -> FP8 -> context parallel -> shard
    then:
        allocate -> bfloat16 copies -> recompute, compile, offload -> gradient buckets -> pipeline

So no rank ever allocates a weight that it does not own. The weights are filled in afterwards: drawn
(initialise.py) or loaded (checkpoint.py). Only this file of the course knows all parallelisms.
"""

from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from picotron_min.attention import SOFTMAX, choose_attention
from picotron_min.checkpoint import parts_of_whole
from picotron_min.collectives import Axis
from picotron_min.context_parallel import POSITIONS, apply_context_parallel
from picotron_min.costs import layers_of_stages
from picotron_min.data_parallel import GradientBuckets
from picotron_min.extensions.experts.dispatch import apply_expert_parallel, keep_experts
from picotron_min.extensions.experts.grouped import apply_grouped_experts
from picotron_min.extensions.experts.moe import apply_moe
from picotron_min.extensions.experts.router import Router, Tally, apply_forced_balance
from picotron_min.extensions.linear import (
    Linear,
    WeightGradients,
    apply_copies,
    apply_queue,
    linears,
)
from picotron_min.extensions.memory.offload import apply_offload
from picotron_min.extensions.overlap.ring import RingBoundary
from picotron_min.extensions.precision.float8_linear import apply_float8
from picotron_min.extensions.schedules.simulator import build_plans
from picotron_min.extensions.sharding.units import ShardedUnit, apply_sharding, build_units
from picotron_min.layout import Layout, Workload
from picotron_min.mesh import Axes
from picotron_min.model import Head, Llama, SoftmaxAttention
from picotron_min.model_config import ModelConfig
from picotron_min.pipeline_action import Plan
from picotron_min.pipeline_parallel import Chunk, Pipeline, keep_stage, my_stages
from picotron_min.pipeline_schedule import SCHEDULES
from picotron_min.placement import Placement, part, placements, saved_name
from picotron_min.tensor_parallel import Boundary, SequenceBoundary, apply_tensor_parallel

Context = Callable[[], AbstractContextManager]


@dataclass(frozen=True)
class ParallelModel:
    """One rank's part of a model, and what runs it."""

    axes: Axes
    placements: dict[str, Placement]  # of all parameters, by saved name
    parameters: dict[str, nn.Parameter]  # of this rank, by saved name
    tally: Tally  # what the routers count in a step
    parts_of_whole: Callable[[dict[str, Tensor]], dict[str, DTensor]]  # as in checkpoint.py
    pipeline: Pipeline  # its chunks have the modules
    plan: Plan  # what this rank does in a step
    eval_plan: Plan
    buckets: list[GradientBuckets | ShardedUnit]  # what holds the gradients
    autocast: Context  # forward and backward run in it

    @cached_property
    def modules(self) -> list[nn.Module]:
        return [module for chunk in self.pipeline.chunks for module in chunk.model.modules()]

    @cached_property
    def linears(self) -> list[Linear]:
        """Those whose weight is not sharded."""
        sharded = {m for unit in self.units for users in unit.modules.values() for m in users}
        return [m for m in self.modules if isinstance(m, Linear) and m not in sharded]

    @cached_property
    def routers(self) -> list[Router]:
        return [m for m in self.modules if isinstance(m, Router)]

    @cached_property
    def buffers(self) -> dict[str, Tensor]:
        """The biases of routers, by saved name."""
        return {n: b for c in self.pipeline.chunks for n, b in c.model.named_buffers()}

    @cached_property
    def units(self) -> list[ShardedUnit]:
        return [unit for unit in self.buckets if isinstance(unit, ShardedUnit)]

    def weights_changed(self) -> None:
        """To be called after an update or a load: what is computed with is of the new weights."""
        for linear in self.linears:
            linear.refresh()  # copies or bytes of the weights
        for unit in self.units:
            unit.forget()  # and gathered when it is used

    def counted_once(self, totals: Tensor) -> Tensor:
        """The pipeline's totals where they count. Tensor-parallel ranks all have the same loss."""
        return totals if self.axes.tp.rank == 0 else torch.zeros_like(totals)


def parallelize(
    model_config: ModelConfig, layout: Layout, workload: Workload, axes: Axes, device: torch.device
) -> ParallelModel:
    """Build this rank's part of a model; its weights are still to be filled in."""
    shapes = model_config.parameter_shapes() | model_config.buffer_shapes()
    tied, S = model_config.tie_word_embeddings, workload.seq_length
    num_layers = layers_of_stages(model_config, layout, S)
    table = placements(shapes, layout, tied, num_layers)
    tally, chunks, units = Tally(model_config, device), [], {}
    for stage in my_stages(num_layers, layout.pp_engine, axes.pp):
        with torch.device("meta"):  # shapes without memory
            model = Llama(model_config)
            apply_moe(model, workload.routing, tally)
        keep_stage(model, stage)  # layers of other stages are deleted
        keep_experts(model, axes.ep)  # and experts of other ranks
        narrow(model, table, axes)  # matrices become the rows or columns of this rank
        queue = apply_layout(model, layout, workload, table, axes, device, tally, units)
        chunks.append(Chunk(stage, model, queue))
    tie_ends(chunks)
    parameters = {saved_name(n, tied): p for c in chunks for n, p in c.model.named_parameters()}
    buckets = build_buckets(chunks, table, axes)
    for unit in units.values():
        parameters |= unit.masters  # their weights are in no chunk yet

    dtype = next(iter(parameters.values())).dtype  # of the residual stream, which travels
    pieces = layout.cp * (layout.tp if layout.sequence_parallel else 1)  # of a sequence
    shape = workload.micro_batch_size, S // pieces, model_config.hidden_size
    activation = partial(torch.empty, shape, dtype=dtype, device=device)
    positions = POSITIONS[layout.cp_engine](axes.cp.rank, layout.cp, S).to(device)
    if workload.routing.moe_router_force_load_balancing:
        for chunk in chunks:  # the router of a tensor-parallel rank sees a part of the sequence
            apply_forced_balance(chunk.model, S, positions.chunk(layout.tp)[axes.tp.rank])
    sizes = layout.pp, workload.num_micro_batches, layout.pp_chunks
    in_bfloat16 = workload.dtype == "bfloat16"
    return ParallelModel(
        axes=axes,
        placements=table,
        parameters=parameters,
        tally=tally,
        parts_of_whole=partial(parts_of_whole, shapes=shapes, placements=table, axes=axes),
        pipeline=Pipeline(chunks, axes.pp, positions, activation),
        plan=build_plans(layout.pp_engine, *sizes)[axes.pp.rank],
        eval_plan=build_plans(layout.pp_engine, *sizes, training=False)[axes.pp.rank],
        buckets=[*buckets, *units.values()],
        autocast=partial(torch.autocast, device.type, torch.bfloat16, enabled=in_bfloat16),
    )


def narrow(model: Llama, table: dict[str, Placement], axes: Axes) -> None:
    """Replace the parameters of a model on the meta device by this rank's parts of them."""
    tied = model.config.tie_word_embeddings
    for name, parameter in list(model.named_parameters()):
        slices = part(parameter.shape, table[saved_name(name, tied)].cuts, axes.ranks, axes.sizes)
        mine = parameter.new_empty([s.stop - s.start for s in slices])
        model.get_submodule(name.removesuffix(".weight")).weight = nn.Parameter(mine)
    model.tie_weights()


def apply_layout(
    model: Llama,
    layout: Layout,
    workload: Workload,
    table: dict[str, Placement],
    axes: Axes,
    device: torch.device,
    tally: Tally,
    units: dict[str, ShardedUnit],
) -> WeightGradients:
    """Apply the parallelisms to a stage on the meta device, allocate it, and set its precision.

    Returns the queue of its linears; adds to the sharded `units` of this rank, by name.
    """
    dtype, queue = getattr(torch, workload.dtype), WeightGradients()
    queue.split = SCHEDULES[layout.pp_engine].splits_backward
    queue.hold = layout.tp > 1  # until a message travels
    model.to(torch.promote_types(dtype, torch.float32))  # the weights are never less precise
    if not workload.compile or queue.waits:  # with nothing to wait for, a compiled layer is
        apply_queue(model, queue)  # one graph, with autograd's own products
    boundary = build_boundary(layout, axes.tp, queue)
    apply_tensor_parallel(model, boundary)  # after the queue
    if workload.fp8:
        in_fp8 = partial(workload.in_fp8, num_layers=model.config.num_hidden_layers)
        apply_float8(model, boundary, in_fp8, device.type, dtype, workload.compile)
    attention, kernel = SoftmaxAttention, SOFTMAX
    if workload.flash_attention:
        capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
        attention, kernel = choose_attention(device.type, capability, dtype, model.config.head_dim)
    for layer in model.model.layers.values():
        layer.self_attn.core_attention = attention()
    apply_context_parallel(model, axes.cp, layout.cp_engine, kernel)
    apply_expert_parallel(model, axes, layout.ep_engine, layout.sequence_parallel)
    uses = build_units(model, layout, table, axes, dtype, device, units)  # takes weights out
    model.to_empty(device=device)  # from here on there is memory, for this rank's parts alone
    for buffer in model.buffers():
        buffer.zero_()  # the biases of routers
    model.tie_weights()  # allocating has parted them
    if dtype == torch.bfloat16:  # sharded weights are gathered in it
        apply_copies(model, dtype)  # to compute with; the optimizer updates float32
    apply_grouped_experts(model, dtype, layout.etp, queue)
    counts = tally.paused if tally.num_experts else None  # in what runs again
    apply_recompute(model, workload.recompute, workload.compile, counts)
    if workload.compile:
        apply_compile(model)
    apply_offload(model, workload.offload, device.type)
    apply_sharding(uses)
    return queue


def build_boundary(layout: Layout, axis: Axis, queue: WeightGradients) -> Boundary:
    """What tensor-parallel ranks do between sublayers; nothing, where a rank is alone."""
    kind = Boundary
    if layout.sequence_parallel and axis.size > 1:
        kind = RingBoundary if layout.tp_overlap else SequenceBoundary
    return kind(axis, queue)


def tie_ends(chunks: list[Chunk]) -> None:
    """Make both embeddings one parameter where two chunks of this rank have them, as in a V."""
    first, last = chunks[0], chunks[-1]
    if first.model.config.tie_word_embeddings and first.stage.is_first and last.stage.is_last:
        last.model.lm_head.weight = first.model.model.embed_tokens.weight


def build_buckets(
    chunks: list[Chunk], table: dict[str, Placement], axes: Axes
) -> list[GradientBuckets]:
    """For each chunk, gradient buckets for each choice of axes that gradients are summed over."""
    uses = Counter(p for chunk in chunks for p in chunk.model.parameters())
    all_buckets, has_bucket = [], set()
    for chunk in chunks:
        tied, by_axes = chunk.model.config.tie_word_embeddings, defaultdict(dict)
        for name, parameter in chunk.model.named_parameters():
            if parameter not in has_bucket:  # of an earlier chunk
                by_axes[table[saved_name(name, tied)].sums][name] = parameter
                has_bucket.add(parameter)
        for names, parameters in by_axes.items():
            axis, *then = (getattr(axes, name) for name in names)
            times = {name: uses[parameter] for name, parameter in parameters.items()}
            all_buckets.append(GradientBuckets(parameters, axis, then, uses=times))
            for name, linear in linears(chunk.model).items():
                if f"{name}.weight" in parameters:
                    linear.gradient_arrived = partial(all_buckets[-1].arrived, f"{name}.weight")
    return all_buckets


def apply_recompute(
    model: Llama, recompute: str, compiles: bool = False, context: Context | None = None
) -> None:
    """Trade compute for memory: run parts of the forward again in backward instead of saving them.

    What runs again does so within `context()`, if one is given.

    Source: Chen et al. 2016, section 4. Selective is coarser than Korthikanti et al. 2022, section
    5, who keep q, k and v: fused attention has little to recompute but them.
    """
    layers = list(model.model.layers.values())
    # full: only each layer's input is kept, [B, S, E]; selective: attention with its projections
    parts = {"none": [], "selective": [layer.self_attn for layer in layers], "full": layers}
    for module in parts[recompute]:
        # torch.compile runs a recomputed part as it is unless it is a single graph, and messages
        # break graphs. So the part is compiled by itself; in one process that changes nothing.
        forward = torch.compile(module.forward, dynamic=False) if compiles else module.forward
        module.forward = _recomputed(forward, context)


def _recomputed(forward: Callable[..., Tensor], context: Context | None) -> Callable[..., Tensor]:
    options = {"use_reentrant": False, "preserve_rng_state": False}  # nothing in it is random
    if context:
        options["context_fn"] = lambda: (nullcontext(), context())  # for the first run, the repeat
    return lambda *args: checkpoint(forward, *args, **options)  # torch.compile breaks at a partial


def apply_compile(model: Llama) -> None:
    """Fuse what lies between the matmuls of each layer, and the loss, with torch.compile."""
    for layer in model.model.layers.values():  # all share the graph of one
        # Shapes never change in a run: kernels are made for them.
        layer.forward = torch.compile(layer.forward, dynamic=False)
    if isinstance(model.lm_head, Head):
        model.lm_head.stripe_loss = torch.compile(model.lm_head.stripe_loss, dynamic=False)
