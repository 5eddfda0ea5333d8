"""One rank's part of a training run: its stages of the model, its gradients, its optimizer.

Building it goes the same way in every layout: a model without memory; the parallelisms swap their
parts of it; what is left is allocated and given its weights; then gradients find their places.

    build_model    Llama on the meta device -> keep my stage -> tensor, context parallel -> allocate
    Training       initialise -> bfloat16 copies -> gradient buckets -> optimizer -> the plan of
                   this rank's actions

This file and train.py are the only ones that know all parallelisms.
"""

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import asdict
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from picotron_min.block_attention import SOFTMAX, choose_kernel
from picotron_min.checkpoint import (
    Saver,
    load,
    parts_of_whole,
    set_optimizer_steps,
    training_tensors,
)
from picotron_min.collectives import all_reduce
from picotron_min.context_parallel import POSITIONS, apply_context_parallel
from picotron_min.costs import layers_of_stages
from picotron_min.data import Batch, Batches
from picotron_min.data_parallel import GradientBuckets
from picotron_min.initialise import initialise
from picotron_min.mesh import Axes
from picotron_min.model import (
    Llama,
    SoftmaxAttention,
    apply_compile,
    apply_copies,
    apply_recompute,
)
from picotron_min.model_config import ModelConfig
from picotron_min.optimizer import SkippedSteps, build_optimizer, gradient_norm, learning_rate_at
from picotron_min.pipeline_parallel import (
    Chunk,
    Pipeline,
    Stage,
    keep_stage,
    my_stages,
    parameters_by_name,
    shared_embedding,
    tied_copy,
)
from picotron_min.pipeline_schedule import Plan, build_plans, forward_only, insert_communication
from picotron_min.runtime.hugging_face import export_hf, read_weights
from picotron_min.runtime.token_file import TokenFile
from picotron_min.runtime.tokenizer import Tokenizer
from picotron_min.runtime.trace import Watch
from picotron_min.tensor_parallel import apply_tensor_parallel, shard_dim

if TYPE_CHECKING:  # it is only read from, and benchmarks/gpu.py does without pydantic
    from picotron_min.runtime.config import Config

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


class StepResult(NamedTuple):
    loss: float  # mean over the target tokens of the global batch
    grad_norm: float  # before clipping
    learning_rate: float
    skipped: bool  # the gradient was not finite, and the weights were left alone


class Training:
    """One rank's part of the model, its gradients, its optimizer, and the step that ties them."""

    def __init__(
        self,
        config: "Config",
        model_config: ModelConfig,
        axes: Axes,
        device: torch.device,
        data: Batches,
        weights: dict[str, Path] | None = None,
    ) -> None:
        """`weights`: the file of every parameter; without it they are drawn."""
        t = config.training
        self.config, self.axes, self.device, self.data = config, axes, device, data
        # First: all ranks must meet to make its group, and its timeout is an hour. A rank that
        # fails before, over its weights say, would not be missed till then.
        self.saver = Saver(config.checkpoint.in_background, config.checkpoint.keep)
        self.positions = data.positions.to(device)
        self.model_config = model_config
        num_layers = layers_of_stages(model_config, config.layout, t.seq_length)
        self.chunks = [
            Chunk(stage, build_model(config, model_config, axes, device, stage))
            for stage in my_stages(num_layers, axes.pp)
        ]
        self.parameters = parameters_by_name(self.chunks)
        if weights:
            read_weights(weights, self.parameters, shard_dim, axes.tp)
        else:
            initialise(self.parameters, model_config, t.seed, shard_dim, axes.tp)
        self.masters = {}  # by copy, which is what it was when `run` was last called
        if config.model.dtype == "bfloat16":
            for chunk in self.chunks:
                self.masters |= apply_copies(chunk.model, torch.bfloat16)
        self.buckets = [self.build_buckets(chunk) for chunk in self.chunks]
        self.optimizer = optimizer_of(config, self.parameters.values())
        self.skipped = SkippedSteps()
        d, num_micro_batches = config.distributed, t.gradient_accumulation_steps
        plans = build_plans(d.pp_engine, axes.pp.size, num_micro_batches, d.pp_chunks)
        self.plan = plans[axes.pp.rank]
        evaluations = [forward_only(num_micro_batches, d.pp_chunks)] * axes.pp.size
        self.eval_plan = insert_communication(evaluations)[axes.pp.rank]
        sequence = t.seq_length // d.cp_size // (d.tp_size if d.sequence_parallel else 1)
        self.pipeline = Pipeline(
            self.chunks,
            axes.pp,
            partial(
                torch.empty,
                (t.micro_batch_size, sequence, model_config.hidden_size),
                dtype=next(iter(self.parameters.values())).dtype,
                device=device,
            ),
        )

    def build_buckets(self, chunk: Chunk) -> list[GradientBuckets]:
        """One set for each axis that gradients are summed over: all ranks that share a parameter
        and see other tokens, or that hold a copy of it."""
        axes, by_axis = self.axes, defaultdict(list)
        for name, parameter in chunk.model.named_parameters():
            if parameter is shared_embedding(chunk):
                axis = axes.dp_cp_ends
            elif shard_dim(name) is None and self.config.distributed.sequence_parallel:
                axis = axes.dp_cp_tp  # norms see another part of the sequence on each tp rank
            else:
                axis = axes.dp_cp
            by_axis[axis].append((name, parameter))
        return [
            GradientBuckets(named, axis, masters=self.masters) for axis, named in by_axis.items()
        ]

    def step(self, step: int, watch: Watch = contextlib.nullcontext) -> StepResult:
        """Train on the step-th global batch, counted from 0; for `watch` see trace.py."""
        t = self.config.training
        rate = learning_rate_at(
            step,
            peak=t.learning_rate,
            minimum=t.min_learning_rate,
            schedule=t.schedule,
            warmup_steps=t.warmup_steps,
            total_steps=t.total_train_steps,
        )
        all_buckets = list(chain(*self.buckets))
        for buckets in all_buckets:
            buckets.zero()
        totals = self.run(self.plan, partial(self.data.batch, step), watch)
        for buckets in all_buckets:
            buckets.wait()
        # The only place in a step where the host waits for a GPU, which is idle from then until the
        # optimizer is launched; while that runs, the host is already at the next step.
        loss_sum, num_targets, norm = torch.cat([totals, self.gradient_norm()[None]]).tolist()
        norm /= num_targets
        skip = self.skipped.record(step + 1, norm)
        if not skip:
            clip = min(1.0, t.grad_clip / (norm + 1e-6)) if t.grad_clip else 1.0
            for buckets in all_buckets:
                buckets.scale(clip / num_targets)  # from a sum over tokens to the clipped mean
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self.optimizer.step()
        return StepResult(loss_sum / num_targets, norm, rate, skip)

    def gradient_norm(self) -> Tensor:
        """[], of the whole model's gradient; a parameter that several ranks have counts once."""
        copies = [tied_copy(chunk) for chunk in self.chunks]
        mine = [(n, p.grad) for n, p in self.parameters.items() if all(p is not c for c in copies)]
        return gradient_norm(
            sharded=[gradient for name, gradient in mine if shard_dim(name) is not None],
            replicated=[gradient for name, gradient in mine if shard_dim(name) is None],
            tp=self.axes.tp,
            pp=self.axes.pp,
        )

    @torch.no_grad()
    def evaluate(self) -> float:
        """The mean loss of the held-out tokens."""
        sums = [
            self.run(self.eval_plan, partial(self.data.eval_batch, index))
            for index in range(self.data.num_eval_batches)
        ]
        loss_sum, num_targets = sum(sums).tolist()
        return loss_sum / num_targets

    def run(
        self,
        plan: Plan,
        read: Callable[[int], Batch],
        watch: Watch = contextlib.nullcontext,
    ) -> Tensor:
        """Run a plan; returns [loss, number of targets], summed over the global batch."""
        for copy, master in self.masters.items():
            copy.data.copy_(master.data)
        bfloat16 = self.config.model.dtype == "bfloat16"
        with torch.autocast(self.device.type, torch.bfloat16, enabled=bfloat16):
            totals = self.pipeline.run(
                plan,
                lambda i: to_device(read(i), self.device),
                self.positions,
                before_last_backward=self.start_reducing,
                watch=watch,
            )
        all_reduce(totals, self.axes.dp_cp)
        return all_reduce(totals, self.axes.pp)  # only the last stage has seen a loss

    def start_reducing(self, chunk: int) -> None:
        for buckets in self.buckets[chunk]:
            buckets.reduce_in_next_backward()

    def save(self, save_dir: Path, step: int) -> None:
        """Write the checkpoint of this moment, `step` steps done; see Saver."""
        facts = {
            "skipped_steps": self.skipped.total,
            "model": asdict(self.model_config),
            "config": self.config.model_dump(by_alias=True),
            "data": self.config.data_order,
        }
        tensors = training_tensors(self.parameters, self.optimizer)
        self.saver.save(save_dir, step, tensors, self.parts_of_whole, facts)

    def load(self, folder: Path, facts: dict) -> None:
        """Go on from a checkpoint as if there had been no break."""
        load(folder, self.parts_of_whole(training_tensors(self.parameters, self.optimizer)))
        self.skipped.total = facts["skipped_steps"]
        set_optimizer_steps(self.optimizer, facts["step"] - facts["skipped_steps"])

    def parts_of_whole(self, tensors: dict[str, Tensor]) -> dict[str, DTensor]:
        """Say of each tensor which part this rank has."""
        return parts_of_whole(tensors, self.model_config, shard_dim, self.axes.tp)

    def export(self, folder: Path, tokenizer: Tokenizer) -> None:
        """Write the model as a Hugging Face folder, in the dtype it was computed in."""
        dtype = DTYPES[self.config.model.dtype]
        weights = {name: p.data.to(dtype) for name, p in self.parameters.items()}
        parts = self.parts_of_whole(weights)
        export_hf(folder, parts, self.model_config, tokenizer, self.saver.group)


def optimizer_of(config: "Config", parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """The one that the config asks for; benchmarks give it to others' models, too."""
    t = config.training
    return build_optimizer(
        parameters,
        name=t.optimizer,
        learning_rate=t.learning_rate,
        betas=t.betas,
        weight_decay=t.weight_decay,
        fused=config.model.use_fused_adam,
    )


def build_model(
    config: "Config", model_config: ModelConfig, axes: Axes, device: torch.device, stage: Stage
) -> Llama:
    """A stage, built without memory; the parallelisms swap their parts; what is left is allocated,
    and not yet initialised."""
    with torch.device("meta"):
        model = Llama(model_config)
    model.to(torch.float64 if config.model.dtype == "float64" else torch.float32)
    kernel = choose_kernel(device, DTYPES[config.model.dtype], model_config.head_dim)
    if not config.use_flash_attention:
        kernel = SOFTMAX
        for layer in model.model.layers.values():
            layer.self_attn.core_attention = SoftmaxAttention()
    keep_stage(model, stage)
    apply_tensor_parallel(model, axes.tp, config.distributed.sequence_parallel)
    apply_context_parallel(model, axes.cp, config.distributed.cp_engine, kernel)
    model.to_empty(device=device)
    model.tie_weights()
    apply_recompute(model, config.model.recompute, config.model.compile)
    if config.model.compile:
        apply_compile(model)
    return model


def to_device(batch: Batch, device: torch.device) -> Batch:
    """A GPU fetches the tokens from pinned memory by itself, while the host goes on."""
    if device.type == "cpu":
        return batch
    tokens, targets = (
        x.pin_memory().to(device, non_blocking=True) for x in (batch.tokens, batch.targets)
    )
    return batch._replace(tokens=tokens, targets=targets)


def open_data(config: "Config", text: TokenFile, dp_rank: int, cp_rank: int = 0) -> Batches:
    """The micro-batches of this rank."""
    d, t = config.distributed, config.training
    return Batches(
        text.tokens,
        seq_length=t.seq_length,
        seed=t.seed,
        micro_batch_size=t.micro_batch_size,
        num_micro_batches=t.gradient_accumulation_steps,
        dp_rank=dp_rank,
        dp_size=d.dp_size,
        positions=POSITIONS[d.cp_engine](cp_rank, d.cp_size, t.seq_length),
        eval_batches=t.eval_batches,
    )
