"""Runs: the layout's own run, in forked processes over gloo; each writes a file of what it sees.

Nothing is gathered by messages, which could be what is wrong. A rank that dies leaves its records.
"""

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
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

SILENCE = 20.0  # seconds without a record of any rank, after which all are stopped
GRACE = 3.0  # seconds in which the other ranks may end by themselves after one has failed


class RankRun(NamedTuple):
    records: list[Record]
    problem: str = ""  # how it ended, if not well
    stack: Sequence[str] = ()  # where it was, the innermost call first
    ran: Sequence[str] = ()  # functions since its last record, the last call first
    running: Sequence[str] = ()
    failed_at: float = 0.0
    lost: bool = False  # it only waited for a rank that had failed


def run_ranks(trial: Trial, text: Text, folder: Path) -> list[RankRun]:
    """Train in the layout's processes; what each of them has noted, and how it ended."""
    context, size = multiprocessing.get_context("fork"), trial.layout.world_size
    listen_on_loopback()
    files = [folder / f"rank{rank}" for rank in range(size)]
    everything = [(trial, text, folder, rank) for rank in range(size)]
    ranks = [context.Process(target=_on_rank, args=args) for args in everything]
    for process in ranks:
        process.start()
    try:
        if _wait(ranks, files):
            (folder / "stop").touch()  # each writes where it is: see _watch_for_stop
            time.sleep(1.0)
    finally:
        for process in ranks:
            process.kill()
            process.join()
    return [_outcome(file, p.exitcode) for file, p in zip(files, ranks, strict=True)]


def _wait(ranks: list, files: list[Path]) -> bool:
    """Return when all have ended; True if some were silent for too long."""
    written, since, failed = 0, time.monotonic(), None
    while any(process.is_alive() for process in ranks):
        time.sleep(0.02)
        now, size = time.monotonic(), sum(f.stat().st_size for f in files if f.exists())
        if size > written:
            written, since = size, now
        if failed is None and any(process.exitcode for process in ranks):
            failed = now
        if now - since > SILENCE:
            return True
        if failed and now - max(failed, since) > GRACE:
            return False
    return False


def _outcome(file: Path, code: int) -> RankRun:
    records = [*read(file)] if file.exists() else []
    end = records.pop() if records and records[-1].key.phase in ("done", "failed") else None
    last = records[-1].note["time"] if records else 0.0
    if not end:
        was_killed = "it was killed" if code == -signal.SIGKILL else f"it ended with code {code}"
        if records:
            step, phase, name, *_ = records[-1].key
            is_building = phase in ("built", "initial")
            when = f"in step {step + 1}, after {phase} of {name}"
            was_killed += f", {'while the model was built' if is_building else when}"
        return RankRun(records, was_killed, failed_at=last)
    if end.key.phase == "done":
        return RankRun(records)
    note, at = end.note, last if end.note["hung"] else end.note["time"]
    return RankRun(records, note["problem"], note["stack"], end.ran, end.running, at, note["lost"])


def _watch_for_stop(folder: Path, fail: Callable) -> None:
    while not (folder / "stop").exists():
        time.sleep(0.2)
    frame = sys._current_frames()[threading.main_thread().ident]
    what = f"it wrote nothing for {SILENCE:.0f} s, and was stopped"
    fail(what, traceback.walk_stack(frame), hung=True)


def _on_rank(trial: Trial, text: Text, folder: Path, rank: int) -> None:
    torch.set_num_threads(1)
    writer, profile = Writer(folder / f"rank{rank}"), Profile()

    def fail(problem: str, frames: Iterable, lost: bool = False, hung: bool = False) -> None:
        named = [(*profile.names_of([frame]), line) for frame, line in frames]
        calls = [call for call in named if len(call) > 1]
        stack = [name.replace(":", f":{line} in ") for name, line in calls[:3]]
        note = {"problem": problem, "stack": stack, "lost": lost, "hung": hung}
        ran = [*reversed(profile.called)], [name for name, _ in calls]
        writer.write(Key(0, "failed", ""), torch.zeros(0), ran, **note)
        os._exit(1)

    threading.Thread(target=_watch_for_stop, args=(folder, fail), daemon=True).start()
    try:
        store = dist.FileStore(str(folder / "store"), trial.layout.world_size)
        timeout = timedelta(seconds=10 * SILENCE)  # the parent ends a hang, and earlier
        kind = {"rank": rank, "world_size": trial.layout.world_size, "timeout": timeout}
        dist.init_process_group("gloo", store=store, **kind)
        Rank(trial, text, rank, writer, profile).run()
        writer.write(Key(0, "done", ""), torch.zeros(0))
        dist.barrier()
    except BaseException as error:
        sys.setprofile(None)
        message = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:150]}"
        lost = isinstance(error, RuntimeError) and bool(GLOO.search(str(error)))
        fail(message, reversed([*traceback.walk_tb(error.__traceback__)]), lost)


class Rank:
    """One rank of the layout: train_step, unchanged, with taps."""

    def __init__(
        self, trial: Trial, text: Text, rank: int, writer: Writer, profile: Profile
    ) -> None:
        self.trial, self.writer, self.profile = trial, writer, profile
        self.here, self.at, self.again = here(rank, trial.layout), Key(0, "", ""), False
        # So that a tiny model, too, has several buckets and several stripes.
        layout.STRIPE_ROWS["cpu"] = STRIPE_ROWS
        if not isinstance(data_parallel.GradientBuckets, partial):
            buckets = partial(data_parallel.GradientBuckets, bucket_bytes=BUCKET_BYTES)
            data_parallel.GradientBuckets = buckets
        with self.profile:
            self._build(trial, text)
        parameters = {n: p.data for n, p in self.model.parameters.items()}
        self.note("initial", parameters, self._of_parameter)

    def _build(self, trial: Trial, text: Text) -> None:
        config, w, size = trial.model_config, trial.workload, trial.layout
        axes, device = build_axes(torch.device("cpu"), size), torch.device("cpu")
        batches = open_batches(
            w,
            0,
            text,
            seq_length=w.seq_length,
            seed=trial.seed,
            micro_batch_size=w.micro_batch_size,
            num_micro_batches=w.num_micro_batches,
            dp_rank=axes.dp.rank,
            dp_size=size.dp,
            positions=POSITIONS[size.cp_engine](axes.cp.rank, size.cp, w.seq_length),
        )
        ranks = [axes[name].rank for name in ("pp", "dp", "cp", "tp")]
        self.note("built", {"place in the mesh": torch.tensor(ranks)})
        self.model = build_model(config, size, w, axes, device)
        self.trained = train.build_run(self.model, trial.recipe, batches)
        initialise(self.model.parameters, config, trial.seed, self.model.placements, axes)
        self.model.weights_changed()

    def _of_parameter(self, name: str) -> dict:
        """What places.py needs to know of a parameter."""
        placement, axes = self.model.placements[name], self.model.axes
        shape = self.trial.model_config.parameter_shapes()[name]
        cut = part(shape, placement.cuts, axes.ranks, axes.sizes)
        inner = [s.stop - s.start for s in cut]
        rows = part(inner, placement.further, axes.ranks, axes.sizes)[0]
        known = ("_proj", "norm", "embed_tokens", "lm_head", "gate", "shared_expert_gate")
        return {
            "cut": [(s.start, s.stop) for s in cut],
            "rows": (rows.start, rows.stop) if placement.further else None,
            "is_new": not name.removesuffix(".weight").endswith(known),
        }

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
        for gradients in self.model.gradients:
            gradients.scale = partial(self._before_scale, gradients.scale)
        with self.profile:
            for step in range(self.trial.steps):
                self._step(step)

    def _before_scale(self, scale, factor: float) -> None:
        if not self.is_scaled:
            self.is_scaled = True
            self.at = Key(self.at.step, "", "")
            self.note("summed gradient", self._gradients())
        scale(factor)

    def _gradients(self) -> dict[str, torch.Tensor]:
        return {name: p.grad for name, p in self.model.parameters.items()}

    def _step(self, step: int) -> None:
        self.at, self.is_scaled = Key(step, "", ""), False
        result = train.train_step(self.trained, step, self.watch)
        self.at = Key(step, "", "")
        if not self.is_scaled:  # the step was skipped, since the norm is not finite
            self.note("summed gradient", self._gradients())
        for phase, number in (("loss", result.loss), ("gradient norm", result.grad_norm)):
            self.note(phase, {phase: torch.tensor(number, dtype=torch.float64)})
        for phase, tensors in update_of(self.model.parameters, self.trained.optimizer):
            self.note(phase, tensors)
