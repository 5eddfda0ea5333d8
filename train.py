"""Train a Llama:  torchrun --nproc_per_node 4 train.py --config config.json

The whole story, top to bottom: `main` reads the config and starts the processes, `train` is what
every process does, `Training` is the model laid out over them and its one train step.
Without torchrun, `python train.py --config config.json` starts the processes itself.
"""

import argparse
import contextlib
import math
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from picotron_min.checkpoint import (
    export_hf,
    find_start,
    initialise,
    load,
    parts_of_whole,
    read_facts,
    save,
    set_aside,
    set_optimizer_steps,
    training_tensors,
)
from picotron_min.collectives import all_reduce
from picotron_min.config import Config, load_config, resolve_model
from picotron_min.costs import parameter_count, split_layers
from picotron_min.data import Batch, Batches, TokenFile, prepare_tokens
from picotron_min.data_parallel import GradientBuckets
from picotron_min.llama_config import LlamaConfig
from picotron_min.mesh import (
    Axes,
    Launch,
    build_axes,
    choose_backend,
    choose_device,
    coordinates,
    open_process_group,
    set_environment,
    start_processes,
    torchrun_launch,
)
from picotron_min.metrics import Console, EvalRecord, MetricsLog, Speedometer, StepRecord, human
from picotron_min.model import Llama, SoftmaxAttention, apply_recompute
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
from picotron_min.tensor_parallel import apply_tensor_parallel, shard_dim
from picotron_min.tokenizer import Tokenizer, load_tokenizer
from picotron_min.trace import Trace, Watch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a Llama as a config.json says.")
    parser.add_argument("--config", required=True, metavar="FILE", help="see create_config.py")
    path = parser.parse_args().config
    launch = torchrun_launch()
    with mistakes_told_plainly(launch.local_rank if launch else 0):
        config = load_config(path, processes=launch.world_size if launch else None)
    set_environment(TOKENIZERS_PARALLELISM=config.environment.TOKENIZERS_PARALLELISM)
    if launch:
        train(config, launch)
    else:
        start_processes(partial(train, config), config.world_size)


def train(config: Config, launch: Launch) -> None:
    """What every process does, from finding its place to the finished model."""
    d, t = config.distributed, config.training
    if config.environment.OMP_NUM_THREADS:
        torch.set_num_threads(config.environment.OMP_NUM_THREADS)
    sizes = {"pp": d.pp_size, "dp": d.dp_size, "cp": d.cp_size, "tp": d.tp_size}
    save_dir = Path(config.checkpoint.save_dir)

    with mistakes_told_plainly(launch.local_rank):  # while no process waits for another
        device = choose_device(launch, d.use_cpu)
        backend = choose_backend(device, d.backend)
        llama = resolve_model(config)
        tokenizer = load_tokenizer(config.dataset.tokenizer)
        text = open_text(config, llama)
        data = open_data(config, text, dp_rank=coordinates(launch.rank, **sizes).dp)
        start = find_start(config.checkpoint.load_path, save_dir)
        facts = read_facts(start, llama, t.optimizer) if start else {"step": 0}
        save_dir.mkdir(parents=True, exist_ok=True)

    open_process_group(launch, backend, d.timeout_seconds)
    axes = build_axes(device, **sizes, timeout_seconds=d.timeout_seconds)
    training = Training(config, llama, axes, device, data)
    if start:
        training.load(start, facts)

    is_writer = launch.rank == 0
    goes_on = start is not None and start.resolve().parent == save_dir.resolve()
    if is_writer and (aside := set_aside(save_dir, newer_than=start if goes_on else None)):
        print(f"{save_dir} held an earlier run: it is now in {aside}")
    first_step, last_step = facts["step"], t.total_train_steps
    if t.max_tokens:
        last_step = min(last_step, math.ceil(t.max_tokens / data.tokens_per_step))
    log = MetricsLog(
        Path(config.metrics_file), writes=is_writer, wandb_options=wandb_options(config)
    )
    speedometer = Speedometer(
        llama, t.seq_length, config.model.recompute, device, DTYPES[config.model.dtype]
    )
    checkpoint = start
    traced_steps = 3 if config.logging.trace_file else 0  # after two that warm up
    trace = Trace(range(first_step + 2, first_step + 2 + traced_steps), axes.pp, device)
    with Console(first_step + 1, last_step, prints=is_writer) as console:
        console.header("picotron-min", describe(config, llama, device, backend, text, data, start))
        for step in range(first_step, last_step):
            began = time.perf_counter()
            result = training.step(step, trace.watch(step))
            done = step + 1
            seconds = time.perf_counter() - began
            record = StepRecord(
                step=done,
                loss=result.loss,
                grad_norm=result.grad_norm,
                learning_rate=result.learning_rate,
                tokens=done * data.tokens_per_step,
                step_seconds=seconds,
                comm_bytes=take_bytes(axes),
                **speedometer.measure(data.tokens_per_step / seconds, config.world_size),
            )
            log.write(record)
            console.step(record)
            if result.skipped:
                console.warn(f"step {done} changed nothing: its gradient is not finite")
            if data.num_eval_batches and due(done, t.eval_frequency, last_step):
                loss = training.evaluate()
                take_bytes(axes)  # they are not the next step's
                record = EvalRecord(done, loss, loss / math.log(2) * text.tokens_per_byte)
                log.write(record)
                console.evaluation(record)
            if due(done, config.checkpoint.save_frequency, last_step):
                checkpoint = training.save(save_dir, done)
    hf = training.export(save_dir / "hf", tokenizer)
    here = coordinates(launch.rank, **sizes)
    if config.logging.trace_file and here.dp == here.cp == here.tp == 0:
        trace.write(Path(config.logging.trace_file))
    console.summary(hf, checkpoint)
    log.close()
    dist.barrier()  # nobody leaves while another still needs it
    dist.destroy_process_group()


def take_bytes(axes: Axes) -> dict[str, int]:
    """Bytes that this rank has sent over each axis since the last time, without the silent ones."""
    return {axis.name: sent for axis in axes if (sent := axis.ledger.take_bytes())}


def due(done: int, every: int, last_step: int) -> bool:
    """After every so many steps (0: none), and always after the last."""
    return done == last_step or (every > 0 and done % every == 0)


class StepResult(NamedTuple):
    loss: float  # mean over the target tokens of the global batch
    grad_norm: float  # before clipping
    learning_rate: float
    skipped: bool  # the gradient was not finite, and the weights were left alone


class Training:
    """One rank's part of the model, its gradients, its optimizer, and the step that ties them."""

    def __init__(
        self, config: Config, llama: LlamaConfig, axes: Axes, device: torch.device, data: Batches
    ) -> None:
        t = config.training
        self.config, self.axes, self.device, self.data = config, axes, device, data
        self.llama = llama
        self.chunks = [
            Chunk(stage, build_model(config, llama, axes, device, stage))
            for stage in my_stages(layers_of_stages(config, llama), axes.pp)
        ]
        self.parameters = parameters_by_name(self.chunks)
        initialise(self.parameters, llama, t.seed, shard_dim, axes.tp)
        self.buckets = [self.build_buckets(chunk) for chunk in self.chunks]
        self.optimizer = build_optimizer(
            self.parameters.values(),
            name=t.optimizer,
            learning_rate=t.learning_rate,
            betas=t.betas,
            weight_decay=t.weight_decay,
            fused=config.model.use_fused_adam,
        )
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
                (t.micro_batch_size, sequence, llama.hidden_size),
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
        return [GradientBuckets(named, axis) for axis, named in by_axis.items()]

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
        buckets = [buckets for of_chunk in self.buckets for buckets in of_chunk]
        for some in buckets:
            some.zero()
        loss_sum, num_targets = self.run(self.plan, partial(self.data.batch, step), watch)
        for some in buckets:
            some.wait()
        norm = self.gradient_norm() / num_targets
        skip = self.skipped.record(step + 1, norm)
        if not skip:
            clip = min(1.0, t.grad_clip / (norm + 1e-6)) if t.grad_clip else 1.0
            for some in buckets:
                some.scale(clip / num_targets)  # from a sum over tokens to the clipped mean
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self.optimizer.step()
        return StepResult(loss_sum / num_targets, norm, rate, skip)

    def gradient_norm(self) -> float:
        """Of the whole model's gradient; a parameter that several ranks have counts once."""
        copies = [tied_copy(chunk) for chunk in self.chunks]
        mine = [(n, p.grad) for n, p in self.parameters.items() if all(p is not c for c in copies)]
        return gradient_norm(
            sharded=[gradient for name, gradient in mine if shard_dim(name) is not None],
            replicated=[gradient for name, gradient in mine if shard_dim(name) is None],
            tp=self.axes.tp,
            pp=self.axes.pp,
        ).item()

    @torch.no_grad()
    def evaluate(self) -> float:
        """The mean loss of the held-out tokens."""
        sums = [
            self.run(self.eval_plan, partial(self.data.eval_batch, index))
            for index in range(self.data.num_eval_batches)
        ]
        return sum(loss for loss, _ in sums) / sum(targets for _, targets in sums)

    def run(
        self,
        plan: Plan,
        read: Callable[[int], Batch],
        watch: Watch = contextlib.nullcontext,
    ) -> tuple[float, float]:
        """Run a plan; returns the loss and the number of targets, summed over the global batch."""
        bfloat16 = self.config.model.dtype == "bfloat16"
        with torch.autocast(self.device.type, torch.bfloat16, enabled=bfloat16):
            totals = self.pipeline.run(
                plan,
                lambda i: to_device(read(i), self.device),
                self.data.positions.to(self.device),
                before_last_backward=self.start_reducing,
                watch=watch,
            )
        all_reduce(totals, self.axes.dp_cp)
        all_reduce(totals, self.axes.pp)  # only the last stage has seen a loss
        loss_sum, num_targets = totals.tolist()
        return loss_sum, num_targets

    def start_reducing(self, chunk: int) -> None:
        for buckets in self.buckets[chunk]:
            buckets.reduce_in_next_backward()

    def save(self, save_dir: Path, step: int) -> Path:
        """Write the checkpoint of this moment, `step` steps done; returns its folder."""
        facts = {
            "skipped_steps": self.skipped.total,
            "model": asdict(self.llama),
            "config": self.config.model_dump(),
        }
        return save(save_dir, step, self.tensors(), facts)

    def load(self, folder: Path, facts: dict) -> None:
        """Go on from a checkpoint as if there had been no break."""
        load(folder, self.tensors())
        self.skipped.total = facts["skipped_steps"]
        set_optimizer_steps(self.optimizer, facts["step"] - facts["skipped_steps"])

    def tensors(self) -> dict[str, DTensor]:
        """All that a step changes, each as the part of a whole that this rank has."""
        tensors = training_tensors(self.parameters, self.optimizer)
        return parts_of_whole(tensors, self.llama, shard_dim, self.axes.tp)

    def export(self, folder: Path, tokenizer: Tokenizer) -> Path:
        """Write the model as a Hugging Face folder, in the dtype it was computed in."""
        dtype = DTYPES[self.config.model.dtype]
        weights = {name: p.data.to(dtype) for name, p in self.parameters.items()}
        weights = parts_of_whole(weights, self.llama, shard_dim, self.axes.tp)
        return export_hf(folder, weights, self.llama, tokenizer)


def layers_of_stages(config: Config, llama: LlamaConfig) -> list[int]:
    """How many layers each pipeline stage has."""
    d = config.distributed
    return d.pp_layers or split_layers(
        llama, config.training.seq_length, num_stages=d.pp_size * d.pp_chunks
    )


def build_model(
    config: Config, llama: LlamaConfig, axes: Axes, device: torch.device, stage: Stage
) -> Llama:
    """A stage, built without memory; the parallelisms swap their parts; what is left is allocated,
    and not yet initialised."""
    with torch.device("meta"):
        model = Llama(llama)
    model.to(torch.float64 if config.model.dtype == "float64" else torch.float32)
    if not config.use_flash_attention:
        for layer in model.model.layers.values():
            layer.self_attn.core_attention = SoftmaxAttention()
    keep_stage(model, stage)
    apply_tensor_parallel(model, axes.tp, config.distributed.sequence_parallel)
    model.to_empty(device=device)
    model.tie_weights()
    apply_recompute(model, config.model.recompute)
    if config.model.compile:
        for layer in model.model.layers.values():
            layer.compile()
    return model


def to_device(batch: Batch, device: torch.device) -> Batch:
    return Batch(*(x.to(device) if isinstance(x, torch.Tensor) else x for x in batch))


def open_text(config: Config, llama: LlamaConfig) -> TokenFile:
    """The tokens of the dataset, made now if no run has made them before."""
    dataset = config.dataset
    return prepare_tokens(
        dataset.name,
        subset_name=dataset.subset_name,
        split=dataset.split,
        text_column=dataset.text_column,
        num_samples=config.training.num_samples,
        num_proc=dataset.num_proc,
        tokenizer=dataset.tokenizer,
        vocab_size=llama.vocab_size,
        cache_dir=dataset.cache_dir,
    )


def open_data(config: Config, text: TokenFile, dp_rank: int) -> Batches:
    """The micro-batches of this rank."""
    t = config.training
    return Batches(
        text.tokens,
        seq_length=t.seq_length,
        seed=t.seed,
        micro_batch_size=t.micro_batch_size,
        num_micro_batches=t.gradient_accumulation_steps,
        dp_rank=dp_rank,
        dp_size=config.distributed.dp_size,
        eval_batches=t.eval_batches,
    )


def wandb_options(config: Config) -> dict | None:
    if not config.logging.use_wandb:
        return None
    return {
        "project": config.logging.project_name,
        "name": config.logging.run_name,
        "config": config.model_dump(),
        "dir": config.checkpoint.save_dir,
    }


def describe(
    config: Config,
    llama: LlamaConfig,
    device: torch.device,
    backend: str,
    text: TokenFile,
    data: Batches,
    start: Path | None,
) -> dict[str, str]:
    """What is being trained, for the console's header."""
    d, t = config.distributed, config.training
    return {
        "model": f"{config.model.name}, {human(parameter_count(llama))} parameters"
        f" in {config.model.dtype}",
        "layout": f"{config.world_size} x {device.type} over {backend}:"
        f" dp {d.dp_size} x pp {d.pp_size} x cp {d.cp_size} x tp {d.tp_size}",
        "step": f"{human(data.tokens_per_step)} tokens: {data.global_batch} sequences of"
        f" {t.seq_length}, {t.micro_batch_size} a micro-batch,"
        f" {t.gradient_accumulation_steps} micro-batches a rank",
        "data": f"{config.dataset.name}, {human(len(text.tokens))} tokens in"
        f" {human(text.num_documents)} documents; {data.num_eval_sequences} sequences held out",
        "start": f"resumed from {start}" if start else f"random weights, seed {t.seed}",
    }


@contextlib.contextmanager
def mistakes_told_plainly(local_rank: int) -> Iterator[None]:
    """The user's mistakes, ValueError and OSError here, end in their message and exit code 2."""
    try:
        yield
    except (ValueError, OSError) as error:
        if local_rank:
            time.sleep(5)  # rank 0 most likely says the same, and has all others ended by leaving
        print(f"\n{error}\n", file=sys.stderr, flush=True)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
