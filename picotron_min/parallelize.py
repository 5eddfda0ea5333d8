"""Build one rank's model: from a plain Llama, in the order in which the parallelisms must come.

    on the meta device, without memory:
        Llama -> keep my stage -> narrow matrices -> tensor parallel -> context parallel
    then:
        allocate -> bfloat16 copies -> recompute, compile -> gradient buckets -> pipeline

So no rank ever allocates a weight that it does not own. The weights themselves are filled in
afterwards: drawn (initialise.py), read from Hugging Face's files, or loaded (checkpoint.py).

This is the only file of the course that knows all parallelisms.
"""

from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from picotron_min.block_attention import SOFTMAX, choose_attention
from picotron_min.checkpoint import parts_of_whole
from picotron_min.context_parallel import POSITIONS, apply_context_parallel
from picotron_min.costs import layers_of_stages
from picotron_min.data_parallel import GradientBuckets
from picotron_min.layout import Layout, Workload
from picotron_min.linear import (
    WeightGradients,
    apply_copies,
    apply_queue,
    linears,
    refresh_copies,
)
from picotron_min.loss import stripe_loss
from picotron_min.mesh import Axes
from picotron_min.model import Head, Llama, SoftmaxAttention
from picotron_min.model_config import ModelConfig
from picotron_min.optimizer import squared_norm
from picotron_min.pipeline_parallel import Chunk, Pipeline, Stage, keep_stage, my_stages
from picotron_min.pipeline_schedule import Plan
from picotron_min.pipeline_simulator import build_plans
from picotron_min.placement import Placement, part, placements, saved_name
from picotron_min.tensor_parallel import apply_tensor_parallel


@dataclass(frozen=True)
class ParallelModel:
    """One rank's part of a model, and what runs it."""

    axes: Axes
    shapes: dict[str, tuple[int, ...]]  # of all whole parameters, by saved name
    placements: dict[str, Placement]  # of all parameters
    parameters: dict[str, nn.Parameter]  # of this rank, by saved name
    pipeline: Pipeline  # its chunks have the modules
    plan: Plan  # what this rank does in a step
    eval_plan: Plan
    buckets: list[GradientBuckets]
    autocast: Callable[[], AbstractContextManager]  # forward and backward run in it

    def begin_step(self, num_micro_batches: int) -> None:
        """Zero the gradients, and copy the weights that the last update has changed."""
        for buckets in self.buckets:
            buckets.begin(num_micro_batches)
        self.refresh_copies()

    def refresh_copies(self) -> None:
        for chunk in self.pipeline.chunks:
            refresh_copies(chunk.model)

    def wait_for_gradients(self) -> None:
        """Return when every gradient is the sum over all ranks that see other tokens."""
        for buckets in self.buckets:
            buckets.wait()

    def scale_gradients(self, factor: float) -> None:
        for buckets in self.buckets:
            buckets.scale(factor)

    def counted_once(self, totals: Tensor) -> Tensor:
        """The pipeline's totals where they count. Tensor-parallel ranks all have the same loss."""
        return totals if self.axes.tp.rank == 0 else torch.zeros_like(totals)

    def parts_of_whole(self, tensors: dict[str, Tensor]) -> dict[str, DTensor]:
        """Declare of tensors, named as in a checkpoint, which parts of the whole ones they are."""
        return parts_of_whole(tensors, self.shapes, self.placements, self.axes)

    def squared_norm(self) -> Tensor:
        """This rank's share of the gradient's squared norm, [] in float64."""
        return squared_norm(self.parameters, self.placements, self.axes.ranks)


def parallelize(
    model_config: ModelConfig,
    layout: Layout,
    workload: Workload,
    axes: Axes,
    device: torch.device,
) -> ParallelModel:
    """Build this rank's part of a model; its weights are still to be filled in."""
    tied, S = model_config.tie_word_embeddings, workload.seq_length
    table = placements(model_config.parameter_shapes(), layout, tied)
    num_layers = layers_of_stages(model_config, layout, S)
    chunks = [
        Chunk(stage, build_stage(model_config, layout, workload, axes, table, device, stage))
        for stage in my_stages(num_layers, layout.pp_engine, axes.pp)
    ]
    sizes = (layout.pp, workload.num_micro_batches, layout.pp_chunks)
    parameters = {
        saved_name(name, tied): parameter
        for chunk in chunks
        for name, parameter in chunk.model.named_parameters()
    }
    local_S = S // layout.cp // (layout.tp if layout.sequence_parallel else 1)
    shape = (workload.micro_batch_size, local_S, model_config.hidden_size)
    dtype = next(iter(parameters.values())).dtype  # of the residual stream
    return ParallelModel(
        axes=axes,
        shapes=model_config.parameter_shapes(),
        placements=table,
        parameters=parameters,
        pipeline=Pipeline(
            chunks,
            axes.pp,
            positions=POSITIONS[layout.cp_engine](axes.cp.rank, layout.cp, S).to(device),
            new_activation=partial(torch.empty, shape, dtype=dtype, device=device),
        ),
        plan=build_plans(layout.pp_engine, *sizes)[axes.pp.rank],
        eval_plan=build_plans(layout.pp_engine, *sizes, training=False)[axes.pp.rank],
        buckets=[buckets for chunk in chunks for buckets in build_buckets(chunk, table, axes)],
        autocast=partial(
            torch.autocast, device.type, torch.bfloat16, enabled=workload.dtype == "bfloat16"
        ),
    )


def build_stage(
    model_config: ModelConfig,
    layout: Layout,
    workload: Workload,
    axes: Axes,
    table: dict[str, Placement],
    device: torch.device,
    stage: Stage,
) -> Llama:
    """One stage of the model, allocated and not initialised."""
    with torch.device("meta"):
        model = Llama(model_config)
    model.to(torch.float64 if workload.dtype == "float64" else torch.float32)
    attention, kernel = SoftmaxAttention, SOFTMAX
    if workload.flash_attention:
        on_gpu = device.type == "cuda"
        capability = torch.cuda.get_device_capability(device) if on_gpu else (0, 0)
        dtype, head_dim = getattr(torch, workload.dtype), model_config.head_dim
        attention, kernel = choose_attention(device.type, capability, dtype, head_dim)
    for layer in model.model.layers.values():
        layer.self_attn.core_attention = attention()
    keep_stage(model, stage)
    narrow(model, table, axes)
    queue = WeightGradients()
    apply_tensor_parallel(model, axes.tp, layout.sequence_parallel, queue)
    apply_context_parallel(model, axes.cp, layout.cp_engine, kernel)
    model.to_empty(device=device)
    model.tie_weights()
    if workload.dtype == "bfloat16":
        apply_copies(model, torch.bfloat16)
    if not workload.compile or queue.hold:
        # With nothing to wait for, a compiled layer is one graph, with autograd's own products.
        apply_queue(model, queue)
    apply_recompute(model, workload.recompute, workload.compile)
    if workload.compile:
        apply_compile(model)
    return model


def narrow(model: Llama, table: dict[str, Placement], axes: Axes) -> None:
    """Replace the parameters of a model on the meta device by this rank's parts of them."""
    tied = model.config.tie_word_embeddings
    for name, parameter in list(model.named_parameters()):
        cuts = table[saved_name(name, tied)].cuts
        slices = part(parameter.shape, cuts, axes.ranks, axes.sizes)
        shape = [s.stop - s.start for s in slices]
        module = model.get_submodule(name.removesuffix(".weight"))
        module.weight = nn.Parameter(parameter.new_empty(shape))
    model.tie_weights()


def build_buckets(chunk: Chunk, table: dict[str, Placement], axes: Axes) -> list[GradientBuckets]:
    """Gradient buckets for each choice of axes that gradients are summed over."""
    tied, by_axes = chunk.model.config.tie_word_embeddings, defaultdict(dict)
    for name, parameter in chunk.model.named_parameters():
        by_axes[table[saved_name(name, tied)].sums][name] = parameter
    all_buckets = []
    for names, parameters in by_axes.items():
        axis, *then = (getattr(axes, name) for name in names)
        all_buckets.append(GradientBuckets(parameters, axis, then))
        for name, linear in linears(chunk.model).items():
            if f"{name}.weight" in parameters:
                linear.gradient_arrived = partial(all_buckets[-1].arrived, f"{name}.weight")
    return all_buckets


def apply_recompute(model: Llama, recompute: str, compiles: bool = False) -> None:
    """Trade compute for memory: run parts of the forward again in backward instead of saving them.

    "full" keeps only each layer's input, [B, S, E]; "selective" recomputes the attention sublayer
    (projections, rotary embedding, attention) and saves the rest; "none" saves everything.
    Source: Chen et al. 2016, section 4. Selective is coarser than Korthikanti et al. 2022, section
    5, who keep q, k and v: fused attention has little to recompute but them.
    """
    parts = {
        "none": [],
        "selective": [layer.self_attn for layer in model.model.layers.values()],
        "full": list(model.model.layers.values()),
    }[recompute]
    for module in parts:
        # torch.compile runs a recomputed part as it is unless it is a single graph, and messages
        # break graphs. So the part is compiled by itself; in one process that changes nothing.
        forward = torch.compile(module.forward, dynamic=False) if compiles else module.forward
        module.forward = _recomputed(forward)


def _recomputed(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    # Nothing in it is random: there is no state of a generator to save.
    return lambda *args: checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False)


def apply_compile(model: Llama) -> None:
    """Fuse what lies between the matmuls of each layer, and the loss, with torch.compile.

    All layers share the graph of one. Shapes never change in a run, so kernels are made for them.
    """
    for layer in model.model.layers.values():
        layer.compile(dynamic=False)
    if isinstance(model.lm_head, Head):
        model.lm_head.stripe_loss = torch.compile(stripe_loss, dynamic=False)
