"""Runs one check in a process of its own, with limits, and reads its verdict.

    fresh working folder, empty environment, limits on CPU time, memory and files; its process group
    is killed when the verdict is there, or after KILL_SECONDS

Servers, which have imported torch, fork the checks. It catches accidents: endless loops, too much
memory, endless output, sys.exit. It is no prison, see WARNING. Standard library only: the process
that starts checks needs no torch.
"""

import ctypes
import json
import os
import select
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from exercises.exercise import FOLDER, GATES

# A check that has computed, or slept, for so long ends itself and reports the line.
STUCK_CPU_SECONDS, STUCK_SECONDS = 5, 8
COMPUTED = "s of computing"  # in the message of a check that was stopped for that
KILL_SECONDS = 300  # by the clock, for a check that cannot end itself: then it is killed
LIMITS = {"RLIMIT_CPU": 60, "RLIMIT_AS": 4 * 2**30, "RLIMIT_FSIZE": 10 * 2**20, "RLIMIT_CORE": 0}
MORE_PROCESSES = 100  # and threads, than there are on the machine
HAS_FORK = hasattr(os, "fork")  # not on Windows: there each check imports torch, and has no limits
LARGEST_VERDICT = 200_000  # bytes
STREAMS = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
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
    if not HAS_FORK:
        return
    if function := getattr(ctypes.CDLL(None), "prctl", None):
        function(option, value, 0, 0, 0)


def is_plain(path: Path) -> bool:
    """A file itself: no link to that of another, and no pipe, which blocks whoever reads it."""
    return path.is_file() and not path.is_symlink()


class Process:
    """A command in a session of its own, and so a group of processes that is killed as a whole."""

    def __init__(self, command: list[str], **options: Any) -> None:
        environment = {"PYTHONPATH": str(FOLDER.parent), "OMP_NUM_THREADS": "1"}
        environment |= {n: os.environ[n] for n in ("SYSTEMROOT", "TEMP") if n in os.environ}
        self.process = subprocess.Popen(
            command, env=environment, start_new_session=True, **STREAMS | options
        )
        self.pid, self.code = self.process.pid, None

    def wait(self, seconds: float) -> bool:
        """Whether it has ended; then `code` is its exit code, negative where it was killed."""
        with suppress(subprocess.TimeoutExpired):
            self.code = self.process.wait(seconds)
        return self.code is not None


class Server(Process):
    """A process that has imported torch, and forks checks, one after the other: see child.py."""

    def __init__(self) -> None:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": None}
        # Not buffered, since `select` knows nothing of what a buffer holds.
        super().__init__([sys.executable, "-m", "exercises.child"], bufsize=0, **pipes)

    def start(self, *arguments: object) -> None:
        self.code = None
        with suppress(OSError, ValueError):  # it was killed
            self.process.stdin.write(json.dumps([*map(str, arguments)]).encode() + b"\n")
            self.pid = int(self.process.stdout.readline())

    def wait(self, seconds: float) -> bool:  # for the check
        if self.code is None and select.select([self.process.stdout], [], [], seconds)[0]:
            self.code = int(self.process.stdout.readline() or -signal.SIGKILL)
        return self.code is not None

    def end(self) -> None:
        for stream in (self.process.stdin, self.process.stdout):
            with suppress(OSError):
                stream.close()
        self.process.wait()


class Sandbox:
    """Runs checks, also several at a time from threads, and leaves nothing running behind."""

    def __init__(self, wrap: str = "") -> None:
        """`wrap`: a command that each check's command is put behind, for example a container's."""
        self.wrap, self.forks = shlex.split(wrap), HAS_FORK and not wrap
        self.lock, self.running, self.servers = threading.Lock(), set(), []
        self.turn, self.checks, self.is_alone = threading.Condition(), 0, False
        self.adopts = _adopts_orphans()

    def check(self, number: int | str, file: Path | str, seed: int = 0) -> dict:
        """The verdict on a file, or on "solution": checking.Verdict, `printed`, and `seconds`.

        A check that was lost, perhaps because the machine is busy, is repeated alone.
        """
        for alone in (False, True):
            with self._turn(alone):
                found = self._check(number, file, seed)
            if found["mistake"] not in ("timeout", "crash") or COMPUTED in found["message"]:
                break
        return found

    @contextmanager
    def _turn(self, alone: bool) -> Iterator[None]:
        """Within, this check runs, and no other one if it must be alone."""
        with self.turn:
            self.turn.wait_for(lambda: not self.is_alone)
            self.is_alone = alone
            self.turn.wait_for(lambda: not (alone and self.checks))
            self.checks += 1
        try:
            yield
        finally:
            with self.turn:
                self.checks -= 1
                self.is_alone = self.is_alone and not alone
                self.turn.notify_all()

    def _check(self, number: int | str, file: Path | str, seed: int) -> dict:
        began = time.monotonic()
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            verdict, errors, work = (Path(folder, x) for x in ("verdict.json", "errors", "work"))
            work.mkdir()
            code = self._run((number, file, seed, verdict), work, errors)
            found = _read(verdict) or _no_verdict(code, errors)
        return found | {"seconds": round(time.monotonic() - began, 1)}

    def _run(self, arguments: tuple, work: Path, errors: Path) -> int | None:
        """Run a check: its exit code; None if it was killed for want of time."""
        with self.lock, errors.open("wb") as stream:
            # It must be known as running before others look for what is left behind.
            if not self.forks:
                command = [*self.wrap, sys.executable, "-m", "exercises.child"]
                check = Process([*command, *map(str, arguments)], cwd=work, stderr=stream)
            else:
                check = self.servers.pop() if self.servers else Server()
            own = {check.process.pid}
            self.running |= own
        if self.forks:
            check.start(*arguments, work, errors)
            own.add(check.pid)
            self.running.add(check.pid)
        in_time = False
        try:
            in_time = check.wait(KILL_SECONDS)
        finally:
            _kill(check.pid)
            check.wait(KILL_SECONDS)
            with self.lock:
                self.running -= own
                if self.forks and check.process.poll() is None:
                    self.servers.append(check)
                self._end_left_behind()
        return check.code if in_time else None

    def end(self) -> None:
        """Kill the checks that run: whoever waits for them continues."""
        with self.lock:
            for pid in self.running:
                _kill(pid)

    def __del__(self) -> None:
        for server in self.servers:  # those that wait for a next check
            server.end()

    def _end_left_behind(self) -> None:
        """Kill what checks have left behind; the children of each then become ours, and so on."""
        idle = {server.process.pid for server in self.servers}
        while self.adopts and (left := _children() - self.running - idle):
            for pid in left:
                with suppress(ProcessLookupError, ChildProcessError):
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)


def _kill(pid: int) -> None:
    """End a group of processes; without groups, the process."""
    with suppress(OSError):  # all of them have ended
        os.killpg(pid, signal.SIGKILL) if HAS_FORK else os.kill(pid, signal.SIGTERM)


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


def _no_verdict(code: int | None, errors: Path) -> dict:
    parts = {"passed": False, "gates": {}, "picture": "", "printed": ""}
    if code is None:
        message = f"The check was killed after {KILL_SECONDS:g} s: it had not ended."
        return parts | {"mistake": "timeout", "message": message}
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
    # A student's code may have deleted or replaced it.
    lines = errors.read_text(errors="replace").splitlines()[-5:] if is_plain(errors) else []
    message = "\n    ".join([f"The check's process {how} and left no verdict.", *lines])
    return parts | {"mistake": "crash", "message": message}
