"""Runs: the layout's own run, in forked processes over gloo; each writes a file of what it sees.

Nothing is gathered by messages, which could be what is wrong. A rank that dies leaves its records.
"""

import contextlib
import multiprocessing
import os
import pickle
import re
import signal
import sys
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import train
from difference.places import here
from difference.taps import Key, Notes, Profile, Record, attach, outer
from difference.tiny import BUCKET_BYTES, STRIPE_ROWS, Text, Trial
from difference.watch import Watch
from picotron_min import data_parallel, layout
from picotron_min.context_parallel import POSITIONS
from picotron_min.extensions.build import build_model, open_batches
from picotron_min.initialise import initialise
from picotron_min.mesh import build_axes
from picotron_min.pipeline_schedule import Action, Kind
from picotron_min.placement import part
from picotron_min.runtime.failures import GLOO
from picotron_min.runtime.launch import listen_on_loopback


class RankRun(NamedTuple):
    records: list[Record]
    failed_at: float
    problem: str = ""  # how it ended, if not well
    stack: Sequence[tuple[str, int]] = ()  # functions and lines, the innermost call first
    ran: Sequence[str] = ()  # the last functions, the last call first; if killed, those running
    lost: bool = False  # it only waited for a rank that had failed
    makers: Mapping[str, str] = {}  # see Profile
    senders: Collection[str] = ()  # see Profile


def run_ranks(trial: Trial, text: Text, folder: Path) -> list[RankRun]:
    """Train in the layout's processes; what each of them has noted, and how it ended."""
    context = multiprocessing.get_context("fork")
    listen_on_loopback()
    files = [folder / f"rank{rank}" for rank in range(trial.layout.world_size)]
    ranks = [context.Process(target=_on_rank, args=(trial, text, file)) for file in files]
    try:
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()  # where one fails, the messages of the others do
    finally:
        for process in ranks:
            process.kill()
            process.join()
    return [_outcome(file, process.exitcode) for file, process in zip(files, ranks, strict=True)]


def _outcome(file: Path, code: int) -> RankRun:
    records, end, at = [], None, file.stat().st_mtime
    with file.open("rb") as stream, contextlib.suppress(EOFError, pickle.UnpicklingError):
        while not end:  # up to the last that is complete
            key, values, *more = pickle.load(stream)
            if not key:
                end = values
            else:
                records.append(Record(Key(*key), torch.from_numpy(values), *more))
    if end is not None:
        return RankRun(records, at, **end)
    how = "it was killed" if code == -signal.SIGKILL else f"it ended with code {code}"
    if not records:
        return RankRun(records, at, how)
    step, phase, name, *_ = records[-1].key
    how += f" in step {step + 1}, after {phase} of {name}"
    return RankRun(records, at, how, ran=records[-1].running)


def _on_rank(trial: Trial, text: Text, file: Path) -> None:
    torch.set_num_threads(1)
    rank, size = int(file.name.removeprefix("rank")), trial.layout.world_size
    profile, end = Profile(), {"problem": ""}
    with file.open("wb", buffering=0) as stream:
        try:
            store = dist.FileStore(str(file.with_name("store")), size)
            wait = timedelta(seconds=trial.wait)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=wait)
            sys.setprofile(profile.event)
            Rank(trial, text, rank, stream, profile).run()
            sys.setprofile(None)
            dist.barrier()
        except BaseException as error:
            sys.setprofile(None)
            message = re.sub(r"^\[\S+:\d+\] ", "", str(error))  # without a place in gloo's source
            frames = reversed([*traceback.walk_tb(error.__traceback__)])
            stack = [(outer(n), line) for f, line in frames for n in profile.names_of([f])]
            end = {"problem": f"{type(error).__name__}: {message.partition(chr(10))[0][:150]}"}
            end |= {"stack": stack, "ran": [*reversed(profile.called)][:2]}
            end["lost"] = isinstance(error, RuntimeError) and bool(GLOO.search(str(error)))
        pickle.dump((None, end | {"makers": profile.makers, "senders": profile.senders}), stream)
    os._exit(bool(end["problem"]))


class Rank(Notes):
    """One rank of the layout: train_step, unchanged, with taps."""

    def __init__(self, trial: Trial, text: Text, rank: int, stream, profile: Profile) -> None:
        self.trial, self.stream, self.profile, self.ran = trial, stream, profile, profile.take
        self.here = here(rank, trial.layout)
        # So that a tiny model, too, has several buckets and several stripes.
        layout.STRIPE_ROWS["cpu"] = STRIPE_ROWS
        buckets = partial(data_parallel.GradientBuckets, bucket_bytes=BUCKET_BYTES)
        data_parallel.GradientBuckets = buckets
        self._build(text)

    def write(self, key: Key, tensor: Tensor, ran: tuple) -> None:
        self.stream.write(pickle.dumps((tuple(key), tensor.numpy(), *ran)))  # at once

    def _build(self, text: Text) -> None:
        trial, w, size = self.trial, self.trial.workload, self.trial.layout
        device = torch.device("cpu")
        axes = build_axes(device, size, trial.wait)
        sizes = {"seq_length": w.seq_length, "micro_batch_size": w.micro_batch_size}
        sizes |= {"num_micro_batches": w.num_micro_batches, "dp_size": size.dp}
        positions = POSITIONS[size.cp_engine](axes.cp.rank, size.cp, w.seq_length)
        mine = {"seed": trial.seed, "dp_rank": axes.dp.rank, "positions": positions}
        batches = open_batches(w, trial.depths, text, **sizes, **mine)
        ranks = [axes[name].rank for name in ("pp", "dp", "cp", "tp")]
        self.note("built", {"place in the mesh": torch.tensor(ranks)})
        self.model = build_model(trial.model_config, size, w, axes, device)
        self.trained = train.build_run(self.model, trial.recipe, batches)
        settings = trial.model_config, trial.seed, self.model.placements, axes
        initialise(self.model.parameters, *settings)
        self.model.weights_changed()
        self.note("initial", self.model.parameters)
        self.profile.watch = Watch(self)
        self.note("cuts", {name: self._cuts(name) for name in self.model.parameters})

    def _cuts(self, name: str) -> Tensor:
        """[dims + 1, 2]: where a parameter is cut, and which of these rows sharding has left."""
        placement, axes = self.model.placements[name], self.model.axes
        shape = self.trial.model_config.parameter_shapes()[name]
        cut = part(shape, placement.cuts, axes.ranks, axes.sizes)
        inner = [s.stop - s.start for s in cut]
        rows = slice(0, shape[0])
        if placement.further:
            rows = part(inner, placement.further, axes.ranks, axes.sizes)[0]
        return torch.tensor([(s.start, s.stop) for s in (*cut, rows)])

    @contextlib.contextmanager
    def watch(self, action: Action) -> Iterator[None]:
        self.at = self.at._replace(micro_batch=action.micro_batch, dp=self.here.dp)
        self.again = action.kind is not Kind.FORWARD  # recomputed, in a backward
        yield

    def run(self) -> None:
        models = [chunk.model for chunk in self.model.pipeline.chunks]
        self.note_kept(models)
        for model in models:
            attach(model, self.tap)
        self.waits = [gradients.wait for gradients in self.model.gradients]
        for gradients in self.model.gradients:
            gradients.wait = partial(self._wait, gradients.wait)
        scaled = partial(self.note_gradients, "scaled gradient", self.model.parameters)
        self.trained.optimizer.register_step_pre_hook(lambda *_: scaled())
        for step in range(self.trial.steps):
            self._step(step)

    def _wait(self, wait: Callable) -> None:
        self.at = Key(self.at.step, "", "")
        wait()
        if wait == self.waits[-1]:  # from here on all gradients are sums
            self.note_gradients("summed gradient", self.model.parameters)

    def _step(self, step: int) -> None:
        self.at = Key(step, "", "")
        result = train.train_step(self.trained, step, self.watch)
        for phase, number in (("loss", result.loss), ("gradient norm", result.grad_norm)):
            self.note(phase, {phase: torch.tensor(number, dtype=torch.float64)})
        self.note_measures(result.measures)
        models = [chunk.model for chunk in self.model.pipeline.chunks]
        self.note_update(self.model.parameters, self.trained.optimizer, models)
