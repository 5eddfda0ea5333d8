"""Peers: the same train step by torch and transformers, with the same weights on the same tokens.

All but `transformers_model` train our model class, so that only what a row is about differs.
"""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed.tensor.parallel as torch_tp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

from benchmarks.common import Done, Step, initial_weights
from benchmarks.ours import CPU, Place
from picotron_min.collectives import Axis, all_reduce
from picotron_min.costs import layers_of_stages
from picotron_min.data import Batch
from picotron_min.extensions.settings import Recipe
from picotron_min.model import Llama
from picotron_min.optimizer import build_optimizer
from picotron_min.pipeline_parallel import Stage, keep_stage, my_stages
from picotron_min.runtime.architectures import to_hf

Parameters = list[nn.Parameter]


def train_loop(
    place: Place,
    model: nn.Module,
    accumulate: Callable[[int], Tensor],
    clip: Callable[[Parameters, float], Tensor] = clip_grad_norm_,
    optimize: Callable[[Parameters, Recipe], Optimizer] = build_optimizer,
) -> Step:
    """The usual step around `accumulate`, which fills the gradients in and returns the loss."""
    parameters, axes = list(model.parameters()), place.axes
    optimizer, limit = optimize(parameters, place.config.recipe), place.config.training.grad_clip

    def step(index: int) -> Done:
        for parameter in parameters:
            parameter.grad = None
        loss = accumulate(index)
        norm = clip(parameters, limit)
        optimizer.step()
        all_reduce(loss, axes.pp)  # zero on all stages but the last
        all_reduce(loss, axes.dp_cp)
        return Done(loss.item() / axes.dp_cp.size, norm.item())

    return step


def our_loss(model: nn.Module, batch: Batch, positions: Tensor) -> Tensor:
    return model(batch.tokens, positions, batch.targets) / batch.num_targets


def eager_loop(
    place: Place,
    model: nn.Module,
    mean_loss: Callable[[nn.Module, Batch, Tensor], Tensor] = our_loss,
    **options: Callable,
) -> Step:
    """One micro-batch after another; DDP sends gradients only after the last."""
    data, count = place.data, place.data.num_micro_batches
    accumulating = getattr(model, "no_sync", nullcontext)

    def accumulate(index: int) -> Tensor:
        total = torch.zeros(())
        for i in range(count):
            with nullcontext() if i == count - 1 else accumulating():
                loss = mean_loss(model, data.batch(index, i), data.positions) / count
                loss.backward()
            total += whole(loss.detach())
        return total

    return train_loop(place, model, accumulate, **options)


def plain_llama(place: Place) -> Llama:
    model = Llama(place.model_config)
    fill(model, place)
    return model


def transformers_model(place: Place) -> Step:
    """Hugging Face's model and loss, SDPA attention, in the eager loop that its users write."""
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**to_hf(place.model_config)))
    fill(model, place)
    return eager_loop(place, model, transformers_loss)


def fill(model: nn.Module, place: Place) -> None:
    """Copy the weights that all contenders start from, one at a time: memory is measured."""
    parameters = dict(model.named_parameters())
    for name, weight in initial_weights(place.model_config, place.config.training.seed):
        its_place(name, parameters).data.copy_(weight)


def its_place(name: str, parameters: dict[str, nn.Parameter]) -> Tensor:
    """Where a weight is: transformers stacks experts, and the first two matrices of each."""
    block, is_expert, rest = name.partition(".experts.")
    if not is_expert:
        return parameters[name]
    expert, kind, _ = rest.split(".")
    if kind == "down_proj":
        return parameters[f"{block}.experts.down_proj"][int(expert)]
    gate, up = parameters[f"{block}.experts.gate_up_proj"][int(expert)].chunk(2)
    return gate if kind == "gate_proj" else up


def transformers_loss(model: nn.Module, batch: Batch, positions: Tensor) -> Tensor:
    # Our targets are shifted already. Without a cache: generation needs one, training does not.
    targets = batch.targets
    return model(batch.tokens, labels=targets, shift_labels=targets, use_cache=False).loss


def torch_ddp(place: Place, views: bool = False, **options: Callable) -> Step:
    model, group = plain_llama(place), place.axes.dp_cp.group
    model = DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=views)
    return eager_loop(place, model, **options)


def zero_redundancy(parameters: Parameters, recipe: Recipe, views: bool = False) -> Optimizer:
    """AdamW whose state is divided: each rank updates some parameters, and broadcasts them."""
    from torch.distributed.optim import ZeroRedundancyOptimizer  # compiles functions, and warns

    groups = build_optimizer(parameters, recipe).param_groups
    return ZeroRedundancyOptimizer(groups, torch.optim.AdamW, parameters_as_bucket_view=views)


def torch_fsdp(place: Place) -> Step:
    """FSDP2: each layer by itself, the embedding and lm_head together."""
    model, mesh = plain_llama(place), DeviceMesh.from_group(place.axes.dp_cp.group, "cpu")
    for module in (*model.model.layers.values(), model):
        fully_shard(module, mesh=mesh)
    return eager_loop(place, model, clip=clip_parts)


def torch_tensor_parallel(place: Place) -> Step:
    """torch's own plan, and the loss that torch has for split logits."""
    rows, columns, gather = torch_tp.RowwiseParallel, torch_tp.ColwiseParallel, Replicate()
    is_split = place.config.distributed.sequence_parallel
    between = Shard(1) if is_split else gather
    plan = {
        "model.embed_tokens": rows(input_layouts=gather, output_layouts=between),
        "model.layers.*.self_attn.[qkv]_proj": columns(),
        "model.layers.*.self_attn.o_proj": rows(output_layouts=between),
        "model.layers.*.mlp.[gu]*_proj": columns(),
        "model.layers.*.mlp.down_proj": rows(output_layouts=between),
        "lm_head": columns(input_layouts=between, output_layouts=Shard(-1), use_local_output=False),
    }
    if is_split:
        plan |= {
            "model.layers.*.*norm": torch_tp.SequenceParallel(),
            "model.norm": torch_tp.SequenceParallel(),
            "model.layers.*.self_attn": torch_tp.PrepareModuleInput(
                input_layouts=(between, None), desired_input_layouts=(gather, None)
            ),
            "model.layers.*.mlp": torch_tp.PrepareModuleInput(
                input_layouts=between, desired_input_layouts=gather
            ),
        }
    model, mesh = plain_llama(place), DeviceMesh.from_group(place.axes.tp.group, "cpu")
    torch_tp.parallelize_module(model, mesh, plan)
    return torch_tp.loss_parallel()(eager_loop(place, model, split_loss, clip=clip_parts))


def split_loss(model: nn.Module, batch: Batch, positions: Tensor) -> Tensor:
    return F.cross_entropy(model(batch.tokens, positions).flatten(0, 1), batch.targets.flatten())


def clip_parts(parameters: Parameters, limit: float, stages: Axis | None = None) -> Tensor:
    """`clip_grad_norm_`, also where only some parameters are DTensors, or some on other stages."""
    kinds = [[p for p in parameters if isinstance(p, DTensor) is kind] for kind in (False, True)]
    norms = [whole(get_total_norm([p.grad for p in kind])) for kind in kinds if kind]
    total = torch.stack(norms).norm()
    if stages:
        total = all_reduce(total**2, stages).sqrt()
    for kind in kinds:
        clip_grads_with_norm_(kind, limit, total)
    return total


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def torch_pipeline(place: Place, schedule: type, **distributed: Any) -> Step:
    """Our stages under torch's own schedule; `distributed` has keys that differ from the row's."""
    place = place.changed("distributed", **distributed)
    axis, data, layout = place.axes.pp, place.data, place.config.layout
    num_layers = layers_of_stages(place.model_config, layout, data.seq_length)
    mine = my_stages(num_layers, layout.schedule, axis)
    modules = nn.ModuleList(stage_for_torch(place, stage) for stage in mine)
    stages = [
        PipelineStage(module, axis.rank + i * axis.size, len(num_layers), CPU, group=axis.group)
        for i, module in enumerate(modules)
    ]

    def loss(x: Tensor, targets: Tensor) -> Tensor:
        return modules[-1].head.loss(x, targets) / targets.numel()

    takes_list = issubclass(schedule, PipelineScheduleMulti)
    runner = schedule(stages if takes_list else stages[0], data.num_micro_batches, loss_fn=loss)

    def accumulate(index: int) -> Tensor:
        batches = [data.batch(index, i) for i in range(data.num_micro_batches)]
        tokens, targets = (torch.cat([batch[i] for batch in batches]) for i in range(2))
        inputs, losses = [tokens] if mine[0].is_first else [], []
        runner.step(*inputs, target=targets, losses=losses, return_outputs=False)
        return sum(losses, torch.zeros(())).detach() / data.num_micro_batches

    return train_loop(place, modules, accumulate, partial(clip_parts, stages=axis))


def stage_for_torch(place: Place, stage: Stage) -> Llama:
    """One stage of our model as torch's pipelines use it: they compute the loss outside."""
    model = plain_llama(place)
    keep_stage(model, stage)
    model.head, model.lm_head = model.lm_head, nn.Identity()
    model.forward = partial(model.forward, positions=place.data.positions)
    return model


def torch_loss(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, weight), targets, reduction="sum")
