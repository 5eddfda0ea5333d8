"""One check, in a process of its own, which sandbox.py starts.

    supervise ── fork ── run: limits itself, reads the student's file, sends its verdict as JSON
        └ kills all that the check has left running

Modules that import torch are imported within functions: sandbox.py imports this one.
"""

import contextlib
import ctypes
import io
import json
import os
import resource
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

from exercises.exercise import Verdict, load
from exercises.source import BadFile, parse_checked, solution
from exercises.world import line_in

# A check that has computed, or is there, for so long reports its line. One that cannot is killed.
STUCK_CPU_SECONDS, STUCK_SECONDS, KILL_SECONDS = 5, 60, 120
LIMITS = {"RLIMIT_CPU": 60, "RLIMIT_AS": 4 * 2**30, "RLIMIT_FSIZE": 10 * 2**20, "RLIMIT_CORE": 0}
PRINTED = 2000  # characters of what a student prints that are kept
PR_SET_CHILD_SUBREAPER = 36  # of Linux


def supervise(number: int | str, file: str, seed: int, verdicts: Connection) -> None:
    """Fork a check, and end all that it leaves behind."""
    os.setsid()  # Ctrl-C is for the process that waits for the verdict
    if sys.platform == "linux":  # what a check leaves behind becomes a child of this process
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGTERM, lambda *_: (end_children(), os._exit(1)))
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as work:
        if not (pid := os.fork()):
            run(number, Path(file), seed, verdicts, work)
        _, status = os.waitpid(pid, 0)
        with contextlib.suppress(OSError):  # all of its group have ended
            os.killpg(pid, signal.SIGKILL)
        end_children()
    code = os.waitstatus_to_exitcode(status)
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
    with contextlib.suppress(OSError):  # after the check's own verdict nobody reads this one
        send(Verdict(False, {}, "lost", f"The check {how} and left no verdict."), verdicts)


def send(verdict: Verdict, verdicts: Connection) -> None:
    verdicts.send_bytes(json.dumps(verdict._asdict()).encode())


def end_children() -> None:
    """Kill all children; on Linux the children of each then become ours, and so on."""
    place = Path(f"/proc/self/task/{os.getpid()}/children")
    while pids := place.read_text().split() if place.exists() else []:
        for pid in map(int, pids):
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def run(number: int | str, path: Path, seed: int, verdicts: Connection, work: str) -> None:
    """Send the verdict on a file, and end this process."""
    printed = Printed()

    def finish(verdict: Verdict) -> None:
        set_timers(0, 0)
        send(verdict._replace(printed=printed.shown()), verdicts)
        os._exit(0)  # threads of a student may still run

    try:
        os.setsid()  # a group of processes, which is killed as a whole
        os.chdir(work)
        os.environ.clear()
        for stream in range(3):
            os.dup2(os.open(os.devnull, os.O_RDWR), stream)
        sys.stdout = sys.stderr = printed
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        limit_resources()
        stop_when_stuck(path, finish)
        finish(_design(path) if number == "design" else _exercise(int(number), path, seed))
    except BaseException:  # an error of this checker
        text = "\n    ".join(traceback.format_exc().splitlines()[-5:])
        finish(Verdict(False, {}, "lost", f"The checker failed:\n    {text}"))


def limit_resources() -> None:
    for limit, value in LIMITS.items():
        hard = resource.getrlimit(getattr(resource, limit))[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(getattr(resource, limit), (value, value))


def set_timers(cpu_seconds: float, seconds: float) -> None:
    signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
    signal.setitimer(signal.ITIMER_REAL, seconds)


def stop_when_stuck(student: Path, finish: Callable[[Verdict], None]) -> None:
    """From now on end a check that computes or sleeps for too long, with the student's line."""

    def stop(number: int, _: object) -> None:
        is_cpu = number == signal.SIGPROF
        limit = f"{STUCK_CPU_SECONDS} s of computing" if is_cpu else f"{STUCK_SECONDS} s"
        message = f"Stopped after {limit}: it has not ended."
        stacks = map(traceback.extract_stack, sys._current_frames().values())
        # Of the rank that runs: the other ranks pause.
        stacks = (stack for stack in stacks if "pause" not in (f.name for f in stack))
        if where := next(filter(None, (line_in(student, stack) for stack in stacks)), ""):
            message += f"\n    it was at {where}"
        finish(Verdict(False, {}, "timeout", message))

    for kind in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(kind, stop)
    set_timers(STUCK_CPU_SECONDS, STUCK_SECONDS)


def _exercise(number: int, path: Path, seed: int) -> Verdict:
    import torch

    from exercises.checking import verdict_on
    from exercises.outcome import outcome_of

    torch.set_num_threads(1)
    exercise = load(number)
    text = solution(exercise) if str(path) == "solution" else path.read_text(errors="replace")
    outcome = outcome_of(exercise, text, path, seed)
    set_timers(0, 0)  # what follows may run all known mistakes
    return verdict_on(exercise, outcome, seed)


def _design(path: Path) -> Verdict:
    """Design 1."""
    from exercises.design_marks import measure_schedule
    from exercises.outcome import failure_of

    names = {"__name__": "design"}
    try:
        code = compile(parse_checked(path.read_text(errors="replace")), str(path), "exec")
        exec(code, names)
        for name in {"schedule", "CHUNKS"} - names.keys():
            raise BadFile(f"the file does not define {name}: it must, at the top level")
        marks, text, picture = measure_schedule(names["schedule"], names["CHUNKS"])
    except BaseException as error:  # whatever a student's code raises
        marks, text, picture = 0, failure_of(error, path).text, ""
    return Verdict(marks > 0, {}, f"marks_{marks}", text, picture)


class Printed(io.TextIOBase):
    """What a student prints: the beginning is shown, and no more is kept."""

    text = ""

    def write(self, text: str) -> int:
        self.text = (self.text + text)[: PRINTED + 1]
        return len(text)

    def shown(self) -> str:
        text = self.text[:PRINTED]
        return text if text == self.text else f"{text.rstrip()}\n... cut\n"
