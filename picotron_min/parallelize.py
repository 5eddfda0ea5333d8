"""Parallelize: one rank's model is built from a plain Llama, in the only order that works.

    on the meta device, without memory:    Llama -> keep my stage -> narrow matrices
                                           -> tensor parallel -> context parallel
    then:                                  allocate -> gradient buckets -> pipeline

So no rank ever allocates a weight that it does not own. The weights are filled in afterwards:
initialised (initialise.py) or loaded (checkpoint.py). Extensions add their parts: see extension.py.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from picotron_min.attention import SOFTMAX, Kernel, SoftmaxAttention
from picotron_min.checkpoint import parts_of_whole
from picotron_min.context_parallel import apply_context_parallel
from picotron_min.costs import layers_of_stages
from picotron_min.data_parallel import build_buckets
from picotron_min.extension import Extension, Gradients
from picotron_min.layout import Layout, Workload
from picotron_min.mesh import Axes
from picotron_min.model import Llama
from picotron_min.model_config import ModelConfig
from picotron_min.pipeline_messages import build_plans
from picotron_min.pipeline_parallel import Chunk, Pipeline, keep_stage, my_stages, tie_ends
from picotron_min.pipeline_schedule import Plan
from picotron_min.placement import Table, placements, saved_name
from picotron_min.tensor_parallel import apply_tensor_parallel, narrow


class Parts(NamedTuple):
    """What is chosen once, when a run is built, so that no forward has a switch."""

    tensor_parallel: Callable[[Llama, Axes], None]
    attention: type[nn.Module] = SoftmaxAttention  # to a whole sequence
    kernel: Kernel = SOFTMAX  # of one block of ring attention
    pipeline: type[Pipeline] = Pipeline


def simple_parts(layout: Layout) -> Parts:
    """Those that are written in the core."""
    sequence_parallel = layout.sequence_parallel
    return Parts(lambda model, axes: apply_tensor_parallel(model, axes.tp, sequence_parallel))


@dataclass(frozen=True)
class ParallelModel:
    """One rank's part of a model, and what runs it."""

    axes: Axes
    placements: Table  # of all parameters, by saved name
    parameters: dict[str, nn.Parameter]  # of this rank, by saved name
    parts_of_whole: Callable[[dict[str, Tensor]], dict[str, DTensor]]  # as in checkpoint.py
    pipeline: Pipeline  # its chunks have the modules
    plan: Plan  # what this rank does in a step
    eval_plan: Plan
    gradients: list[Gradients]
    autocast: Callable[[], AbstractContextManager]  # forward and backward run in it
    extensions: Sequence[Extension]

    @cached_property
    def buffers(self) -> dict[str, Tensor]:
        """What is saved beside the parameters, by saved name."""
        return {n: b for c in self.pipeline.chunks for n, b in c.model.named_buffers()}

    def weights_changed(self) -> None:
        """To be called after an update or a load."""
        for extension in self.extensions:
            extension.weights_changed()

    def counts(self) -> list[Tensor]:
        """What extensions have counted in a step, one flat tensor each."""
        return [extension.counts().to(self.axes.world.device) for extension in self.extensions]

    def each_with(self, totals: Tensor) -> Iterator[tuple[Extension, Tensor]]:
        """Every extension with its part of the totals of all counts."""
        parts = totals.split([len(extension.counts()) for extension in self.extensions])
        return zip(self.extensions, parts, strict=True)

    def counted_once(self, totals: Tensor) -> Tensor:
        """The pipeline's totals where they count. Tensor-parallel ranks all have the same loss."""
        return totals if self.axes.tp.rank == 0 else torch.zeros_like(totals)


def parallelize(
    model_config: ModelConfig,
    layout: Layout,
    workload: Workload,
    axes: Axes,
    device: torch.device,
    parts: Parts,
    extensions: Sequence[Extension] = (),
) -> ParallelModel:
    """Build this rank's part of a model; its weights are still to be filled in."""
    shapes = model_config.parameter_shapes() | model_config.buffer_shapes()
    tied, S = model_config.tie_word_embeddings, workload.seq_length
    num_layers = layers_of_stages(model_config, layout, S)
    table = placements(shapes, layout, tied, num_layers)
    dtype = getattr(torch, workload.dtype)
    wide = torch.promote_types(dtype, torch.float32)  # weights are never less precise
    chunks = []
    for stage in my_stages(num_layers, layout.schedule, axes.pp):
        with torch.device("meta"):  # shapes without memory
            model = Llama(model_config).to(wide)
        keep_stage(model, stage)  # layers of other stages are deleted
        build_stage(model, layout, table, axes, device, parts, extensions)
        chunks.append(Chunk(stage, model))
    tie_ends(chunks)
    models = [chunk.model for chunk in chunks]
    parameters = {saved_name(n, tied): p for model in models for n, p in model.named_parameters()}
    gradients = build_buckets(models, table, axes)
    for extension in extensions:
        parameters |= extension.parameters()
        gradients += extension.gradients()

    pieces = layout.cp * (layout.tp if layout.sequence_parallel else 1)  # of a sequence
    shape = workload.micro_batch_size, S // pieces, model_config.hidden_size
    activation = partial(torch.empty, shape, dtype=wide, device=device)  # of the residual stream
    sizes = layout.schedule, layout.pp, workload.num_micro_batches, layout.pp_chunks
    in_bfloat16 = dtype == torch.bfloat16
    return ParallelModel(
        axes=axes,
        placements=table,
        parameters=parameters,
        parts_of_whole=partial(parts_of_whole, shapes=shapes, placements=table, axes=axes),
        pipeline=parts.pipeline(chunks, axes.pp, device, activation),
        plan=build_plans(*sizes)[axes.pp.rank],
        eval_plan=build_plans(*sizes, training=False)[axes.pp.rank],
        gradients=gradients,
        autocast=partial(torch.autocast, device.type, torch.bfloat16, enabled=in_bfloat16),
        extensions=extensions,
    )


def build_stage(
    model: Llama,
    layout: Layout,
    table: Table,
    axes: Axes,
    device: torch.device,
    parts: Parts,
    extensions: Sequence[Extension],
) -> None:
    """Give a stage on the meta device the parts of this rank, and memory for them, in place."""
    for extension in extensions:
        extension.swap(model)
    narrow(model, table, axes)  # matrices become the rows or columns of this rank
    parts.tensor_parallel(model, axes)
    for layer in model.model.layers.values():
        layer.self_attn.core_attention = parts.attention()
    apply_context_parallel(model, axes.cp, layout.cp_engine, parts.kernel)
    for extension in extensions:
        extension.connect(model, table)
    model.to_empty(device=device)  # from here on there is memory, for this rank's parts alone
    model.tie_weights()  # `to_empty` has untied them
    for extension in extensions:
        extension.wrap(model)
