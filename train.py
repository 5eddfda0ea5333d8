"""Train a Llama:  torchrun --nproc_per_node 4 train.py --config config.json

`main` reads the config and starts the processes, `train` is what every process does, `train_step`
is one step. Every layout runs these same lines; what a parallelism changes is inside the model.
Without torchrun, `python train.py --config config.json` starts the processes itself.
"""

import argparse
import math
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if __name__ == "__main__":  # Ctrl-C leaves no traceback, not even during the imports below
    sys.excepthook = lambda kind, *e: kind is KeyboardInterrupt or sys.__excepthook__(kind, *e)

import torch

from picotron_min.checkpoint import load, set_optimizer_steps, training_tensors
from picotron_min.collectives import all_reduce
from picotron_min.data import Batches
from picotron_min.extensions.build import build_model, optimizer_of
from picotron_min.extensions.settings import ModelConfig, Recipe
from picotron_min.initialise import initialise
from picotron_min.mesh import build_axes, open_communicators
from picotron_min.optimizer import SkippedSteps, learning_rate_at, measure_gradient
from picotron_min.parallelize import ParallelModel
from picotron_min.pipeline_parallel import Watch
from picotron_min.runtime.failures import RollCall, launched
from picotron_min.runtime.folders import check_shared
from picotron_min.runtime.hugging_face import export_hf, load_hf
from picotron_min.runtime.launch import (
    exit_on_usage_error,
    return_freed_memory,
    set_environment,
    torchrun_launch,
)
from picotron_min.runtime.processes import start_processes
from picotron_min.runtime.saver import Saver

if TYPE_CHECKING:
    from picotron_min.runtime.config import Config
    from picotron_min.runtime.inputs import Inputs
    from picotron_min.runtime.launch import Launch


def main() -> None:
    # Imports inside functions need pydantic: benchmarks take the step from this file without it.
    from picotron_min.runtime.config_checks import uses_hub
    from picotron_min.runtime.config_file import load_config

    parser = argparse.ArgumentParser(description="Train a Llama as a config.json describes.")
    parser.add_argument("--config", required=True, metavar="FILE", help="see create_config.py")
    path = parser.parse_args().config
    with exit_on_usage_error(launch=None):
        launch = torchrun_launch()  # None without torchrun
    with exit_on_usage_error(launch):
        config = load_config(path, processes=launch.world_size if launch else None)
    set_environment(config.environment.TOKENIZERS_PARALLELISM, uses_hub(config))
    if config.layout.sharding != "none":
        return_freed_memory()
    if launch:
        train(config, launch)
    else:
        start_processes(partial(train, config), config.world_size)


def train(config: "Config", launch: "Launch") -> None:
    """What every process does, from reading its inputs to the finished model."""
    from picotron_min.runtime.inputs import read_inputs

    timeout, saves = config.distributed.timeout_seconds, config.checkpoint
    if config.environment.OMP_NUM_THREADS:
        torch.set_num_threads(config.environment.OMP_NUM_THREADS)
    # The roll call is how processes find each other, agree, and report why one of them failed.
    with launched(launch, timeout) as roll_call:
        inputs = read_inputs(config, launch)  # before ranks wait for each other
        device = inputs.device  # a GPU of its own, or the CPU
        roll_call.connect(inputs.backend, device)
        run_name = roll_call.agree(inputs.in_common())  # or an error: settings must be the same
        check_shared(Path(saves.save_dir), run_name, roll_call.group, timeout / 2)  # by all nodes

        axes = build_axes(device, config.layout, timeout)
        open_communicators(axes)  # in the same order on all ranks
        model = build_model(inputs.model_config, config.layout, config.workload, axes, device)
        run = build_run(model, config.recipe, inputs.batches)
        fill_weights(run, inputs, roll_call)
        roll_call.wait_for_all()  # some may have read or drawn their weights faster
        saver = Saver(roll_call.long_group, device, saves.in_background, saves.keep, inputs.start)
        train_steps(run, inputs, saver, roll_call)


class Run(NamedTuple):
    """One rank's part of a run: everything that a step reads and changes."""

    model: ParallelModel  # of this rank, with the pipeline that runs it
    optimizer: torch.optim.Optimizer
    recipe: Recipe
    batches: Batches
    skipped: SkippedSteps  # those whose gradient was not finite


class StepResult(NamedTuple):
    loss: float  # mean over the target tokens of the global batch
    grad_norm: float  # before clipping
    learning_rate: float
    skipped: bool  # the gradient was not finite, and the weights were left as they were
    num_zeros: float  # in the gradient; 0 if they are not counted
    measures: dict[str, object]  # what extensions report of the step


def train_step(run: Run, step: int, watch: Watch | None = None) -> StepResult:
    """Train on the step-th global batch, counted from 0; for `watch` see runtime/trace.py."""
    model, recipe = run.model, run.recipe
    for gradients in model.gradients:
        gradients.begin(run.batches.num_micro_batches)  # they are zero
    for extension in model.extensions:
        extension.begin()

    # Forward and backward of every micro-batch, in the order of the plan: F0 B0 F1 B1 ... where
    # there is one stage. Gradients are sums over tokens; a bucket's sum over the ranks starts as
    # soon as it is complete.
    with model.autocast():
        totals = model.pipeline.run(model.plan, partial(run.batches.batch, step), watch)
    for gradients in model.gradients:
        gradients.wait()  # every one is the sum over all ranks that see other tokens

    # The only place in a step where the host waits for a GPU, which is idle from then until the
    # optimizer is launched; while that runs, the host is already at the next step.
    of_gradient = measure_gradient(
        model.parameters, model.placements, model.axes.ranks, recipe.count_zeros
    )
    sums = torch.cat([model.counted_once(totals), of_gradient, *model.counts()])
    all_reduce(sums, model.axes.world)
    on_host = sums.cpu()  # all at once: the report, too, must not wait again
    loss_sum, num_targets, squares, num_zeros = on_host[:4].tolist()
    norm = math.sqrt(squares) / num_targets

    rate = learning_rate_at(step, recipe)
    skip = run.skipped.must_skip(step + 1, norm)
    if not skip:
        clip = min(1.0, recipe.grad_clip / (norm + 1e-6)) if recipe.grad_clip else 1.0
        for gradients in model.gradients:
            gradients.scale(clip / num_targets)  # from a sum over tokens to the clipped mean
        for group in run.optimizer.param_groups:
            group["lr"] = rate
        run.optimizer.step()
        model.weights_changed()
        for extension, totals in model.each_with(sums[4:]):
            extension.updated(totals)
    measures = {}
    for extension, totals in model.each_with(on_host[4:]):
        measures |= extension.measures(totals)
    return StepResult(loss_sum / num_targets, norm, rate, skip, num_zeros, measures)


@torch.no_grad()
def evaluate(run: Run) -> float:
    """The mean loss of the held-out tokens."""
    model, batches, totals = run.model, run.batches, 0.0
    with model.autocast():
        for index in range(batches.num_eval_batches):
            totals += model.pipeline.run(model.eval_plan, partial(batches.eval_batch, index))
    loss_sum, num_targets = all_reduce(model.counted_once(totals), model.axes.world).tolist()
    return loss_sum / num_targets


def build_run(model: ParallelModel, recipe: Recipe, batches: Batches) -> Run:
    return Run(model, optimizer_of(model, recipe), recipe, batches, SkippedSteps())


def fill_weights(run: Run, inputs: "Inputs", roll_call: RollCall) -> None:
    """Load a checkpoint, or read the weights to start from, or draw them."""
    model = run.model
    if inputs.start:
        tensors = training_tensors(model.parameters, model.buffers, run.optimizer)
        load(inputs.start, model.parts_of_whole(tensors), roll_call.long_group)
        roll_call.note_saved(inputs.start)
        run.skipped.total = inputs.metadata.skipped_steps
        set_optimizer_steps(run.optimizer, inputs.metadata.step - run.skipped.total)
    elif inputs.weights:
        weights = {name: p.data for name, p in model.parameters.items()} | model.buffers
        load_hf(inputs.weights, model.parts_of_whole(weights), roll_call.long_group)
    else:
        seed, model_config = inputs.config.training.seed, inputs.model_config
        initialise(model.parameters, model_config, seed, model.placements, model.axes)
    model.weights_changed()


def train_steps(run: Run, inputs: "Inputs", saver: Saver, roll_call: RollCall) -> None:
    """Step after step, with what is evaluated, saved and reported between; then the model."""
    from picotron_min.runtime.reporter import Reporter

    def is_due(done: int, every: int) -> bool:  # every so many steps (0: none), and after the last
        return done == inputs.last_step or (every > 0 and done % every == 0)

    config, save_is_due = inputs.config, False
    with Reporter(inputs, run.model.axes) as reporter:
        for step in range(inputs.first_step, inputs.last_step):
            done = step + 1
            roll_call.note_step(done)
            began = time.perf_counter()
            result = train_step(run, step, reporter.trace.watch(step))
            reporter.step(done, result, time.perf_counter() - began)
            if run.batches.num_eval_batches and is_due(done, config.training.eval_frequency):
                reporter.evaluation(done, evaluate(run))
            stops = roll_call.stop_requested()
            is_last = stops or done == inputs.last_step
            # What a skipped step leaves has learned nothing, or may have diverged: to save it could
            # cost a good checkpoint, by `keep`. The next good step saves instead.
            save_is_due = save_is_due or is_last or is_due(done, config.checkpoint.save_frequency)
            if save_is_due and run.skipped.has_learned and (is_last or not result.skipped):
                began = time.perf_counter()
                save(run, config, inputs.model_config, saver, done)
                reporter.saved(done, time.perf_counter() - began)
                save_is_due = False
            saver.wait(until_written=is_last)
            if saver.latest:
                roll_call.note_saved(saver.latest)
            if stops and done < inputs.last_step:
                reporter.stopped(done, saver.latest, roll_call.launch.footer)
                return
        folder = Path(config.checkpoint.save_dir, "hf")
        export(run, inputs, folder, roll_call)
        reporter.finished(folder, saver.latest)


def save(run: Run, config: "Config", model_config: ModelConfig, saver: Saver, step: int) -> None:
    """Write a checkpoint after `step` steps; see Saver."""
    from picotron_min.runtime.metadata import metadata_of

    counts = {"skipped_steps": run.skipped.total, "tokens_seen": run.batches.tokens_seen(step)}
    metadata = metadata_of(config, model_config, step=step, **counts)
    tensors = training_tensors(run.model.parameters, run.model.buffers, run.optimizer)
    saver.save(Path(config.checkpoint.save_dir), tensors, run.model.parts_of_whole, metadata)


def export(run: Run, inputs: "Inputs", folder: Path, roll_call: RollCall) -> None:
    """Write the model as a Hugging Face folder, in the dtype it was computed in."""
    model, dtype = run.model, getattr(torch, inputs.config.model.dtype)
    weights = {name: p.data.to(dtype) for name, p in model.parameters.items()} | model.buffers
    parts = model.parts_of_whole(weights)
    export_hf(folder, parts, inputs.model_config, inputs.tokenizer, roll_call.long_group)


if __name__ == "__main__":
    main()
