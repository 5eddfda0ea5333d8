"""How fast and how lean, next to what people would use instead:

    python benchmarks/compare.py            every row: half an hour on two cores
    python benchmarks/compare.py --quick    the same steps, a third of them
    python benchmarks/compare.py --profile one-process    where the time of each contender goes

The contenders of a row train the same model from the same weights on the same tokens. They are
alive in the same processes at the same time and take turns step by step, so that whatever else the
machine does hits all of them alike:

    warm-up: ours theirs    timed: ours theirs  ours theirs  ours theirs  ...
                                   `- ratio -'  `- ratio -'  `- ratio -'

A step starts at a barrier and takes as long as its slowest rank. What counts is the median of the
ratios. The first steps of all must give the same losses and gradient norms: a comparison of
different work is worth nothing. Memory is measured with each contender alone in fresh processes,
because the kernel's peak never falls.

A new row is one function per contender, which returns its `step`, and an entry in ROWS.
CPU only, float32, one thread a process.
"""

import argparse
import contextlib
import json
import math
import multiprocessing
import os
import platform
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timedelta
from functools import partial
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from picotron_min.collectives import Axis, all_reduce
from picotron_min.costs import layers_of_stages, parameter_count
from picotron_min.data import Batch, Batches
from picotron_min.extensions.build import build_model
from picotron_min.extensions.experts.moe import mixtures
from picotron_min.extensions.schedules.registry import SCHEDULES
from picotron_min.extensions.settings import ModelConfig, Recipe
from picotron_min.initialise import initial_std, initial_weight, initialise
from picotron_min.loss import head_loss, stripe_loss
from picotron_min.mesh import Axes, build_axes
from picotron_min.model import Llama
from picotron_min.optimizer import build_optimizer
from picotron_min.pipeline_parallel import Stage, keep_stage, my_stages
from picotron_min.runtime.config import Config, Distributed
from picotron_min.runtime.config_checks import resolve_model
from picotron_min.runtime.config_file import parse_config
from picotron_min.runtime.inputs import open_data
from picotron_min.runtime.launch import Launch, open_process_group
from picotron_min.runtime.processes import start_processes
from picotron_min.runtime.public_models import to_hf
from picotron_min.runtime.saver import Saver
from picotron_min.runtime.token_file import TokenFile
from train import Run, build_run, train_step

CPU = torch.device("cpu")
CHECKED_STEPS = 3  # before rounding errors have grown: float32 differs after a hundred
TOLERANCE = 1e-4  # relative, between the contenders' losses and gradient norms in those steps

# What a step is, as sections of a config.json. About 8M parameters.
WORK = {
    "model": {
        "name": "tiny",
        "vocab_size": 4096,
        "hidden_size": 256,
        "intermediate_size": 688,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    },
    "training": {
        "learning_rate": 1e-3,
        "seq_length": 256,
        "micro_batch_size": 4,
        "gradient_accumulation_steps": 4,
        "eval_batches": 0,
    },
}


class Place(NamedTuple):
    """What a contender is built from: the same for all of a row, but for the rank's own data."""

    config: Config
    model_config: ModelConfig
    axes: Axes
    data: Batches
    folder: Path  # for files, deleted in the end; the same on all ranks

    def batch(self, step: int, micro_batch: int) -> Batch:
        return self.data.batch(step, micro_batch)


class Done(NamedTuple):
    """What a step came to, over all ranks."""

    loss: float  # mean over the tokens
    grad_norm: float  # before clipping


Step = Callable[[int], Done]
Build = Callable[[Place], Step]


class Row(NamedTuple):
    about: str
    layout: dict[str, Any]  # the sizes of the axes, and what else is in "distributed"
    contenders: dict[str, Build]  # ours first
    training: dict[str, Any] | None = None  # what differs from WORK
    model: dict[str, Any] | None = None  # likewise


def picotron_min(place: Place) -> Step:
    return step_of(our_run(place.config, place.model_config, place.axes, place.data))


def our_run(config: Config, model_config: ModelConfig, axes: Axes, data: Batches) -> Run:
    model = build_model(model_config, config.layout, config.workload, axes, CPU)
    initialise(model.parameters, model_config, config.training.seed, model.placements, axes)
    model.weights_changed()
    return build_run(model, config.recipe, data)


def step_of(run: Run) -> Step:
    def step(index: int) -> Done:
        result = train_step(run, index)
        return Done(result.loss, result.grad_norm)

    return step


def transformers_model(place: Place) -> Step:
    """Hugging Face's model and loss, SDPA attention, in the eager loop that its users write."""
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**to_hf(place.model_config)))
    draw_weights(model, place)

    def loss(batch: Batch) -> Tensor:
        # Our targets are shifted already. Without a cache: generation needs one, training does not.
        out = model(batch.tokens, labels=batch.targets, shift_labels=batch.targets, use_cache=False)
        return out.loss

    return eager_loop(place, model, loss)


def experts_one_by_one(place: Place) -> Step:
    """Our own loop over the experts."""
    run = our_run(place.config, place.model_config, place.axes, place.data)
    for chunk in run.model.pipeline.chunks:
        for moe in mixtures(chunk.model):
            del moe.run  # what is left is the method of the class
    return step_of(run)


def with_choice(place: Place, **choice: Any) -> Step:
    """Ours with another choice for a key of `distributed`."""
    distributed = place.config.distributed.model_copy(update=choice)
    config = place.config.model_copy(update={"distributed": distributed})
    return step_of(our_run(config, place.model_config, place.axes, place.data))


Optimize = Callable[[Iterable[nn.Parameter], Recipe], Any]  # -> what can zero_grad and step


def torch_ddp(
    place: Place, gradient_as_bucket_view: bool = False, optimize: Optimize = build_optimizer
) -> Step:
    """Our model and loss in torch's DDP, which speaks only after the last micro-batch."""
    model = DistributedDataParallel(
        plain_llama(place),
        process_group=place.axes.dp_cp.group,
        gradient_as_bucket_view=gradient_as_bucket_view,
    )

    def loss(batch: Batch) -> Tensor:
        return model(batch.tokens, place.data.positions, batch.targets) / batch.num_targets

    return eager_loop(place, model, loss, accumulating=model.no_sync, optimize=optimize)


def zero_redundancy(
    parameters: Iterable[nn.Parameter], recipe: Recipe, bucket_views: bool = False
) -> torch.optim.Optimizer:
    """AdamW whose state is divided: each rank updates some parameters, and broadcasts them."""
    from torch.distributed.optim import ZeroRedundancyOptimizer  # compiles, warns: 66 times

    groups = build_optimizer(parameters, recipe).param_groups  # those that decay, and the others
    return ZeroRedundancyOptimizer(
        [{key: group[key] for key in ("params", "weight_decay")} for group in groups],
        torch.optim.AdamW,
        parameters_as_bucket_view=bucket_views,
        lr=recipe.learning_rate,
        betas=recipe.betas,
        fused=recipe.fused,
    )


class TorchMuon:
    """torch's Muon for the layers' matrices beside AdamW for the rest, in one object.

    torch always iterates in bfloat16 and we in `model.dtype`, here float32. So that both compute
    the same, torch's own code gets a copy in float32 where it asks for one in bfloat16.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], recipe: Recipe) -> None:
        # The embedding comes first, lm_head last: between them only norms are not hidden matrices.
        first, *layers, last = parameters
        hidden = [parameter for parameter in layers if parameter.ndim == 2]
        rest = [first, *(parameter for parameter in layers if parameter.ndim < 2), last]
        self.adamw = build_optimizer(rest, replace(recipe, optimizer="adamw"))
        self.muon = torch.optim.Muon(
            hidden,
            lr=recipe.learning_rate,
            weight_decay=recipe.weight_decay,
            momentum=recipe.momentum,
            adjust_lr_fn="match_rms_adamw",
        )

    def zero_grad(self) -> None:
        self.muon.zero_grad()
        self.adamw.zero_grad()

    def step(self) -> None:
        self.adamw.step()
        with mock.patch.object(torch.Tensor, "bfloat16", torch.Tensor.clone):
            self.muon.step()


torch_muon = partial(torch_ddp, gradient_as_bucket_view=True, optimize=TorchMuon)


def torch_fsdp(place: Place) -> Step:
    """Our model and loss in FSDP2: each layer by itself, the embedding and lm_head together."""
    model, mesh = plain_llama(place), DeviceMesh.from_group(place.axes.dp_cp.group, "cpu")
    for module in (*model.model.layers.values(), model):
        fully_shard(module, mesh=mesh)

    def loss(batch: Batch) -> Tensor:
        return model(batch.tokens, place.data.positions, batch.targets) / batch.num_targets

    return eager_loop(place, model, loss, clip=clip_dtensors)


def torch_tensor_parallel(place: Place) -> Step:
    """Our model under torch's own plan, with the loss that torch has for split logits."""
    model, sequence = plain_llama(place), place.config.distributed.sequence_parallel
    between = Shard(1) if sequence else Replicate()
    with_rotary = PrepareModuleInput(
        input_layouts=(between, None), desired_input_layouts=(Replicate(), None)
    )
    plan = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "lm_head": ColwiseParallel(
            input_layouts=between, output_layouts=Shard(-1), use_local_output=False
        ),
    }
    for name, module in model.named_modules():
        if name.endswith(("self_attn", "mlp")) and sequence:
            one = PrepareModuleInput(input_layouts=between, desired_input_layouts=Replicate())
            plan[name] = with_rotary if name.endswith("self_attn") else one
        elif name.endswith("norm") and sequence:
            plan[name] = SequenceParallel()
        elif isinstance(module, nn.Linear) and name != "lm_head":
            is_row = name.endswith(("o_proj", "down_proj"))
            plan[name] = RowwiseParallel(output_layouts=between) if is_row else ColwiseParallel()
    parallelize_module(model, DeviceMesh.from_group(place.axes.tp.group, "cpu"), plan)

    def loss(batch: Batch) -> Tensor:
        logits = model(batch.tokens, place.data.positions)
        return F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten())

    step = eager_loop(place, model, loss, clip=clip_dtensors)

    def with_split_logits(index: int) -> Done:
        with loss_parallel():
            return step(index)

    return with_split_logits


def clip_dtensors(parameters: Iterable[nn.Parameter], limit: float) -> Tensor:
    """`clip_grad_norm_`, which refuses a model of which only some parameters are DTensors."""
    kinds = [[], []]
    for parameter in parameters:
        kinds[isinstance(parameter, DTensor)].append(parameter)
    norms = [get_total_norm([p.grad for p in kind]) for kind in kinds if kind]
    total = torch.stack([whole(norm) for norm in norms]).norm()
    for kind in kinds:
        clip_grads_with_norm_(kind, limit, total)
    return total


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class StageOfPeer(nn.Module):
    """One stage of our model as torch's pipelines want it: they compute the loss outside."""

    def __init__(self, model: Llama, stage: Stage, positions: Tensor) -> None:
        super().__init__()
        keep_stage(model, stage)
        self.model, self.head, model.lm_head = model, model.lm_head, nn.Identity()
        self.positions = positions

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x, self.positions)


def torch_pipeline(place: Place, schedule: Callable[..., Any], looped: bool = False) -> Step:
    """The same stages under torch's own schedule; `looped` ones take a list of several a rank."""
    t, axis = place.config.training, place.axes.pp
    num_micro_batches = t.gradient_accumulation_steps
    num_layers = layers_of_stages(place.model_config, place.config.layout, t.seq_length)
    mine = my_stages(num_layers, place.config.layout.schedule, axis)
    modules = nn.ModuleList(
        StageOfPeer(plain_llama(place), stage, place.data.positions) for stage in mine
    )
    stages = [
        PipelineStage(module, axis.rank + i * axis.size, len(num_layers), CPU, group=axis.group)
        for i, module in enumerate(modules)
    ]
    tokens_a_micro_batch = t.micro_batch_size * t.seq_length

    def loss(x: Tensor, targets: Tensor) -> Tensor:
        return modules[-1].head.loss(x, targets) / tokens_a_micro_batch

    runner = schedule(stages if looped else stages[0], num_micro_batches, loss_fn=loss)
    optimizer = build_optimizer(modules.parameters(), place.config.recipe)

    def step(index: int) -> Done:
        optimizer.zero_grad()
        batches = [place.batch(index, i) for i in range(num_micro_batches)]
        inputs = [torch.cat([batch.tokens for batch in batches])] if mine[0].is_first else []
        last, losses = {}, []
        if mine[-1].is_last:
            last = {"target": torch.cat([batch.targets for batch in batches]), "losses": losses}
        runner.step(*inputs, **last, return_outputs=False)
        mean = sum((x.detach() for x in losses), torch.zeros(())) / num_micro_batches
        squared = get_total_norm([p.grad for p in modules.parameters()]) ** 2
        totals = all_reduce(torch.stack([mean, squared]), axis)
        norm = totals[1].sqrt()
        clip_grads_with_norm_(modules.parameters(), t.grad_clip, norm)
        optimizer.step()
        return Done(totals[0].item(), norm.item())

    return step


def one_process(place: Place, on_every_rank: bool = False) -> Step:
    """The whole model on the first rank, while the others wait, or the same on all of them."""
    config = place.config.model_copy(update={"distributed": Distributed(use_cpu=True)})
    # dp has one rank in all rows that use this.
    alone = Axes(*(Axis(name, place.axes.dp.group, CPU) for name in Axes._fields))
    text = TokenFile(place.data.tokens, num_bytes=len(place.data.tokens), num_documents=1)
    ours = step_of(our_run(config, place.model_config, alone, open_data(config, text, dp_rank=0)))

    def step(index: int) -> Done:
        waits = dist.get_rank() > 0 and not on_every_rank
        return Done(math.nan, math.nan) if waits else ours(index)

    return step


def checkpoint_saves(place: Place, in_background: bool) -> Step:
    """How long the step loop stands still for a checkpoint, the step itself not counted."""
    folder = str(place.folder / f"in_background-{in_background}")
    changes = {"save_dir": folder, "keep": 2, "in_background": in_background}
    settings = place.config.checkpoint.model_copy(update=changes)
    config = place.config.model_copy(update={"checkpoint": settings})
    run = our_run(config, place.model_config, place.axes, place.data)
    inputs = SimpleNamespace(config=config, model_config=place.model_config, device=CPU, start=None)
    done, saver = step_of(run)(0), Saver(run, inputs, dist.new_group(backend="gloo"))

    def step(index: int) -> Done:
        saver.save(index + 1)
        return done

    step.settle = saver.wait
    return step


def fused_loss(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return head_loss(x, weight, targets, stripe_loss)


def plain_loss(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, weight), targets, reduction="sum")


def loss_alone(place: Place, loss: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Step:
    """Forward and backward of nothing but the loss, of two micro-batches with 32 times the model's
    vocabulary: 2048 tokens and 128k."""
    t, vocab_size = place.config.training, 32 * place.model_config.vocab_size
    tokens = 2 * t.micro_batch_size * t.seq_length
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, 64, generator=generator).requires_grad_()
    weight = (0.1 * torch.randn(vocab_size, 64, generator=generator)).requires_grad_()
    targets = torch.randint(vocab_size, (tokens,), generator=generator)

    def step(index: int) -> Done:
        x.grad = weight.grad = None
        total = loss(x, weight, targets)
        total.backward()
        return Done(total.item() / tokens, get_total_norm([x.grad, weight.grad]).item())

    return step


def plain_llama(place: Place) -> Llama:
    """Our model on one device, with the weights that all contenders start from."""
    model = Llama(place.model_config)
    draw_weights(model, place)
    return model


def draw_weights(model: nn.Module, place: Place) -> None:
    shapes = place.model_config.parameter_shapes()

    def weight(name: str) -> Tensor:
        std = initial_std(name, place.model_config.num_hidden_layers)
        return initial_weight(name, shapes[name], place.config.training.seed, std)

    for name, parameter in model.named_parameters():
        if not (experts := name.partition(".experts."))[1]:
            parameter.data.copy_(weight(name))
            continue
        # transformers stacks the experts, and their first two matrices.
        kinds = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}[experts[2]]
        for e, stacked in enumerate(parameter.data):
            names = [f"{experts[0]}.experts.{e}.{kind}.weight" for kind in kinds]
            stacked.copy_(torch.cat([weight(name) for name in names]))


def eager_loop(
    place: Place,
    model: nn.Module,
    mean_loss: Callable[[Batch], Tensor],
    accumulating: Callable[[], Any] = contextlib.nullcontext,
    clip: Callable[[Iterable[nn.Parameter], float], Tensor] = torch.nn.utils.clip_grad_norm_,
    optimize: Optimize = build_optimizer,
) -> Step:
    """The usual train step; `accumulating` surrounds every micro-batch but the last."""
    t = place.config.training
    optimizer = optimize(model.parameters(), place.config.recipe)
    num_micro_batches = t.gradient_accumulation_steps

    def step(index: int) -> Done:
        optimizer.zero_grad()
        total = torch.zeros(())
        for i in range(num_micro_batches):
            last = i == num_micro_batches - 1
            with contextlib.nullcontext() if last else accumulating():
                loss = mean_loss(place.batch(index, i)) / num_micro_batches
                loss.backward()
            total += whole(loss.detach())
        norm = clip(model.parameters(), t.grad_clip)
        optimizer.step()
        all_reduce(total, place.axes.dp_cp)
        return Done(total.item() / place.axes.dp_cp.size, norm.item())

    return step


# What two ranks could be at best, and what the machine makes of two processes that share nothing.
SCALING = {
    "picotron-min": picotron_min,
    "one process": one_process,
    "one on each core": partial(one_process, on_every_rank=True),
}
LONG = {
    "seq_length": 2048,
    "micro_batch_size": 1,
    "gradient_accumulation_steps": 2,
    "learning_rate": 1e-4,  # AdamW makes much of the rounding of gradients that are almost zero
}
# So large that three steps show a difference between two updates: on random tokens little changes.
# Without balance losses, which transformers computes in another way.
ALIKE = {
    "moe_seq_aux_loss_coeff": 0.0,
    "learning_rate": 1e-4,
    "micro_batch_size": 8,
    "gradient_accumulation_steps": 2,
}
EXPERTS = {"num_hidden_layers": 4, "num_local_experts": 8, "moe_intermediate_size": 344}
MANY = EXPERTS | {"num_local_experts": 64, "num_experts_per_tok": 4, "moe_intermediate_size": 96}
MUON = {"optimizer": "muon", "learning_rate": 1e-2}

ROWS = {
    "one-process": Row(
        "our train step against transformers' LlamaForCausalLM in an eager loop",
        {},
        {"picotron-min": picotron_min, "transformers": transformers_model},
    ),
    "dp2": Row(
        "our gradient buckets against torch DDP around the same model",
        {"dp_size": 2},
        {
            "picotron-min": picotron_min,
            "DDP": torch_ddp,
            "DDP, bucket views": partial(torch_ddp, gradient_as_bucket_view=True),
        },
    ),
    "tp2": Row(
        "our tensor parallelism against torch's parallelize_module and loss_parallel",
        {"tp_size": 2},
        {"picotron-min": picotron_min, "torch": torch_tensor_parallel},
    ),
    "tp2-sequence": Row(
        "the same with sequence parallelism",
        {"tp_size": 2, "sequence_parallel": True},
        {"picotron-min": picotron_min, "torch": torch_tensor_parallel},
    ),
    "tp2-overlap": Row(
        "messages that travel while products are computed against messages before and after them",
        {"tp_size": 2, "sequence_parallel": True, "tp_overlap": True},
        {"overlap": picotron_min, "none": partial(with_choice, tp_overlap=False)},
    ),
    "tp2-scaling": Row(
        "two ranks against one, which has the machine to itself: 0.5 would be perfect",
        {"tp_size": 2},
        SCALING,
    ),
    "pp2-afab": Row(
        "our pipeline against torch.distributed.pipelining, all forwards first",
        {"pp_size": 2, "pp_engine": "afab"},
        {"picotron-min": picotron_min, "GPipe": partial(torch_pipeline, schedule=ScheduleGPipe)},
    ),
    "pp2-1f1b": Row(
        "the same, one forward and one backward in turn",
        {"pp_size": 2, "pp_engine": "1f1b"},
        {"picotron-min": picotron_min, "1F1B": partial(torch_pipeline, schedule=Schedule1F1B)},
    ),
    "pp2-interleaved": Row(
        "the same with two stages a rank",
        {"pp_size": 2, "pp_engine": "interleaved", "pp_chunks": 2},
        {
            "picotron-min": picotron_min,
            "Interleaved1F1B": partial(
                torch_pipeline, schedule=ScheduleInterleaved1F1B, looped=True
            ),
        },
    ),
    "pp2-scaling": Row(
        "two pipeline ranks against one, which has the machine to itself",
        {"pp_size": 2},
        SCALING,
        {"gradient_accumulation_steps": 8, "micro_batch_size": 2},
    ),
    "cp2-scaling": Row(
        "two context-parallel ranks (ring) against one, which has the machine to itself",
        {"cp_size": 2},
        SCALING,
        LONG,
    ),
    "cp2-ulysses": Row(
        "the same with Ulysses",
        {"cp_size": 2, "cp_engine": "ulysses"},
        SCALING,
        LONG,
    ),
    "sharding-optimizer": Row(
        "our sharded optimizer state against DDP with torch's ZeroRedundancyOptimizer",
        {"dp_size": 2, "sharding": "optimizer"},
        {
            "picotron-min": picotron_min,
            "DDP, ZeRO": partial(torch_ddp, optimize=zero_redundancy),
            "DDP, ZeRO, views": partial(
                torch_ddp,
                gradient_as_bucket_view=True,
                optimize=partial(zero_redundancy, bucket_views=True),
            ),
        },
    ),
    "sharding-parameters": Row(
        "our sharded parameters against FSDP2, fully_shard of every layer and of the whole",
        {"dp_size": 2, "sharding": "parameters"},
        {"picotron-min": picotron_min, "FSDP2": torch_fsdp},
    ),
    "muon": Row(
        "our Muon against torch.optim.Muon and AdamW in DDP, all with iterations in float32",
        {"dp_size": 2},
        {"picotron-min": picotron_min, "DDP, torch's Muon": torch_muon},
        MUON,
    ),
    "muon-layerwise": Row(
        "the same where each matrix of ours has one owner, who alone orthogonalises it",
        {"dp_size": 2, "sharding": "layerwise"},
        {"picotron-min": picotron_min, "DDP, torch's Muon": torch_muon},
        MUON,
    ),
    "experts": Row(
        "a mixture of 8 experts, 2 chosen, against transformers' MixtralForCausalLM",
        {},
        {"picotron-min": picotron_min, "transformers": transformers_model},
        ALIKE,
        EXPERTS | {"intermediate_size": EXPERTS["moe_intermediate_size"]},
    ),
    "experts-glm": Row(
        "one with a shared expert and sigmoid scores, against transformers' Glm4MoeForCausalLM",
        {},
        {"picotron-min": picotron_min, "transformers": transformers_model},
        ALIKE | {"moe_router_bias_update_rate": 0.0},
        EXPERTS | {"scoring_func": "sigmoid", "n_shared_experts": 1, "mlp_only_layers": [0]},
    ),
    "experts-64": Row(
        "64 experts, 4 chosen, computed together, against one after the other",
        {},
        {"picotron-min": picotron_min, "loop": experts_one_by_one},
        ALIKE,
        MANY,
    ),
    "experts-dispatch": Row(
        "tokens that travel to experts on two ranks against all tokens on both",
        {"dp_size": 2, "ep_size": 2},
        {"picotron-min": picotron_min, "all-gather": partial(with_choice, ep_engine="allgather")},
        ALIKE,
        EXPERTS,
    ),
    "checkpoint": Row(
        "the pause of the step loop for a checkpoint that is written in the background",
        {"dp_size": 2},
        {
            "in the background": partial(checkpoint_saves, in_background=True),
            "at once": partial(checkpoint_saves, in_background=False),
        },
    ),
    "loss-128k": Row(
        "the loss of 2048 tokens alone, vocabulary 128k, against linear and cross_entropy",
        {},
        {
            "picotron-min": partial(loss_alone, loss=fused_loss),
            "torch": partial(loss_alone, loss=plain_loss),
        },
    ),
}


class Effort(NamedTuple):
    """How often everything is done."""

    warmup: int  # steps of each contender before the clock runs: the first make optimizer state
    rounds: int  # timed steps of each contender
    memory_steps: int  # at least 2, for a backward with the optimizer's state already there


FULL = Effort(warmup=3, rounds=15, memory_steps=3)
QUICK = Effort(warmup=1, rounds=4, memory_steps=2)


class Spread(NamedTuple):
    """The quartiles of some measurements."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, values: list[float]) -> "Spread":
        return cls(*statistics.quantiles(values, n=4, method="inclusive"))

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.low:.3f}-{self.high:.3f})"


@dataclass(frozen=True)
class Result:
    """One contender's numbers."""

    row: str
    contender: str
    step_seconds: list[float]  # in the order of the rounds
    memory_mb: float  # peak of the largest process, above what it held before the model was built
    total_memory_mb: float  # the same with what imports hold
    done: list[Done]  # by all steps, the warm-up included


def main(arguments: list[str] | None = None, work: dict = WORK) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS), metavar="ROW")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers here")
    parser.add_argument("--profile", choices=ROWS, metavar="ROW", help="only profile this row")
    options = parser.parse_args(arguments)
    facts = describe_run(work)
    print_facts(facts)
    if options.profile:
        profile(options.profile, work)
        return
    measured = []
    for row in options.rows:
        results = measure(row, work, QUICK if options.quick else FULL)
        print(f"\n{row}: {ROWS[row].about}\n{table(results)}", flush=True)
        if ROWS[row].contenders is SCALING:
            print(scaling(row, results, work))
        measured += as_json(results)
    if options.json:
        options.json.write_text(json.dumps(facts | {"results": measured}, indent=2) + "\n")


def describe_run(work: dict) -> dict[str, str]:
    """What one must know to read the numbers."""
    t = parse_config(work).training
    return {
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "cpu": cpu_name(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "threads": "1 a process",
        # Ranks wait for the slowest: with more to do than there are cores, times are only noise.
        "load": f"{os.getloadavg()[0]:.1f} before this run, on {os.cpu_count()} cores",
        "model": f"{parameter_count(resolve_model(parse_config(work))):,} parameters, float32",
        "step": f"{t.gradient_accumulation_steps} micro-batches of {t.micro_batch_size} sequences"
        f" of {t.seq_length} tokens a rank",
    }


def print_facts(facts: dict[str, str]) -> None:
    print("\n".join(f"{name:<13} {value}" for name, value in facts.items()), flush=True)


def cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":")[1].strip()
    return platform.processor() or platform.machine()


def measure(row: str, work: dict, effort: Effort) -> list[Result]:
    """Time all contenders of a row together, then the memory of each alone.

    Raises ValueError if they did not do the same work.
    """
    turns = run_ranks(row, work, partial(take_turns, effort.warmup, effort.rounds))
    memory, results = measure_memory(row, work, effort.memory_steps), []
    for name in ROWS[row].contenders:
        before, peak = memory[name]
        results.append(
            Result(
                row=row,
                contender=name,
                step_seconds=np.max([rank[name].seconds for rank in turns], axis=0).tolist(),
                memory_mb=peak - before,
                total_memory_mb=peak,
                done=turns[0][name].done,
            )
        )
    check_same_work(results)
    return results


def measure_memory(row: str, work: dict, steps: int) -> dict[str, tuple[float, float]]:
    """Of each contender: MB before and at the peak, on the rank that has added most."""
    return {
        name: max(
            run_ranks(row, work, partial(peak_memory, name, steps)), key=lambda mb: mb[1] - mb[0]
        )
        for name in ROWS[row].contenders
    }


def run_ranks(row: str, work: dict, function: Callable[[Place, Row], Any]) -> list[Any]:
    """Call function(place, row) on every rank of fresh processes; returns their results."""
    return on_ranks(config_of(row, work), partial(function, row=ROWS[row]))


def config_of(row: str, work: dict) -> Config:
    about = ROWS[row]
    return parse_config(
        work
        | {
            "distributed": about.layout | {"use_cpu": True, "backend": "gloo"},
            "model": work["model"] | (about.model or {}),
            "training": work["training"] | (about.training or {}),
        }
    )


def on_ranks(
    config: Config, function: Callable[[Place], Any], tokens: np.ndarray | None = None
) -> list[Any]:
    """Call function(place) on every rank of fresh processes; returns their results.

    They train on `tokens`, or else on random ones.
    """
    results = multiprocessing.get_context("fork").SimpleQueue()
    if tokens is None:
        size = 50 * config.tokens_per_step + 1
        tokens = np.random.default_rng(0).integers(resolve_model(config).vocab_size, size=size)
    with tempfile.TemporaryDirectory() as folder:
        run = partial(run_rank, config, tokens, function, results, Path(folder))
        start_processes(run, config.world_size)
    by_rank = dict(results.get() for _ in range(config.world_size))
    return [by_rank[rank] for rank in range(config.world_size)]


def run_rank(
    config: Config, tokens: np.ndarray, function: Callable, results, folder: Path, launch: Launch
) -> None:
    torch.set_num_threads(1)
    d, model_config = config.distributed, resolve_model(config)
    store = launch.open_store(d.timeout_seconds)
    open_process_group(launch, d.backend, CPU, store, timedelta(seconds=d.timeout_seconds))
    axes = build_axes(CPU, config.layout)
    text = TokenFile(tokens.astype(np.uint16), num_bytes=len(tokens), num_documents=1)
    data = open_data(config, text, axes.dp.rank, axes.cp.rank)
    results.put((launch.rank, function(Place(config, model_config, axes, data, folder))))
    dist.barrier()
    dist.destroy_process_group()


class Turns(NamedTuple):
    """What one contender did on one rank."""

    done: list[Done]  # by all steps
    seconds: list[float]  # of the timed ones


def take_turns(warmup: int, rounds: int, place: Place, row: Row) -> dict[str, Turns]:
    """Let all contenders of a row step in turn; returns what each did."""
    steps = {name: build(place) for name, build in row.contenders.items()}
    turns = {name: Turns([], []) for name in steps}
    for index in range(warmup + rounds):
        for name, step in steps.items():
            dist.barrier()
            began = time.perf_counter()
            turns[name].done.append(step(index))
            took = time.perf_counter() - began
            if index >= warmup:
                turns[name].seconds.append(took)
            settle(step)
    return turns


def peak_memory(name: str, num_steps: int, place: Place, row: Row) -> tuple[float, float]:
    """Resident megabytes of this process before a contender is built, and at the worst moment."""
    before = resident_peak_mb()
    step = row.contenders[name](place)
    for index in range(num_steps):
        step(index)
        settle(step)
    return before, resident_peak_mb()


def settle(step: Step) -> None:
    """Wait, off the clock, for what a step has left to the background."""
    getattr(step, "settle", lambda: None)()


def resident_peak_mb() -> float:
    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, Linux kilobytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6


def check_same_work(results: list[Result]) -> None:
    """ValueError if contenders of a row differ in the loss or gradient norm of an early step."""
    ours, *others = results
    for other in others:
        for index in range(CHECKED_STEPS):
            a, b = ours.done[index], other.done[index]
            if not np.allclose(a, b, rtol=TOLERANCE, atol=0):
                raise ValueError(
                    f"{ours.row}: step {index} of {ours.contender} came to {a}, that of"
                    f" {other.contender} to {b}: they do not do the same work, so their times"
                    " cannot be compared"
                )


def ratios(ours: Result, other: Result) -> Spread:
    """Our time over theirs, pair by pair: below 1 is faster."""
    return Spread.of([a / b for a, b in zip(ours.step_seconds, other.step_seconds, strict=True)])


def table(results: list[Result]) -> str:
    """The contenders of a row, ours first; quartiles in brackets."""
    ours = results[0]
    lines = [f"{'':20}{'ms a step':>22}{'ours / theirs':>26}{'MB':>8}{'ours / theirs':>16}"]
    for result in results:
        low, median, high = (1000 * x for x in Spread.of(result.step_seconds))
        time_ratio = memory_ratio = ""
        if result is not ours:
            time_ratio = str(ratios(ours, result))
            memory_ratio = f"{ours.memory_mb / result.memory_mb:.3f}"
        lines.append(
            f"{result.contender:20}{f'{median:.0f} ({low:.0f}-{high:.0f})':>22}{time_ratio:>26}"
            f"{result.memory_mb:8.0f}{memory_ratio:>16}"
        )
    return "\n".join(lines)


def scaling(row: str, results: list[Result], work: dict) -> str:
    """How much of two cores the ranks make, and where the rest is."""
    ours, alone, crowded = results
    config = config_of(row, work)
    d, num_micro_batches = config.distributed, config.training.gradient_accumulation_steps
    busy = 1 - SCHEDULES[d.pp_engine].bubble(d.pp_size, num_micro_batches, d.pp_chunks)
    shared = ratios(alone, crowded).median
    reached = 1 / (config.world_size * ratios(ours, alone).median)
    return (
        f"{reached:.3f} of {config.world_size} times one process. The bubble leaves {busy:.3f}, and"
        f" processes that share nothing but the machine {shared:.3f}: this is"
        f" {reached / busy / shared:.3f} of both"
    )


def as_json(results: list[Result]) -> list[dict]:
    """The contenders of a row, ours first, with what the table says of them."""
    ours = results[0]
    return [
        asdict(result)
        | {
            "median_seconds": statistics.median(result.step_seconds),
            "time_ratio": ratios(ours, result)._asdict(),
            "memory_ratio": ours.memory_mb / result.memory_mb,
        }
        for result in results
    ]


def profile(row: str, work: dict) -> None:
    """Print, for each contender alone, the operations of rank 0 that take most time."""
    for name in ROWS[row].contenders:
        tables = run_ranks(row, work, partial(profile_steps, name, 2))
        print(f"\n{row}, {name}, 2 steps\n{tables[0]}", flush=True)


def profile_steps(name: str, num_steps: int, place: Place, row: Row) -> str:
    step = row.contenders[name](place)
    step(0)  # makes the optimizer's state
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        for index in range(1, num_steps + 1):
            step(index)
    return profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=25)


if __name__ == "__main__":
    main()
