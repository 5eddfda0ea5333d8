"""Runs: processes that train, and what each of them has noted.

Nothing is gathered by messages, which could be what is wrong: each process writes a file.
"""

import contextlib
import multiprocessing
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import BinaryIO, NamedTuple

import torch
import torch.distributed as dist

import train
from difference.taps import Key, Notes, Record, attach, place_of
from difference.tiny import Text, Trial, open_text, text_of
from picotron_min import data_parallel, layout
from picotron_min.extensions.build import build_model
from picotron_min.initialise import initialise
from picotron_min.mesh import build_axes
from picotron_min.pipeline_schedule import Kind
from picotron_min.placement import part
from picotron_min.runtime.launch import listen_on_loopback

BUCKET_BYTES, STRIPE_ROWS = 20_000, 24  # several of each, also in a tiny model


class Run(NamedTuple):
    records: list[Record]
    problem: str = ""  # how it ended, if not well
    failed_at: float = 0.0  # those that wait for it fail later; 0: it was killed


def run_in_processes(main: Callable, count: int, trial: Trial) -> list[Run]:
    """What `count` processes have noted, also one that has been killed."""
    listen_on_loopback()
    # Without names: nothing is left of them after Ctrl-C.
    files = [tempfile.TemporaryFile(buffering=0) for _ in range(count)]  # noqa: SIM115
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        one = partial(_run_one, main, count, trial, f"{folder}/store")
        fork = multiprocessing.get_context("fork").Process
        ranks = [fork(target=one, args=job, daemon=True) for job in enumerate(files)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()  # where one fails, the messages of the others do
    return [_read(file, of.exitcode) for file, of in zip(files, ranks, strict=True)]


def _read(file: BinaryIO, code: int) -> Run:
    file.seek(0)
    found = []
    with contextlib.suppress(EOFError, pickle.UnpicklingError):  # the last may be incomplete
        while True:
            found.append(pickle.load(file))
    if found and isinstance(found[-1], Run):
        return found.pop()._replace(records=found)
    return Run(found, f"it ended with code {code}")


def _run_one(
    main: Callable, count: int, trial: Trial, store: str, rank: int, file: BinaryIO
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it without a traceback
    torch.set_num_threads(1)
    notes, end = Notes(file), Run([])
    try:
        files, wait = dist.FileStore(store, count), timedelta(seconds=trial.wait)
        group = {"store": files, "rank": rank, "world_size": count, "timeout": wait}
        dist.init_process_group("gloo", **group)
        sys.setprofile(notes.profile)
        main(notes, trial, text_of(trial))
        sys.setprofile(None)
        dist.barrier()
    except Exception as error:
        sys.setprofile(None)
        places = (place_of(of.f_code) for of, _ in traceback.walk_tb(error.__traceback__))
        problem = f"{type(error).__name__}: {error}"[:150].partition("\n")[0]
        end = Run([], " in ".join([problem, *[*filter(None, places)][-1:]]), time.time())
    pickle.dump(end, file)


def train_layout(notes: Notes, trial: Trial, text: Text) -> None:
    """One rank of the layout: train_step, unchanged, with taps."""
    run = build(trial, text)
    model, parameters, axes = run.model, run.model.parameters, run.model.axes
    notes.note("initial weight", parameters)
    shapes = trial.model_config.parameter_shapes()
    dp = trial.layout.coordinates(dist.get_rank()).dp  # whatever the mesh says
    for name in parameters:
        owned = part(shapes[name], model.placements[name].owned, axes.ranks, axes.sizes)
        notes.note("cuts", {name: torch.tensor([(s.start, s.stop) for s in owned])})
    models = [chunk.model for chunk in model.pipeline.chunks]
    for stage in models:
        attach(stage, notes)
    measure = train.measure_gradient

    def measured(*args):  # by now all gradients are sums
        notes.at = Key(notes.at.step, "", "")
        notes.note_gradients("summed gradient", parameters)
        return measure(*args)

    @contextlib.contextmanager
    def watch(action):
        notes.at = Key(notes.at.step, "", "", action.micro_batch, dp)
        notes.again = action.kind is not Kind.FORWARD  # recomputed, in a backward
        yield

    train.measure_gradient = measured
    scaled = partial(notes.note_gradients, "scaled gradient", parameters)
    run.optimizer.register_step_pre_hook(lambda *_: scaled())
    for step in range(trial.steps):
        notes.at = Key(step, "", "")
        result = train.train_step(run, step, watch)
        for phase, number in ("loss", result.loss), ("gradient norm", result.grad_norm):
            notes.note(phase, {"the step": torch.tensor(number, dtype=torch.float64)})
        notes.note_weights(parameters, models)


def build(trial: Trial, text: Text) -> train.Run:
    """A rank's part of a run, with initial weights."""
    # So that a tiny model, too, has several buckets and several stripes.
    layout.STRIPE_ROWS["cpu"] = STRIPE_ROWS
    buckets = partial(data_parallel.GradientBuckets, bucket_bytes=BUCKET_BYTES)
    data_parallel.GradientBuckets = buckets
    config, device = trial.model_config, torch.device("cpu")
    axes = build_axes(device, trial.layout, trial.wait)
    batches = open_text(trial, text, trial.workload.micro_batch_size, axes)
    model = build_model(config, trial.layout, trial.workload, axes, device)
    run = train.build_run(model, trial.recipe, batches)
    initialise(model.parameters, config, trial.seed, model.placements, axes)
    model.weights_changed()
    return run
