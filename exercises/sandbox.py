"""Runs checks in processes of their own, with limits, and reads their verdicts.

A server of multiprocessing has imported torch, which takes seconds; each check is a fork of it
(child.py). That catches accidents: endless loops, too much memory, endless output, sys.exit. It is
no prison, see WARNING. This module imports no torch: the process that starts checks needs none.
"""

import contextlib
import json
import multiprocessing
import time
from importlib.util import find_spec
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path

from exercises.child import KILL_SECONDS, supervise
from exercises.exercise import GATES, ROOT, Verdict

PRELOAD = ["torch", "exercises.checking", "exercises.design_marks"]
LARGEST_VERDICT = 200_000  # bytes
CLEANING_SECONDS = 10  # to end what a check leaves behind
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
        began = time.monotonic()
        verdicts, sender = self.context.Pipe(duplex=False)
        process = self.context.Process(
            target=supervise, args=(number, str(file), seed, sender), daemon=True
        )
        process.start()
        sender.close()  # only that process holds it now: its end reads as an end of file
        self.running.add(process)
        try:
            found = _received(verdicts)
            process.join(CLEANING_SECONDS)
        finally:  # also at Ctrl-C
            process.terminate()
            self.running.discard(process)
            verdicts.close()
        return found._replace(seconds=round(time.monotonic() - began, 1))

    def end(self) -> None:
        """End the checks that run: whoever waits for them continues."""
        for process in [*self.running]:
            process.terminate()


def _received(verdicts: Connection) -> Verdict:
    """The first verdict, if it has the right form: strangers' code ran where it was written.

    So it is JSON, and nothing is unpickled.
    """
    with contextlib.suppress(OSError, EOFError, ValueError, TypeError, AttributeError):
        if not verdicts.poll(KILL_SECONDS):
            return Verdict(False, {}, "lost", f"The check was ended after {KILL_SECONDS} s.")
        found = Verdict(**json.loads(verdicts.recv_bytes(LARGEST_VERDICT)))
        gates = {gate: text for gate, text in found.gates.items() if gate in GATES}
        texts = found.mistake, found.message, found.picture, found.printed, *gates.values()
        if all(isinstance(text, str) for text in texts) and isinstance(found.passed, bool):
            return found._replace(gates=gates)
    return Verdict(False, {}, "lost", "The check left no verdict.")
