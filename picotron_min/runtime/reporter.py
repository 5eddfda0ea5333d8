"""What a run reports while it trains: to the console, the metrics file, wandb and the trace."""

import math
from collections.abc import Iterator
from pathlib import Path

import torch

from picotron_min.costs import parameter_count
from picotron_min.mesh import Axes
from picotron_min.pipeline_parallel import Watch
from picotron_min.runtime.config import Config
from picotron_min.runtime.console import Console, prompt_for
from picotron_min.runtime.failures import how_to_resume
from picotron_min.runtime.folders import clean_up, set_aside
from picotron_min.runtime.inputs import Inputs
from picotron_min.runtime.launch import Launch
from picotron_min.runtime.metadata import resume_warnings
from picotron_min.runtime.metrics import EvalRecord, MetricsLog, SaveRecord, StepRecord
from picotron_min.runtime.speed import Speedometer
from picotron_min.runtime.trace import Trace
from picotron_min.runtime.wording import counted, human

TRACED_STEPS = 3  # after two that warm up


class Reporter:
    """Every rank has one, and rank 0 writes. Use it as a context manager around the steps."""

    def __init__(
        self, config: Config, launch: Launch, inputs: Inputs, axes: Axes, last_step: int
    ) -> None:
        self.config, self.launch, self.inputs, self.axes = config, launch, inputs, axes
        first_step, writes = inputs.first_step, launch.rank == 0
        if writes:
            make_room(Path(config.checkpoint.save_dir), inputs.start)
        wandb_options = config.logging.use_wandb and {
            "project": config.logging.project_name,
            "name": config.logging.run_name,
            "config": config.model_dump(),
            "dir": config.checkpoint.save_dir,
        }
        self.log = MetricsLog(
            Path(config.metrics_file), writes=writes, wandb_options=wandb_options or None
        )
        self.speedometer = Speedometer(
            inputs.model_config,
            config.training.seq_length,
            config.model.recompute,
            inputs.device,
            getattr(torch, config.model.dtype),
        )
        traced = TRACED_STEPS if config.logging.trace_file else 0
        steps = range(first_step + 2, first_step + 2 + traced)
        self.trace = Trace(steps, axes.pp, inputs.device, config.distributed.pp_engine)
        self.console = Console(first_step + 1, last_step, prints=writes)
        self.console.header("picotron-min", describe(config, inputs))
        for warning in warnings(config, inputs, last_step):
            self.console.warn(warning)

    def __enter__(self) -> "Reporter":
        self.console.__enter__()
        return self

    def __exit__(self, *error) -> None:
        self.console.__exit__(*error)
        self.log.close()

    def watch(self, step: int) -> Watch:
        return self.trace.watch(step)

    def step(self, step: int, result, seconds: float) -> None:
        """Report a step, counted from 1; `result` is its train.StepResult."""
        tokens_per_step = self.inputs.batches.tokens_per_step
        speeds = self.speedometer.measure(tokens_per_step / seconds, self.config.world_size)
        record = StepRecord(
            step=step,
            loss=result.loss,
            grad_norm=result.grad_norm,
            learning_rate=result.learning_rate,
            tokens=self.inputs.batches.tokens_seen(step),
            step_seconds=seconds,
            comm_bytes=take_bytes(self.axes),
            **speeds,
        )
        self.log.write(record)
        self.console.step(record)
        if result.skipped:
            self.console.warn(f"step {step} changed nothing: its gradient is not finite")

    def evaluation(self, step: int, loss: float) -> None:
        take_bytes(self.axes)  # they are not the next step's
        bits = loss / math.log(2) * self.inputs.text.tokens_per_byte
        record = EvalRecord(step, loss, bits)
        self.log.write(record)
        self.console.evaluation(record)

    def saved(self, step: int, seconds: float) -> None:
        self.log.write(SaveRecord(step, seconds))

    def stopped(self, step: int, checkpoint: Path | None) -> None:
        how, footer = how_to_resume(checkpoint), self.launch.footer
        self.console.warn(f"stopped by SIGTERM after step {step}: {how} {footer}")

    def finished(self, model_folder: Path, checkpoint: Path | None) -> None:
        if self.config.logging.trace_file and self.axes.dp_cp_tp.rank == 0:  # one of each stage
            self.trace.write(Path(self.config.logging.trace_file))
        self.console.summary(model_folder, checkpoint, prompt_for(self.config.dataset.name))


def take_bytes(axes: Axes) -> dict[str, int]:
    """Bytes that this rank has sent over each axis since the last call, without the silent axes."""
    return {axis.name: sent for axis in axes if (sent := axis.ledger.take_bytes())}


def make_room(save_dir: Path, start: Path | None) -> None:
    """Move an earlier run out of the way, but for the checkpoint that this one resumes from."""
    resumes_here = start is not None and start.resolve().parent == save_dir.resolve()
    if leftovers := clean_up(save_dir):
        print(f"deleted what a killed save has left: {', '.join(map(str, leftovers))}")
    if aside := set_aside(save_dir, newer_than=start if resumes_here else None):
        print(f"{save_dir} held an earlier run: it is now in {aside}")


def describe(config: Config, inputs: Inputs) -> dict[str, str]:
    """What is being trained, for the console's header."""
    t, layout, batches, text = config.training, config.layout, inputs.batches, inputs.text
    sizes = " x ".join(f"{axis} {getattr(layout, axis)}" for axis in ("dp", "pp", "cp", "tp"))
    return {
        "model": f"{config.model.name}, {human(parameter_count(inputs.model_config))} parameters"
        f" in {config.model.dtype}",
        "layout": f"{config.world_size} x {inputs.device.type} over {inputs.backend}: {sizes}",
        "step": f"{human(batches.tokens_per_step)} tokens:"
        f" {counted(batches.global_batch, 'sequence')} of"
        f" {t.seq_length}, {t.micro_batch_size} a micro-batch,"
        f" {counted(t.gradient_accumulation_steps, 'micro-batch')} a rank",
        "data": f"{config.dataset.name}, {human(len(text.tokens))} tokens in"
        f" {counted(text.num_documents, 'document')};"
        f" {counted(batches.num_eval_sequences, 'sequence')} to validate",
        "tokenizer": config.tokenizer,
        "start": f"resumed from {inputs.start}"
        if inputs.start
        else config.model.weights or f"random weights, seed {t.seed}",
    }


def warnings(config: Config, inputs: Inputs, last_step: int) -> Iterator[str]:
    """What the user may not have meant when resuming."""
    if inputs.metadata:
        yield from resume_warnings(inputs.metadata, config)
    if (done := inputs.first_step) >= last_step:
        yield f"no step is left: {inputs.start} has {done} of {last_step}; its model is exported"
