"""Failures: when a rank fails, one rank prints one message with the reason, and all ranks exit.

The other ranks see only a closed connection or a timeout. So each rank leaves notes in the store
that all share, and by heartbeats shows that it is alive:

    rank 0   step 7   88 heartbeats   failed    its wait for rank 1 raised an error
    rank 1   step 7   86 heartbeats             and no more: it was killed, or it hangs
    rank 2   step 7   88 heartbeats             alive, and still waiting

A rank with an error of its own reports it. If only waits failed, one of those ranks watches the
others for two seconds and names those without a heartbeat, or, if all have one, all of them.

Where a rank waits for one that is gone or hangs: with gloo in `wait`, which raises after the
timeout. With NCCL in reading a result (train_step), which never raises. There the thread of the
heartbeat ends the process as soon as another rank has reported; if none has, NCCL's watchdog ends
it by SIGABRT after the timeout, or its monitor after twice that, if the watchdog hangs, too.

Exit codes: 0 done or SIGTERM, 2 the user's mistake, 130 Ctrl-C, 1 everything else.
"""

import contextlib
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from picotron_min.runtime.folders import find_start
from picotron_min.runtime.launch import (
    USAGE_ERRORS,
    Launch,
    exit_on_usage_error,
    first_line,
    open_process_group,
    print_end,
)

GRACE = 2.0  # seconds in which all ranks that can will have noticed that one is gone
HEARTBEAT = 0.4  # seconds between two heartbeats, 20 bytes each where the store is a file
LONG_WAIT = timedelta(hours=1)  # for phases whose length differs between ranks
# gloo has no exception of its own. Its RuntimeErrors have one of these in their message.
GLOO = re.compile("gloo|timeout caused pair closure|operation timed out!|wait timeout", re.I)
# torch's errors on GPUs (without their advice) and on CPUs, and Python's, if it has numbers.
OUT_OF_MEMORY = re.compile(r"(?:MemoryError|DefaultCPUAllocator): (.+?)\.?(?: If reserved|\n|$)")


@contextlib.contextmanager
def monitored(
    launch: Launch, timeout_seconds: float, save_dir: str = ""
) -> Iterator["RankMonitor"]:
    """The ranks of a run. An exception inside ends this process, and one rank of all reports it."""
    with exit_on_usage_error():
        store = launch.open_store(timeout_seconds)
    monitor = RankMonitor(store, launch, timeout_seconds, save_dir)
    try:
        yield monitor
        monitor.wait_for_all()  # rank 0 may have to upload to wandb
        dist.destroy_process_group()
        monitor.done.set()
        monitor.heartbeat.join(GRACE)
    except (Exception, KeyboardInterrupt) as error:
        monitor.exit_after(error)


class RankMonitor:
    """What every rank notes for the others, and how it waits for them."""

    def __init__(
        self, store: dist.Store, launch: Launch, timeout_seconds: float, save_dir: str = ""
    ) -> None:
        self.store, self.launch, self.rank, self.save_dir = store, launch, launch.rank, save_dir
        self.timeout, self.ranks = timedelta(seconds=timeout_seconds), range(launch.world_size)
        self.store.set_timeout(self.timeout)
        self.connecting = self.got_report = False
        self.done, self.sigterm = threading.Event(), threading.Event()
        self.store.add(f"heartbeats {self.rank}", 1)
        self.heartbeat = threading.Thread(target=self._beat, daemon=True)
        self.heartbeat.start()

    def _beat(self) -> None:
        """Show that this process is alive, and end it after a report: not every wait notices."""
        with contextlib.suppress(dist.DistError):  # the process with the store may exit first
            store = self.store.clone()  # a connection serves one thread at a time
            while not self.done.wait(HEARTBEAT):
                store.add(f"heartbeats {self.rank}", 1)
                self.got_report = store.check(["reported"])
                # Time to finish what needs no other rank any more, for example a checkpoint.
                if self.got_report and not self.done.wait(GRACE):
                    _leave(1)

    def _heartbeats(self) -> list[int]:
        return [self.store.add(f"heartbeats {r}", 0) for r in self.ranks]

    def connect(self, backend: str) -> None:
        """Wait until every rank is here, then open the process group."""
        self.connecting = True
        self.store.set(f"here {self.rank}", "")
        here, deadline, before = [f"here {r}" for r in self.ranks], 0.0, []
        # As long as every rank has heartbeats: one may prepare its tokens for hours.
        while not self.store.check(here):
            if time.monotonic() > deadline:
                now = self._heartbeats()
                if any(map(int.__eq__, before, now)):
                    raise dist.DistStoreError("a rank has no heartbeat")
                before, deadline = now, time.monotonic() + self.timeout.total_seconds()
            time.sleep(HEARTBEAT)
        open_process_group(self.launch, backend, self.store, self.timeout)
        # On CPUs, also between GPUs: otherwise every step would wait for the GPU to answer.
        self.group = dist.new_group(backend="gloo", timeout=self.timeout)
        self.long_group = dist.new_group(backend="gloo", timeout=LONG_WAIT)

    def wait_for_all(self) -> None:
        dist.barrier(self.long_group)  # up to an hour, after reading weights for example

    def note_step(self, step: int) -> None:
        """This rank begins a step, and from now on finishes it after SIGTERM: `stop_requested`."""
        self.store.set(f"step {self.rank}", f"{step}: {self.save_dir}")
        signal.signal(signal.SIGTERM, lambda *_: self.sigterm.set())

    def stop_requested(self) -> bool:
        """Whether any rank got SIGTERM: the same answer on all ranks, which must all call this."""
        # The signal reaches them at different moments, and all must stop after the same step.
        requested = torch.tensor(self.sigterm.is_set(), dtype=torch.uint8)
        dist.all_reduce(requested, dist.ReduceOp.MAX, group=self.group)
        return bool(requested)

    def exit_after(self, error: BaseException) -> None:
        """End this process because of an error, which one rank of all reports."""
        self.done.set()
        # Before the ranks connect, these are the user's mistakes.
        is_usage = not self.connecting and isinstance(error, USAGE_ERRORS)
        try:
            if not self.got_report:
                self._report_once(error, is_usage)
        except dist.DistError:  # without the notes the reason is not known
            what = f"the ranks' store is gone, and its process or node ({first_line(error)})"
            print_end(f"rank {self.rank} stops: {what}: {how_to_resume(self.save_dir)}")
        finally:
            _leave(130 if isinstance(error, KeyboardInterrupt) else 2 if is_usage else 1)

    def _report_once(self, error: BaseException, is_usage: bool) -> None:
        self.store.set(f"failed {self.rank}", "")
        is_gloo = isinstance(error, RuntimeError) and GLOO.search(str(error))
        if is_wait := is_gloo or isinstance(error, dist.DistError):
            what, rank = self._find_missing()  # takes a while: an error is reported before it
        else:
            what, rank = plain_message(error, self.rank, is_usage), self.rank
        if self.store.add("reports", 1) > 1:
            time.sleep(2 * GRACE)  # the launcher ends all ranks when one exits: the reporter first
            return
        if not what:
            traceback.print_exception(error)
            what = f"rank {rank} failed"
        # A run that has diverged would do so again: its message has the step and the remedy.
        can_resume = not is_usage and not isinstance(error, FloatingPointError)
        report(what, self.store, rank if can_resume else None)
        if not is_wait and len(self.ranks) > 1:
            # The store may end with this process, so others read it before.
            time.sleep(2 * HEARTBEAT if is_usage else GRACE)

    def _find_missing(self) -> tuple[str, int]:
        """A message that names the missing ranks, and the first; "" if all ranks have failed."""
        before = self._heartbeats()
        time.sleep(GRACE)
        after = self._heartbeats()
        silent = [r for r in self.ranks if not self.store.check([f"failed {r}"])]
        dead = [r for r in silent if after[r] == before[r]]
        if not (missing := dead or silent):
            return "", self.rank
        ranks = f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
        limit = f"{self.timeout.total_seconds():g} s (distributed.timeout_seconds)"
        if dead:
            why = "killed, or hanging" if after[dead[0]] else f"not started within {limit}"
            return f"lost {ranks}: {why}", dead[0]
        why = f"hanging, or busy for more than {limit}"
        return f"timed out waiting for {ranks}: {why}", silent[0]


def plain_message(error: BaseException, rank: int, is_usage: bool) -> str:
    """An error's message, where it is enough; empty for an error that needs a traceback."""
    if isinstance(error, KeyboardInterrupt):
        return "stopped by Ctrl-C"
    if memory := OUT_OF_MEMORY.search(f"{type(error).__name__}: {error}"):
        what = f"rank {rank} has too little memory ({memory[1]}): use a smaller micro_batch_size"
        return f"{what}, a larger tp_size or pp_size, or model.recompute full"
    # A MemoryError that comes from here, not from torch, has its own remedy, or no message.
    is_plain = isinstance(error, (OSError, FloatingPointError, MemoryError, ModuleNotFoundError))
    return str(error) if is_usage or is_plain else ""


def report(what: str, notes: dist.Store, rank: int | None) -> None:
    """Print the one message: what happened and, if to a rank, in which step and how to resume."""
    if rank is not None and notes.check([f"step {rank}"]):
        step, _, save_dir = notes.get(f"step {rank}").decode().partition(": ")
        what += f"\nThis was in step {step}: {how_to_resume(save_dir)}"
    elif rank is not None:
        what += "\nThis was before the first step"
    print_end(what)
    notes.set("reported", "")


def how_to_resume(save_dir: str) -> str:
    newest = find_start("latest", Path(save_dir))
    how = f"resume from {newest} with checkpoint.load_path latest"
    return how if newest else "this run has saved no checkpoint"


def _leave(code: int) -> None:
    """Exit at once: the usual way waits for communication that will never end."""
    sys.stdout.flush()
    os._exit(code)
