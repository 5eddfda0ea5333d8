"""Runs one check in a process of its own, with limits, and reads its verdict.

    fresh working folder, empty environment, limits on CPU time, memory and files; its process group
    is killed when the verdict is there, or after KILL_SECONDS

It catches accidents: endless loops, too much memory, endless output, sys.exit. It is no prison, see
WARNING. Standard library only: the process that starts checks needs no torch.
"""

import ctypes
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
from pathlib import Path
from typing import Any, BinaryIO

from exercises.exercise import FOLDER, GATES

# A check that has computed, or slept, for so long ends itself and reports the line.
STUCK_CPU_SECONDS, STUCK_SECONDS = 5, 8
KILL_SECONDS = 30  # then it is killed
LIMITS = {"RLIMIT_CPU": 60, "RLIMIT_AS": 4 * 2**30, "RLIMIT_FSIZE": 10 * 2**20, "RLIMIT_CORE": 0}
MORE_PROCESSES = 100  # and threads, than there are on the machine
LARGEST_VERDICT = 200_000  # bytes
PR_SET_CHILD_SUBREAPER, PR_GET_CHILD_SUBREAPER = 36, 37  # of Linux
WARNING = """\
Not isolated: a student's code runs as you. It can read what you can read, use the network, signal
your other processes, and forge its own verdict, since it runs beside the checker. For strangers'
code use a container or a machine of its own; --wrap "COMMAND" puts one before each check."""


def adopt_orphans() -> None:
    """Let what checks leave behind, also in other sessions, become a child of this process.

    A Sandbox then ends all children that it has not started: to be called by a command, not by a
    process that has children of its own. Only Linux can do this.
    """
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def _adopts_orphans() -> bool:
    answer = ctypes.c_int(0)
    _prctl(PR_GET_CHILD_SUBREAPER, ctypes.byref(answer))
    return bool(answer.value)


def _prctl(option: int, value: Any) -> None:
    if function := getattr(ctypes.CDLL(None), "prctl", None):
        function(option, value, 0, 0, 0)


def is_plain(path: Path) -> bool:
    """A file itself: no link to that of another, and no pipe, which blocks whoever reads it."""
    return path.is_file() and not path.is_symlink()


class Sandbox:
    """Runs checks, also several at a time from threads, and leaves nothing running behind."""

    def __init__(self, wrap: str = "") -> None:
        """`wrap`: a command that each check's command is put behind, for example a container's."""
        self.wrap = shlex.split(wrap)
        self.lock, self.running = threading.Lock(), set()
        self.adopts = _adopts_orphans()

    def check(self, number: int | str, file: Path | str, seed: int = 0) -> dict:
        """The verdict on a file, or on "solution": checking.Verdict, `printed`, and `seconds`."""
        began = time.monotonic()
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            verdict, errors = Path(folder, "verdict.json"), Path(folder, "errors")
            command = [sys.executable, "-m", "exercises.child", str(number), str(file), str(seed)]
            work = Path(folder, "work")
            work.mkdir()
            with errors.open("wb") as stream:
                code = self._run([*self.wrap, *command, str(verdict)], work, stream)
            seconds = time.monotonic() - began
            found = _read(verdict) or _no_verdict(code, errors, seconds >= KILL_SECONDS)
        return found | {"seconds": round(seconds, 1)}

    def _run(self, command: list[str], work: Path, errors: BinaryIO) -> int:
        """Run a command for at most KILL_SECONDS: its exit code, negative where it was killed."""
        with self.lock:  # it must be known as running before others look for what is left behind
            process = subprocess.Popen(
                command,
                cwd=work,
                env={"PYTHONPATH": str(FOLDER.parent), "OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                start_new_session=True,  # and so a process group, which is killed as a whole
            )
            self.running.add(process.pid)
        try:
            with suppress(subprocess.TimeoutExpired):
                process.wait(KILL_SECONDS)
        finally:
            with suppress(ProcessLookupError):  # all of them have ended
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            with self.lock:
                self.running.remove(process.pid)
                self._end_left_behind()
        return process.returncode

    def end(self) -> None:
        """Kill the checks that run: whoever waits for them continues."""
        with self.lock:
            for pid in self.running:
                with suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)

    def _end_left_behind(self) -> None:
        """Kill what checks have left behind; the children of each then become ours, and so on."""
        while self.adopts and (left := _children() - self.running):
            for pid in left:
                with suppress(ProcessLookupError, ChildProcessError):
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)


def _children() -> set[int]:
    """The processes whose parent is this one."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has just ended
            fields = path.read_text().rpartition(")")[2].split()
            found |= {int(path.parent.name)} if int(fields[1]) == os.getpid() else set()
    return found


def _read(path: Path) -> dict | None:
    """The verdict, if it is of the right form: a process with strangers' code has written it."""
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        if not is_plain(path) or path.stat().st_size > LARGEST_VERDICT:
            return None
        found = json.loads(path.read_text())
        texts = [found[key] for key in ("mistake", "message", "picture", "printed")]
        texts += [text for pair in found["gates"].items() for text in pair]
        if all(isinstance(text, str) for text in texts) and isinstance(found["passed"], bool):
            return {**found, "gates": {g: t for g, t in found["gates"].items() if g in GATES}}
    return None


def _no_verdict(code: int, errors: Path, was_late: bool = False) -> dict:
    parts = {"passed": False, "gates": {}, "picture": "", "printed": ""}
    if was_late:
        late = f"killed after {KILL_SECONDS:g} s: if the machine is busy, try again."
        return parts | {"mistake": "timeout", "message": f"The check was {late}"}
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
    # A student's code may have deleted or replaced it.
    lines = errors.read_text(errors="replace").splitlines()[-5:] if is_plain(errors) else []
    message = "\n    ".join([f"The check's process {how} and left no verdict.", *lines])
    return parts | {"mistake": "crash", "message": message}
