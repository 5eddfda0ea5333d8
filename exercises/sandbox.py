"""Runs checks in processes of their own, with limits, and reads their verdicts.

A server (child.py) has imported torch, which takes seconds, and forks a check for each line that it
reads. It catches accidents: endless loops, too much memory, endless output, sys.exit. It is no
prison, see WARNING. Standard library only: the process that starts checks needs no torch.
"""

import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from exercises.exercise import GATES, ROOT, Verdict

# A check that has computed, or slept, for so long ends itself and reports the line.
STUCK_CPU_SECONDS, STUCK_SECONDS = 5, 8
KILL_SECONDS = 300  # by the clock, for a check that cannot end itself: then it is killed
LIMITS = {"RLIMIT_CPU": 60, "RLIMIT_AS": 4 * 2**30, "RLIMIT_FSIZE": 10 * 2**20, "RLIMIT_CORE": 0}
MORE_PROCESSES = 100  # and threads, than there are on the machine
LARGEST_VERDICT = 200_000  # bytes
WARNING = """\
Not isolated: a student's code runs as you. It can read what you can read, use the network, signal
your other processes, and forge its own verdict, since it runs beside the checker. For strangers'
code use a container or a machine of its own; --wrap "COMMAND" puts one before the checks."""


def is_plain(path: Path) -> bool:
    """A file itself: no link to another, and no pipe, which blocks whoever reads it."""
    return path.is_file() and not path.is_symlink()


class Server:
    """A process that runs checks, one after the other, and ends all that they have started."""

    def __init__(self, wrap: list[str]) -> None:
        environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        command = [*wrap, sys.executable, "-m", "exercises.child"]
        options = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        options |= {"cwd": ROOT, "env": environment}  # a class's tree has other exercises
        # A session of its own: Ctrl-C is for the process that waits for it.
        self.process = subprocess.Popen(command, start_new_session=True, **options)

    def run(self, *arguments: object) -> int | None:
        """The exit code of a check; None if this process has ended, too."""
        timer = threading.Timer(KILL_SECONDS, self.end)
        timer.start()
        try:
            with suppress(OSError):  # it has been killed
                self.process.stdin.write(json.dumps([*map(str, arguments)]) + "\n")
                self.process.stdin.flush()
            answer = self.process.stdout.readline()
        finally:  # also at Ctrl-C: a command that ends waits for its threads
            timer.cancel()
        return int(answer) if answer else None

    def end(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGTERM)


class Sandbox:
    """Runs checks, also several at a time from threads, and leaves nothing running behind."""

    def __init__(self, wrap: str = "") -> None:
        """`wrap`: a command that the servers' command is put behind, for example a container's."""
        self.wrap, self.idle, self.busy = shlex.split(wrap), [], set()
        if not wrap and not find_spec("torch"):  # in a container it may be there
            raise ModuleNotFoundError("No module named 'torch'")

    def check(self, number: int | str, file: Path | str, seed: int = 0) -> Verdict:
        """The verdict on a file, or on "solution"."""
        began = time.monotonic()
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            verdict, errors, work = (Path(folder, x) for x in ("verdict.json", "errors", "work"))
            work.mkdir()
            server = self.idle.pop() if self.idle else Server(self.wrap)
            self.busy.add(server)
            code = server.run(number, file, seed, verdict, work, errors)
            self.busy.discard(server)
            self.idle += [server] if code is not None else []
            seconds = round(time.monotonic() - began, 1)
            found = _read(verdict) or _no_verdict(code, errors, seconds)
        return found._replace(seconds=seconds)

    def end(self) -> None:
        """End the checks that run: whoever waits for them continues."""
        for server in [*self.busy, *self.idle]:
            server.end()

    __del__ = end


def _read(path: Path) -> Verdict | None:
    """The verdict, if it is of the right form: a process with strangers' code has written it."""
    with suppress(OSError, ValueError, TypeError, AttributeError):
        if not is_plain(path) or path.stat().st_size > LARGEST_VERDICT:
            return None
        found = Verdict(**json.loads(path.read_text()))
        gates = {gate: text for gate, text in found.gates.items() if gate in GATES}
        texts = found.mistake, found.message, found.picture, found.printed, *gates.values()
        if all(isinstance(text, str) for text in texts) and isinstance(found.passed, bool):
            return found._replace(gates=gates)
    return None


def _no_verdict(code: int | None, errors: Path, seconds: float) -> Verdict:
    how = f"exited with code {code}"
    if code is None:
        how = f"was killed after {seconds} s"
    elif code < 0:
        how = f"was killed by {signal.Signals(-code).name}"
    # A student's code may have deleted or replaced it.
    lines = errors.read_text(errors="replace").splitlines()[-5:] if is_plain(errors) else []
    message = "\n    ".join([f"The check's process {how} and left no verdict.", *lines])
    return Verdict(False, {}, "lost", message)
