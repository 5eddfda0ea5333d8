"""Train a Llama:  torchrun --nproc_per_node 4 train.py --config config.json

The whole story, top to bottom. `main` reads the config and starts the processes. `train` is what
every process does. `train_step` is one step: forward and backward, the sum of the gradients, the
update. Every layout runs these same lines; what a parallelism changes is inside the model.
Without torchrun, `python train.py --config config.json` starts the processes itself.
"""

import argparse
import math
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist

from picotron_min.checkpoint import load, set_optimizer_steps, training_tensors
from picotron_min.collectives import all_reduce
from picotron_min.data import Batches
from picotron_min.initialise import initialise
from picotron_min.layout import Recipe
from picotron_min.mesh import Axes, build_axes, open_communicators
from picotron_min.model_config import ModelConfig
from picotron_min.optimizer import (
    Diverged,
    SkippedSteps,
    build_optimizer,
    learning_rate_at,
)
from picotron_min.parallelize import DTYPES, ParallelModel, parallelize
from picotron_min.pipeline_parallel import Watch
from picotron_min.runtime.folders import check_shared
from picotron_min.runtime.hugging_face import export_hf, read_weights
from picotron_min.runtime.launch import (
    Launch,
    open_process_group,
    set_environment,
    torchrun_launch,
)
from picotron_min.runtime.metrics import EvalRecord, MetricsLog, SaveRecord, StepRecord
from picotron_min.runtime.processes import (
    RollCall,
    how_to_go_on,
    start_processes,
    user_errors_reported,
)
from picotron_min.runtime.saver import Saver
from picotron_min.runtime.speed import Speedometer
from picotron_min.runtime.trace import Trace

if TYPE_CHECKING:  # benchmarks take the step from this file, and do without a config's libraries
    from picotron_min.runtime.config import Config
    from picotron_min.runtime.inputs import Inputs


def main() -> None:
    from picotron_min.runtime.config_checks import uses_hub
    from picotron_min.runtime.config_file import load_config

    parser = argparse.ArgumentParser(description="Train a Llama as a config.json describes.")
    parser.add_argument("--config", required=True, metavar="FILE", help="see create_config.py")
    path = parser.parse_args().config
    launch = torchrun_launch()
    with user_errors_reported(launch.local_rank if launch else 0):
        config = load_config(path, processes=launch.world_size if launch else None)
    set_environment(config.environment.TOKENIZERS_PARALLELISM, uses_hub(config))
    if launch:
        train(config, launch)
    else:
        start_processes(partial(train, config), config.world_size)


def train(config: "Config", launch: Launch) -> None:
    """What every process does, from reading its inputs to the finished model."""
    from picotron_min.runtime.inputs import read_inputs

    timeout = config.distributed.timeout_seconds
    if config.environment.OMP_NUM_THREADS:
        torch.set_num_threads(config.environment.OMP_NUM_THREADS)
    with user_errors_reported(launch.local_rank):  # before any process waits for another
        inputs = read_inputs(config, launch)
        store = launch.open_store(timeout)
    roll_call = RollCall(store, launch, timeout)
    with roll_call.failures_told(plainly=(OSError, Diverged), for_good=Diverged):
        open_process_group(launch, inputs.backend, store, timeout)
        name = roll_call.agree(inputs.in_common(config))
        check_shared(Path(config.checkpoint.save_dir), name, roll_call.group, timeout / 2)
        axes = build_axes(inputs.device, config.layout, timeout)
        open_communicators(axes, inputs.device)
        c, group = config.checkpoint, dist.new_group(backend="gloo", timeout=timedelta(hours=1))
        saver = Saver(group, inputs.device, c.in_background, c.keep)
        model = parallelize(
            inputs.model_config, config.layout, config.workload, axes, inputs.device
        )
        run = build_run(model, config.recipe, inputs.batches)
        fill_weights(run, config, inputs, group)
        loop(config, launch, inputs, run, saver, roll_call)
        dist.barrier(saver.group)  # rank 0 may have to upload to wandb
        dist.destroy_process_group()


class Run(NamedTuple):
    """One rank's part of a run: everything that a step reads and changes."""

    model: ParallelModel
    optimizer: torch.optim.Optimizer
    recipe: Recipe
    batches: Batches
    skipped: SkippedSteps


class StepResult(NamedTuple):
    loss: float  # mean over the target tokens of the global batch
    grad_norm: float  # before clipping
    learning_rate: float
    skipped: bool  # the gradient was not finite, and the weights were left as they were


def train_step(run: Run, step: int, watch: Watch | None = None) -> StepResult:
    """Train on the step-th global batch, counted from 0; for `watch` see runtime/trace.py."""
    model, recipe = run.model, run.recipe
    model.begin_step(run.batches.num_micro_batches)  # gradients are zero

    # Forward and backward of every micro-batch, in the order of the pipeline's plan. Gradients are
    # sums over tokens; a bucket's sum over the ranks starts as soon as it is complete.
    with model.autocast():
        totals = model.pipeline.run(model.plan, partial(run.batches.batch, step), watch)
    model.wait_for_gradients()

    # The only place in a step where the host waits for a GPU, which is idle from then until the
    # optimizer is launched; while that runs, the host is already at the next step.
    sums = torch.cat([model.counted_once(totals), model.squared_norm()[None]])
    loss_sum, num_targets, squares = all_reduce(sums, model.axes.world).tolist()
    norm = math.sqrt(squares) / num_targets

    rate = learning_rate_at(step, recipe)
    skip = run.skipped.record(step + 1, norm)
    if not skip:
        clip = min(1.0, recipe.grad_clip / (norm + 1e-6)) if recipe.grad_clip else 1.0
        model.scale_gradients(clip / num_targets)  # from a sum over tokens to the clipped mean
        for group in run.optimizer.param_groups:
            group["lr"] = rate
        run.optimizer.step()
    return StepResult(loss_sum / num_targets, norm, rate, skip)


@torch.no_grad()
def evaluate(run: Run) -> float:
    """The mean loss of the held-out tokens."""
    model, batches = run.model, run.batches
    model.refresh_copies()
    totals = torch.zeros(2, dtype=torch.float64, device=model.pipeline.positions.device)
    with model.autocast():
        for index in range(batches.num_eval_batches):
            totals += model.pipeline.run(model.eval_plan, partial(batches.eval_batch, index))
    loss_sum, num_targets = all_reduce(model.counted_once(totals), model.axes.world).tolist()
    return loss_sum / num_targets


def build_run(model: ParallelModel, recipe: Recipe, batches: Batches) -> Run:
    optimizer = build_optimizer(model.parameters.values(), recipe)
    return Run(model, optimizer, recipe, batches, SkippedSteps())


def fill_weights(run: Run, config: "Config", inputs: "Inputs", group: dist.ProcessGroup) -> None:
    """Load a checkpoint, or read the weights to start from, or draw them."""
    model = run.model
    if inputs.start:
        tensors = training_tensors(model.parameters, run.optimizer)
        load(inputs.start, model.parts_of_whole(tensors), group)
        run.skipped.total = inputs.metadata.skipped_steps
        set_optimizer_steps(run.optimizer, inputs.metadata.step - run.skipped.total)
    elif inputs.weights:
        read_weights(inputs.weights, model.parameters, model.placements, model.axes)
    else:
        seed, model_config = config.training.seed, inputs.model_config
        initialise(model.parameters, model_config, seed, model.placements, model.axes)
    dist.barrier(group)  # some ranks may take longer than the timeout of the other groups


def save(run: Run, config: "Config", model_config: ModelConfig, saver: Saver, step: int) -> None:
    """Write the checkpoint of this moment, `step` steps done; see Saver."""
    from picotron_min.runtime.metadata import metadata_of

    counts = {"skipped_steps": run.skipped.total, "tokens_seen": run.batches.tokens_seen(step)}
    metadata = metadata_of(config, model_config, **counts)
    tensors = training_tensors(run.model.parameters, run.optimizer)
    save_dir = Path(config.checkpoint.save_dir)
    saver.save(save_dir, step, tensors, run.model.parts_of_whole, metadata)


def export(run: Run, config: "Config", inputs: "Inputs", saver: Saver, folder: Path) -> None:
    """Write the model as a Hugging Face folder, in the dtype it was computed in."""
    model, dtype = run.model, DTYPES[config.model.dtype]
    weights = {name: p.data.to(dtype) for name, p in model.parameters.items()}
    export_hf(
        folder, model.parts_of_whole(weights), inputs.model_config, inputs.tokenizer, saver.group
    )


def loop(
    config: "Config", launch: Launch, inputs: "Inputs", run: Run, saver: Saver, roll_call: RollCall
) -> None:
    """Step after step, with all that is reported and saved on the way; then the finished model."""
    from picotron_min.runtime.console import Console
    from picotron_min.runtime.inputs import describe, doubts, make_room, wandb_options

    t, data, save_dir = config.training, run.batches, Path(config.checkpoint.save_dir)
    model, first_step, last_step = run.model, inputs.first_step, t.total_train_steps
    if t.max_tokens:
        last_step = min(last_step, data.steps_for(t.max_tokens))
    is_writer = launch.rank == 0
    if is_writer:
        make_room(save_dir, inputs.start)
    if inputs.start:
        roll_call.note_saved(inputs.start)
    log = MetricsLog(
        Path(config.metrics_file), writes=is_writer, wandb_options=wandb_options(config)
    )
    speedometer = Speedometer(
        inputs.model_config,
        t.seq_length,
        config.model.recompute,
        inputs.device,
        DTYPES[config.model.dtype],
    )
    traced_steps = 3 if config.logging.trace_file else 0  # after two that warm up
    traced = range(first_step + 2, first_step + 2 + traced_steps)
    trace = Trace(traced, model.axes.pp, inputs.device, config.distributed.pp_engine)
    roll_call.listen_for_sigterm()
    with Console(first_step + 1, last_step, prints=is_writer) as console:
        console.header("picotron-min", describe(config, inputs))
        for warning in doubts(config, inputs, last_step):
            console.warn(warning)
        for step in range(first_step, last_step):
            roll_call.note_step(step + 1)
            began = time.perf_counter()
            result = train_step(run, step, trace.watch(step))
            done = step + 1
            seconds = time.perf_counter() - began
            record = StepRecord(
                step=done,
                loss=result.loss,
                grad_norm=result.grad_norm,
                learning_rate=result.learning_rate,
                tokens=data.tokens_seen(done),
                step_seconds=seconds,
                comm_bytes=take_bytes(model.axes),
                **speedometer.measure(data.tokens_per_step / seconds, config.world_size),
            )
            log.write(record)
            console.step(record)
            if result.skipped:
                console.warn(f"step {done} changed nothing: its gradient is not finite")
            if data.num_eval_batches and due(done, t.eval_frequency, last_step):
                loss = evaluate(run)
                take_bytes(model.axes)  # they are not the next step's
                record = EvalRecord(done, loss, loss / math.log(2) * inputs.text.tokens_per_byte)
                log.write(record)
                console.evaluation(record)
            saver.check()
            stops = roll_call.stop_agreed()
            is_last = stops or done == last_step
            saves = is_last or due(done, config.checkpoint.save_frequency, last_step)
            # What a skipped step leaves has learned nothing, or may have diverged: to save it could
            # cost a good checkpoint, by `keep`.
            if saves and run.skipped.has_learned and (is_last or not result.skipped):
                began = time.perf_counter()
                save(run, config, inputs.model_config, saver, done)
                log.write(SaveRecord(done, time.perf_counter() - began))
            if stops or done == last_step:
                saver.wait()
            if saver.latest:
                roll_call.note_saved(saver.latest)
            if stops and done < last_step:
                how = how_to_go_on(saver.latest or inputs.start)
                console.warn(f"stopped by SIGTERM after step {done}: {how}")
                log.close()
                return
    export(run, config, inputs, saver, save_dir / "hf")
    if config.logging.trace_file and model.axes.dp_cp_tp.rank == 0:  # one of each stage
        trace.write(Path(config.logging.trace_file))
    console.summary(save_dir / "hf", saver.latest or inputs.start)
    log.close()


def take_bytes(axes: Axes) -> dict[str, int]:
    """Bytes that this rank has sent over each axis since the last time, without the silent ones."""
    return {axis.name: sent for axis in axes if (sent := axis.ledger.take_bytes())}


def due(done: int, every: int, last_step: int) -> bool:
    """After every so many steps (0: none), and always after the last."""
    return done == last_step or (every > 0 and done % every == 0)


if __name__ == "__main__":
    main()
