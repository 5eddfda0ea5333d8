"""Runs one check in a process of its own, with limits, and reads its verdict.

    fresh working folder, empty environment, limits on CPU time, memory and files; its process group
    is killed when the verdict is there, or after KILL_SECONDS

It catches accidents: endless loops, too much memory, endless output, sys.exit. It is no prison, see
WARNING. Standard library only: the process that starts checks needs no torch.
"""

import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from exercises.exercise import FOLDER, GATES

STUCK_CPU_SECONDS, STUCK_SECONDS = 6, 12  # then a check ends itself and reports the line
KILL_SECONDS = 30  # then it is killed
LIMITS = {"RLIMIT_CPU": 60, "RLIMIT_AS": 4 * 2**30, "RLIMIT_FSIZE": 10 * 2**20, "RLIMIT_CORE": 0}
LARGEST_VERDICT = 200_000  # bytes
WARNING = """\
Not isolated: a student's code runs as you. It can read what you can read, use the network, signal
your other processes, and forge its own verdict, since it runs beside the checker. For strangers'
code use a container or a machine of its own; --wrap "COMMAND" puts one before each check."""


def run_check(number: int, file: Path | str, seed: int = 0, wrap: str = "") -> dict:
    """The verdict on a file, or on "solution": as checking.Verdict, with `printed`, `seconds`."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        verdict, errors = Path(folder, "verdict.json"), Path(folder, "errors")
        command = [sys.executable, "-m", "exercises.child", str(number), str(file), str(seed)]
        environment = {"PYTHONPATH": str(FOLDER.parent), "OMP_NUM_THREADS": "1"}
        work = Path(folder, "work")
        work.mkdir()
        with errors.open("wb") as stream:
            process = subprocess.Popen(
                [*shlex.split(wrap), *command, str(verdict)],
                cwd=work,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stream,
                start_new_session=True,  # and so a process group, which is killed as a whole
            )
            try:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(KILL_SECONDS)
            finally:
                _kill(process)
        found = _read(verdict) or _no_verdict(process.returncode, errors)
    return found | {"seconds": round(time.monotonic() - began, 1)}


def _kill(process: subprocess.Popen) -> None:
    with suppress(ProcessLookupError):  # all of them have ended
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _read(path: Path) -> dict | None:
    """The verdict, if it is of the right form: a process with strangers' code has written it."""
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        if path.stat().st_size > LARGEST_VERDICT:
            return None
        found = json.loads(path.read_text())
        texts = [found[key] for key in ("mistake", "message", "picture", "printed")]
        texts += [text for pair in found["gates"].items() for text in pair]
        if all(isinstance(text, str) for text in texts) and isinstance(found["passed"], bool):
            return {**found, "gates": {g: t for g, t in found["gates"].items() if g in GATES}}
    return None


def _no_verdict(code: int, errors: Path) -> dict:
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
    lines = errors.read_text(errors="replace").splitlines()[-5:]
    message = "\n    ".join([f"The check's process {how} and left no verdict.", *lines])
    parts = {"mistake": "crash", "message": message, "picture": "", "printed": ""}
    return {"passed": False, "gates": {}, **parts}
