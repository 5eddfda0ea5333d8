"""Reports: what a run prints and records while it trains, and the settings it begins with."""

import math
import platform
import time
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import datetime, timezone
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from picotron_min.costs import model_flops_per_token, parameter_count
from picotron_min.mesh import Axes
from picotron_min.pipeline_parallel import Watch
from picotron_min.runtime.architectures import without_form
from picotron_min.runtime.console import Console
from picotron_min.runtime.failures import how_to_resume
from picotron_min.runtime.folders import find_start, make_room
from picotron_min.runtime.hardware import active_parameter_count
from picotron_min.runtime.hugging_face import layers_left_out
from picotron_min.runtime.inputs import Inputs
from picotron_min.runtime.metadata import resume_warnings
from picotron_min.runtime.metrics import (
    RUN_LOG,
    EvalRecord,
    MetricsLog,
    Rank,
    Ranks,
    SaveRecord,
    Sent,
    Start,
    StepRecord,
    append_event,
)
from picotron_min.runtime.speed import device_name, memory_gb, peak_flops, speeds
from picotron_min.runtime.trace import Trace
from picotron_min.runtime.wording import counted, human


class Reporter(ExitStack):
    """Every rank has one, and rank 0 writes. Use it as a context manager around the steps."""

    def __init__(self, inputs: Inputs, axes: Axes) -> None:
        super().__init__()
        self.inputs, self.axes, config = inputs, axes, inputs.config
        logging, save_dir, writes = config.logging, config.checkpoint.save_dir, axes.world.rank == 0
        done, last = inputs.first_step, inputs.last_step
        # A CPU takes up to a second to measure: only for the rank whose records are read.
        self.peak = peak_flops(inputs.device, config.workload.dtype) if writes else None
        self.start = start_of(inputs, self.peak)
        self.run_log = Path(save_dir, RUN_LOG) if writes else None
        if writes:
            make_room(Path(save_dir), inputs.start)
            for path in filter(None, (config.metrics_file, logging.trace_file)):
                Path(path).parent.mkdir(parents=True, exist_ok=True)
                Path(path).open("a").close()  # an OSError now, not at the end
            append_event(self.run_log, self.start)
        wandb = None
        if writes and logging.use_wandb:
            wandb = {"project": logging.project_name, "name": logging.run_name}
            wandb |= {"dir": save_dir, "config": config.model_dump()}
        self.log = MetricsLog(Path(config.metrics_file) if writes else None, wandb)
        self.callback(self.log.close)
        first = max(done, min(done + 2, last - 3))  # after two that warm up, if there are others
        traced = range(first, first + 3) if logging.trace_file else ()
        self.trace = Trace(traced, axes.pp, inputs.device, config.distributed.pp_engine)
        # The first step may also have what was sent before it.
        self.measured_step = min(done + 2, last)
        line_out = partial(print, flush=True) if writes else lambda line: None
        self.console = Console(done + 1, last, line_out)
        self.console.header("picotron-min", self.start.header)
        for warning in warnings_of(inputs):
            self.console.warn(warning)
        self.callback(self.console.print_step)  # of a run that stops early

    def begin(self, step: int) -> Watch:
        """Start the clock of a step, counted from 0; returns its trace's context."""
        self.began = time.perf_counter()
        return self.trace.watch(step)

    def step(self, step: int, result) -> None:
        """Report a step, counted from 1, at its end; `result` is its train.StepResult."""
        seconds = time.perf_counter() - self.began
        if step == self.measured_step:
            self.measure_ranks(step)
        config, batches = self.inputs.config, self.inputs.batches
        measures, attended = dict(result.measures), None
        if not config.logging.moe_per_layer_logging:
            measures = {k: v for k, v in measures.items() if not k.endswith("_per_layer")}
        if config.recipe.count_zeros:
            measures["num_zeros_in_grad"] = int(result.num_zeros)
        if config.dataset.document_mask and self.run_log:  # for what this rank writes
            attended = batches.attended_length(step - 1)
        speed = batches.tokens_per_step / seconds
        of = self.inputs.model_config, config.workload, self.inputs.device, self.peak, speed
        record = StepRecord(
            step=step,
            loss=result.loss,
            grad_norm=result.grad_norm,
            learning_rate=result.learning_rate,
            tokens=batches.tokens_seen(step),
            step_seconds=seconds,
            comm_bytes=take_bytes(self.axes),
            measures=measures,
            **speeds(*of, config.world_size, attended),
        )
        self.log.write(record)
        self.console.step(record)
        if result.skipped:
            self.console.warn(f"step {step} changed nothing: its gradient is not finite")

    def measure_ranks(self, step: int) -> None:
        """Gather what every rank measured, for the report: records of steps are of one rank."""
        sent = {
            axis.name: {
                name: Sent(calls=axis.ledger.calls[name], bytes=round(number))
                for name, number in axis.ledger.bytes.items()
            }
            for axis in self.axes
            if axis.ledger.bytes.total()
        }
        mine = Rank(memory_gb=memory_gb(self.inputs.device), sent=sent)
        ranks = [None] * self.axes.world.size if self.run_log else None
        dist.gather_object(mine, ranks, group=self.axes.world.group, group_dst=0)
        if self.run_log:
            append_event(self.run_log, Ranks(step=step, ranks=ranks))

    def evaluation(self, step: int, loss: float) -> None:
        take_bytes(self.axes)  # or the next step would report them
        per_byte = self.inputs.text.tokens_per_byte
        record = EvalRecord(step, loss, per_byte and loss / math.log(2) * per_byte)
        self.log.write(record)
        self.console.evaluation(record)

    def saved(self, step: int, seconds: float) -> None:
        self.log.write(SaveRecord(step, seconds))

    def stopped(self, step: int) -> None:
        how = how_to_resume(self.inputs.config.checkpoint.save_dir)
        self.console.warn(f"stopped by SIGTERM after step {step}: {how}")

    def finished(self) -> None:
        config, save_dir = self.inputs.config, self.inputs.config.checkpoint.save_dir
        if config.logging.trace_file and self.axes.dp_cp_tp.rank == 0:  # one of each stage
            self.trace.write(Path(config.logging.trace_file), self.start.at.isoformat())
        self.log.close()  # wandb prints a summary of its own, above this one
        newest = find_start("latest", Path(save_dir))
        is_exported = not without_form(self.inputs.model_config)
        self.console.summary(save_dir, newest, config.dataset.name, is_exported)


def take_bytes(axes: Axes) -> dict[str, int]:
    """Bytes that this rank has sent over each axis since the last call, without the silent axes."""
    return {axis.name: sent for axis in axes if (sent := axis.ledger.take_bytes())}


def warnings_of(inputs: Inputs) -> Iterator[str]:
    config, done, last = inputs.config, inputs.first_step, inputs.last_step
    if inputs.metadata:
        yield from resume_warnings(inputs.metadata, config, inputs.data)
    for key in ("log_energy", "log_bound"):
        if getattr(config.logging, key):
            yield f"logging.{key}=true has no effect any more: leave it out"
    if problem := without_form(inputs.model_config):
        yield f"{problem}. Without, the run leaves checkpoints, and no model in transformers' form"
    text, batches = inputs.text, inputs.batches
    if left := text.not_read:
        names = ", ".join(left[:5]) + f" and {len(left) - 5} more" * (len(left) > 5)
        kinds = "of another kind, or hidden"
        yield f"{counted(len(left), 'file')} of dataset.name not read ({kinds}): {names}"
    if text.with_end_inside:
        what = f"{counted(text.with_end_inside, 'document')} with the end-of-text token inside"
        yield f"{what}: a token of the tokenizer that is written in a text becomes that token"
    if batches.num_sequences < batches.global_batch:
        each = f"each step of {counted(batches.global_batch, 'sequence')} repeats some"
        yield f"the text has {counted(batches.num_sequences, 'sequence')} to train on: {each}"
    if inputs.weights and (left := layers_left_out(inputs.weights, inputs.model_config)):
        yield f"model.weights has {counted(len(left), 'prediction layer')} more, which are left out"
    if done >= last:
        yield f"no step is left: {inputs.start} has {done} of {last}; its model is exported"


def start_of(inputs: Inputs, peak: float | None) -> Start:
    versions = {"Python": platform.python_version(), "torch": torch.__version__}
    if inputs.device.type == "cuda":
        versions["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    return Start(
        at=datetime.now(timezone.utc),
        after_step=inputs.first_step,
        header=describe(inputs),
        device=device_name(inputs.device),
        backend=inputs.backend,
        versions=versions,
        peak_flops=peak,
        model=inputs.model_config,
        config=inputs.config,
    )


def describe(inputs: Inputs) -> dict[str, str]:
    """What is being trained, for the console's header."""
    config, batches, text, shape = inputs.config, inputs.batches, inputs.text, inputs.model_config
    t, m, layout = config.training, config.model, config.layout
    numbers = f"{human(parameter_count(shape))} parameters"
    sizes = " x ".join(f"{axis} {getattr(layout, axis)}" for axis in ("dp", "pp", "cp", "tp"))
    sizes += f", {layout.pp_engine}" if layout.pp > 1 else ""
    sizes += f", sharding {layout.sharding}" if layout.sharding != "none" else ""
    if shape.num_local_experts:
        numbers += f", of which {human(active_parameter_count(shape))} active a token,"
        sizes += f", ep {layout.ep} x etp {layout.etp}"
    flops = human(model_flops_per_token(shape, t.seq_length))
    apart = ", apart" if config.dataset.document_mask else ""
    if config.dataset.packing == "bfd":
        apart += f", best fit with {batches.padding:.1%} padding"
    device = inputs.device.type
    if device == "cpu" and not config.distributed.use_cpu:
        device = "cpu (torch finds no GPU)"
    begins = m.weights or f"random weights, seed {t.seed}"
    return {
        "model": f"{m.name}, {numbers} in {m.dtype}"
        f"{', linears in FP8' * m.fp8}{', experts in FP8' * m.fp8_experts}",
        "layout": f"{config.world_size} x {device} over {inputs.backend}: {sizes}",
        "step": f"{human(batches.tokens_per_step)} tokens:"
        f" {counted(batches.global_batch, 'sequence')} of {t.seq_length}, {t.micro_batch_size}"
        f" a micro-batch, {counted(t.gradient_accumulation_steps, 'micro-batch')} a rank",
        "optimizer": f"{t.optimizer}, learning rate {t.learning_rate:g} ({t.schedule}, with"
        f" {t.warmup_steps} of {t.total_train_steps} steps to warm up)",
        "data": f"{config.dataset.name}, {human(len(text.tokens))} tokens"
        f" in {counted(text.num_documents, 'document')}{apart};"
        f" {counted(batches.num_eval_sequences, 'sequence')} to validate",
        "tokenizer": config.tokenizer,
        "MFU": f"{flops} FLOPs a token: matmuls, causal half of attention"
        + (", less by the lengths of documents" if apart else ""),
        "start": f"resumed from {inputs.start}" if inputs.start else begins,
    }
