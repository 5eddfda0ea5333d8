"""Runs checks in processes of their own, with limits, and reads their verdicts.

A server of multiprocessing has imported torch, which takes seconds; each check is a fork of it
(child.py). That catches accidents: endless loops, too much memory, endless output, sys.exit. It is
no prison, see WARNING. This module imports no torch: the process that starts checks needs none.
"""

import contextlib
import json
import multiprocessing
import os
import signal
import tempfile
from importlib.util import find_spec
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from exercises.child import run
from exercises.exercise import GATES, ROOT, Verdict

PRELOAD = ["torch", "exercises.checking", "exercises.design_marks"]
LARGEST_VERDICT = 200_000  # bytes
KILL_SECONDS = 120
WARNING = """\
Not isolated: a student's code runs as you. It can read what you can read, use the network, signal
your other processes, and forge its own verdict, since it runs beside the checker. For strangers'
code grade in a container or on a machine of its own: docs/teaching.md."""


class Sandbox:
    """Runs checks, also several at a time from threads, and leaves nothing running behind."""

    def __init__(self, *more: str) -> None:
        """`more`: modules to import before many checks; a single one begins sooner without."""
        if not find_spec("torch"):
            raise ModuleNotFoundError("No module named 'torch'")
        self.context, self.running = multiprocessing.get_context("forkserver"), set()
        self.context.set_forkserver_preload([*PRELOAD, *more])
        with contextlib.chdir(ROOT):  # a class's tree has other exercises
            forkserver.ensure_running()

    def check(self, number: int | str, file: Path | str, seed: int = 0) -> Verdict:
        """The verdict on a file, or on "solution"."""
        verdicts, sender = self.context.Pipe(duplex=False)
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as work:
            job = number, str(file), seed, sender, work
            process = self.context.Process(target=run, args=job, daemon=True)
            process.start()
            sender.close()  # only that process holds it now: its end reads as an end of file
            self.running.add(process)
            try:
                found = _received(verdicts, process)
            finally:  # also at Ctrl-C
                end(process)
                process.join()
                self.running.discard(process)
                verdicts.close()
        text = f"The check left no verdict: its exit code is {process.exitcode}."
        return found or Verdict(False, {}, "lost", text)

    def end(self) -> None:
        """End the checks that run: whoever waits for them continues."""
        for process in [*self.running]:
            end(process)


def end(process: BaseProcess) -> None:
    """End a check, and what it has started."""
    process.kill()  # it may not have made its group yet
    with contextlib.suppress(OSError):  # all of the group have ended
        os.killpg(process.pid, signal.SIGKILL)


def _received(verdicts: Connection, process: BaseProcess) -> Verdict | None:
    """The verdict, if it has the right form: strangers' code ran where it was written.

    So it is JSON, and nothing is unpickled.
    """
    # A process that a check has left may hold the pipe open: the check's own end counts, too.
    if not wait([verdicts, process.sentinel], KILL_SECONDS):
        return Verdict(False, {}, "lost", f"The check was ended after {KILL_SECONDS} s.")
    with contextlib.suppress(OSError, EOFError, ValueError, TypeError, AttributeError):
        text = verdicts.recv_bytes(LARGEST_VERDICT) if verdicts.poll() else ""
        found = Verdict(**json.loads(text))
        gates = {gate: text for gate, text in found.gates.items() if gate in GATES}
        texts = found.mistake, found.message, found.picture, found.printed, *gates.values()
        if all(isinstance(text, str) for text in texts) and isinstance(found.passed, bool):
            return found._replace(gates=gates)
    return None
