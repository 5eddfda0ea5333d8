"""Runs: the layout's own run, in forked processes over gloo; each writes a file of what it sees.

Nothing is gathered by messages, which could be what is wrong. A rank that dies leaves its records.
"""

import contextlib
import gc
import multiprocessing
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

import train
from difference.places import here
from difference.records import Key, Record, Writer, read
from difference.taps import Profile, attach, update_of
from difference.tiny import BUCKET_BYTES, STRIPE_ROWS, Text, Trial
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
    problem: str = ""  # how it ended, if not well
    stack: Sequence[tuple[str, int]] = ()  # functions and lines, the innermost call first
    ran: Sequence[str] = ()  # the last functions that ran, the last call first
    failed_at: float = 0.0
    lost: bool = False  # it only waited for a rank that had failed


def run_ranks(trial: Trial, text: Text, folder: Path) -> list[RankRun]:
    """Train in the layout's processes; what each of them has noted, and how it ended."""
    context = multiprocessing.get_context("fork")
    listen_on_loopback()
    everything = [(trial, text, folder, rank) for rank in range(trial.layout.world_size)]
    ranks = [context.Process(target=_on_rank, args=args) for args in everything]
    gc.freeze()  # no rank collects the one process's group: without its threads it cannot end
    try:
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()  # where one fails, the messages of the others do
    finally:
        for process in ranks:
            process.kill()
            process.join()
        gc.unfreeze()
    return [_outcome(folder / f"rank{i}", process.exitcode) for i, process in enumerate(ranks)]


def _outcome(file: Path, code: int) -> RankRun:
    records = [*read(file)]
    if records and records[-1].key.phase == "end":
        return RankRun(records[:-1], **records[-1].note["end"])
    how = "it was killed" if code == -signal.SIGKILL else f"it ended with code {code}"
    if not records:
        return RankRun(records, how)
    step, phase, name, *_ = records[-1].key
    is_building = phase in ("built", "initial")
    how += f", {'while the model was built' if is_building else f'in step {step + 1}'}"
    last = {"failed_at": records[-1].note["time"], "ran": records[-1].running}
    return RankRun(records, f"{how}, after {phase} of {name}", **last)


def _on_rank(trial: Trial, text: Text, folder: Path, rank: int) -> None:
    torch.set_num_threads(1)
    writer, profile, end = Writer(folder / f"rank{rank}"), Profile(), {}
    try:
        size = trial.layout.world_size
        store = dist.FileStore(str(folder / "store"), size)
        wait = timedelta(seconds=trial.wait)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=wait)
        sys.setprofile(profile.event)
        Rank(trial, text, rank, writer, profile).run()
        sys.setprofile(None)
        dist.barrier()
    except BaseException as error:
        sys.setprofile(None)
        text = re.sub(r"^\[\S+:\d+\] ", "", str(error))  # without a place in gloo's source
        frames = reversed([*traceback.walk_tb(error.__traceback__)])
        end = {
            "problem": f"{type(error).__name__}: {text.partition(chr(10))[0][:150]}",
            "stack": [(name, line) for frame, line in frames for name in profile.names_of([frame])],
            "ran": [*reversed(profile.called)][:2],
            "failed_at": time.time(),
            "lost": isinstance(error, RuntimeError) and bool(GLOO.search(str(error))),
        }
    writer.write(Key(0, "end", ""), torch.zeros(0), end=end)
    os._exit(bool(end))


class Rank:
    """One rank of the layout: train_step, unchanged, with taps."""

    def __init__(
        self, trial: Trial, text: Text, rank: int, writer: Writer, profile: Profile
    ) -> None:
        self.trial, self.writer, self.profile = trial, writer, profile
        self.here, self.at, self.again = here(rank, trial.layout), Key(0, "", ""), False
        # So that a tiny model, too, has several buckets and several stripes.
        layout.STRIPE_ROWS["cpu"] = STRIPE_ROWS
        buckets = partial(data_parallel.GradientBuckets, bucket_bytes=BUCKET_BYTES)
        data_parallel.GradientBuckets = buckets
        self._build(text)
        parameters = {n: p.data for n, p in self.model.parameters.items()}
        self.note("initial", parameters, self._of_parameter)

    def _build(self, text: Text) -> None:
        trial, w, size = self.trial, self.trial.workload, self.trial.layout
        device = torch.device("cpu")
        axes = build_axes(device, size, trial.wait)
        sizes = {"seq_length": w.seq_length, "micro_batch_size": w.micro_batch_size}
        sizes |= {"num_micro_batches": w.num_micro_batches, "dp_size": size.dp}
        positions = POSITIONS[size.cp_engine](axes.cp.rank, size.cp, w.seq_length)
        mine = {"seed": trial.seed, "dp_rank": axes.dp.rank, "positions": positions}
        batches = open_batches(w, 0, text, **sizes, **mine)
        ranks = [axes[name].rank for name in ("pp", "dp", "cp", "tp")]
        self.note("built", {"place in the mesh": torch.tensor(ranks)})
        self.model = build_model(trial.model_config, size, w, axes, device)
        self.trained = train.build_run(self.model, trial.recipe, batches)
        settings = trial.model_config, trial.seed, self.model.placements, axes
        initialise(self.model.parameters, *settings)
        self.model.weights_changed()

    def _of_parameter(self, name: str) -> dict:
        """What places.py needs to know of a parameter."""
        placement, axes = self.model.placements[name], self.model.axes
        shape = self.trial.model_config.parameter_shapes()[name]
        cut = part(shape, placement.cuts, axes.ranks, axes.sizes)
        inner = [s.stop - s.start for s in cut]
        rows = part(inner, placement.further, axes.ranks, axes.sizes)[0]
        of_shard = (rows.start, rows.stop) if placement.further else None
        return {"cut": [(s.start, s.stop) for s in cut], "rows": of_shard}

    def note(self, phase: str, tensors: dict, of=lambda name: {}) -> None:
        ran = self.profile.take()
        for name, tensor in tensors.items():
            key = self.at._replace(phase=phase, name=name)
            self.writer.write(key, tensor, ran, **of(name))

    def _tap(self, name: str, out: torch.Tensor, wants_gradient: bool) -> None:
        at = self.at
        self.note("forward", {name: out})

        def note(gradient: torch.Tensor) -> None:
            key = at._replace(phase="backward", name=name)
            self.writer.write(key, gradient, self.profile.take())

        if wants_gradient and out.requires_grad and not self.again:
            out.register_hook(note)

    @contextlib.contextmanager
    def watch(self, action: Action) -> Iterator[None]:
        self.at = self.at._replace(micro_batch=action.micro_batch, dp=self.here.dp)
        self.again = action.kind is not Kind.FORWARD  # recomputed, in a backward
        yield

    def run(self) -> None:
        for chunk in self.model.pipeline.chunks:
            attach(chunk.model, self._tap)
        last = self.model.gradients[-1]
        last.wait = partial(self._wait, last.wait)
        for step in range(self.trial.steps):
            self._step(step)

    def _wait(self, wait: Callable) -> None:
        wait()  # from here on all gradients are sums
        self.at = Key(self.at.step, "", "")
        self.note("summed gradient", {n: p.grad for n, p in self.model.parameters.items()})

    def _step(self, step: int) -> None:
        self.at = Key(step, "", "")
        result = train.train_step(self.trained, step, self.watch)
        for phase, number in (("loss", result.loss), ("gradient norm", result.grad_norm)):
            self.note(phase, {phase: torch.tensor(number, dtype=torch.float64)})
        for phase, tensors in update_of(self.model.parameters, self.trained.optimizer):
            self.note(phase, tensors)
