"""Train a Llama:  torchrun --nproc_per_node 4 train.py --config config.json

`train` is what every process does, `train_steps` the loop, `train_step` one step. Every layout runs
these same lines; what a parallelism changes is inside the model. Without torchrun,
`python train.py --config config.json` starts the processes itself.
"""

import gc
import math
import sys
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

if __name__ == "__main__":
    # Ctrl-C leaves no traceback, not even during the imports below.
    sys.excepthook = lambda kind, *e: kind is KeyboardInterrupt or sys.__excepthook__(kind, *e)
    gc.disable()  # until start_run: collections would take a quarter of the imports' time

import torch

from picotron_min.collectives import all_reduce
from picotron_min.data import Batches
from picotron_min.extensions.build import build_model, optimizer_of
from picotron_min.extensions.settings import Recipe
from picotron_min.optimizer import learning_rate_at, measure_gradient
from picotron_min.parallelize import ParallelModel
from picotron_min.pipeline_parallel import Watch
from picotron_min.runtime.failures import RankMonitor
from picotron_min.runtime.processes import start_run
from picotron_min.runtime.saver import Saver
from picotron_min.runtime.skipped_steps import SkippedSteps

if TYPE_CHECKING:  # these need pydantic, and benchmarks take the step from this file without it
    from picotron_min.runtime.config import Config
    from picotron_min.runtime.inputs import Inputs
    from picotron_min.runtime.reporter import Reporter


def main() -> None:
    start_run(train)  # in every process, with the config that the command line names


def train(config: "Config", monitor: RankMonitor) -> None:
    """What every process does, from reading its inputs to the finished model."""
    from picotron_min.runtime.inputs import fill_weights, start_up
    from picotron_min.runtime.reporter import Reporter

    inputs, axes = start_up(config, monitor)  # all ranks are connected, and have the same settings
    settings = inputs.model_config, config.layout, config.workload
    model = build_model(*settings, axes, inputs.device)
    run = build_run(model, config.recipe, inputs.batches)
    fill_weights(run, inputs, monitor.long_group)  # initial ones, or a checkpoint's
    with Reporter(inputs, axes) as reporter:
        monitor.wait_for_all()  # some ranks read more weights, and one moves an earlier run aside
        train_steps(run, inputs, reporter, Saver(run, inputs, monitor.long_group), monitor)


def train_steps(
    run: "Run", inputs: "Inputs", reporter: "Reporter", saver: Saver, monitor: RankMonitor
) -> None:
    """Step after step, with what is reported, evaluated and saved between; then the model."""
    for step in range(inputs.first_step, inputs.last_step):
        done = step + 1  # steps are counted from 0 in the code and from 1 in messages and files
        monitor.note_step(done)
        result = train_step(run, step, reporter.begin(step))
        reporter.step(done, result)
        if inputs.evaluates_after(done):
            reporter.evaluation(done, evaluate(run))
        stops = monitor.stop_requested()  # SIGTERM, agreed on by all ranks
        saver.after(done, reporter, is_last=stops or done == inputs.last_step)
        if stops and done < inputs.last_step:
            reporter.stopped(done)
            return
    saver.export(saver.folder / "hf")
    reporter.finished()


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
        losses = model.pipeline.run(model.plan, partial(run.batches.batch, step), watch)
    for gradients in model.gradients:
        gradients.wait()  # each is now the sum over all ranks that have seen other tokens

    # The only place in a step where the host waits for a GPU, which is idle from then until the
    # optimizer is launched; while that runs, the host is already at the next step.
    of_gradient = measure_gradient(
        model.parameters, model.placements, model.axes.ranks, recipe.count_zeros
    )
    sums = torch.cat([model.counted_once(losses), of_gradient, *model.counts()])
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
        for extension, counts in model.each_with(sums[4:]):
            extension.updated(counts)
    measures = {}
    for extension, counts in model.each_with(on_host[4:]):
        measures |= extension.measures(counts)
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


if __name__ == "__main__":
    main()
