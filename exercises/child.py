"""Runs checks in processes of their own: `python -m exercises.child`, which sandbox.py starts.

It is a server: it imports torch once, which takes seconds, and forks a check for each line that it
reads. A check limits itself before it reads the student's file, and writes its verdict as JSON, as
its last act.
"""

import contextlib
import ctypes
import io
import json
import os
import resource
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from functools import cache
from pathlib import Path

from exercises.exercise import Verdict, course_problem, load
from exercises.sandbox import LIMITS, MORE_PROCESSES, STUCK_CPU_SECONDS, STUCK_SECONDS
from exercises.source import BadFile, parse_checked, solution
from exercises.world import line_in

PRINTED_LINES, PRINTED = 20, 4000  # lines and characters of what a student prints that are kept
PR_SET_CHILD_SUBREAPER = 36  # of Linux


def serve() -> None:
    """For each line run a check, end all that it leaves behind, and print its exit code."""
    if sys.platform == "linux":  # what a check leaves behind becomes a child of this process
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGTERM, lambda *_: (end_children(), os._exit(1)))
    for line in sys.stdin:
        *arguments, work, errors = json.loads(line)
        if problem := prepare(arguments[0]):
            write(Verdict(False, {}, "course_at_fault", problem), arguments[-1])
            print(0, flush=True)
            continue
        if pid := os.fork():
            _, status = os.waitpid(pid, 0)
            with contextlib.suppress(OSError):  # all of its group have ended
                os.killpg(pid, signal.SIGKILL)
            end_children()
            print(os.waitstatus_to_exitcode(status), flush=True)
            continue
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.chdir(work)
        os.setsid()  # a group of processes, which is killed as a whole
        for stream, file in enumerate((os.devnull, os.devnull, errors)):
            os.dup2(os.open(file, os.O_RDWR | os.O_CREAT), stream)
        try:
            main(*arguments)
        finally:  # an error of this checker
            traceback.print_exc()
            os._exit(1)


@cache
def prepare(number: str) -> str:
    """Import and compute once, before a fork, what a check needs; what is wrong with the course."""
    try:
        import torch

        from exercises import design_marks  # noqa: F401
        from exercises.checking import check

        torch.set_num_threads(1)
        if number.isdecimal():  # else a design
            check(load(int(number)), solution(load(int(number))), Path("solution"))
        return ""
    except Exception as error:
        if problem := course_problem(error):
            return problem
        raise


def write(verdict: Verdict, path: str) -> None:
    Path(path).write_text(json.dumps(verdict._asdict()))


def end_children() -> None:
    """Kill all children; on Linux the children of each then become ours, and so on."""
    place = Path(f"/proc/self/task/{os.getpid()}/children")
    while pids := place.read_text().split() if place.exists() else []:
        for pid in map(int, pids):
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def main(number: str, file: str, seed: str, verdict_path: str) -> None:
    limits = dict(LIMITS)
    with contextlib.suppress(OSError):  # not Linux. Root has no such limit
        tasks = Path("/proc/loadavg").read_text().split()[3].partition("/")[2]
        limits["RLIMIT_NPROC"] = int(tasks) + MORE_PROCESSES
    for limit, value in limits.items():
        hard = resource.getrlimit(getattr(resource, limit))[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(getattr(resource, limit), (value, value))
    path, printed, has_ended, once = Path(file), Printed(), threading.Event(), threading.Lock()
    sys.stdout = sys.stderr = printed

    def finish(verdict: Verdict) -> None:
        once.acquire()  # never released: the first verdict is the only one
        write(verdict._replace(printed=printed.shown()), verdict_path)
        os._exit(0)  # threads of a student may still run

    threading.Thread(target=_watch, args=(path, finish, has_ended), daemon=True).start()
    finish(_design(path) if number == "design" else _exercise(number, path, int(seed), has_ended))


def _exercise(number: str, path: Path, seed: int, has_ended: threading.Event) -> Verdict:
    """The verdict on a file; `has_ended` is set when no code of the student runs any more."""
    from exercises.checking import verdict_on
    from exercises.outcome import outcome_of

    exercise = load(int(number))
    text = solution(exercise) if str(path) == "solution" else path.read_text(errors="replace")
    outcome = outcome_of(exercise, text, path, seed)
    has_ended.set()  # what follows may run all known mistakes
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
        text = "".join(self.text.splitlines(keepends=True)[:PRINTED_LINES])[:PRINTED]
        return text if text == self.text else f"{text.rstrip()}\n... cut\n"


def _watch(student: Path, finish: Callable[[Verdict], None], has_ended: threading.Event) -> None:
    """End a check that computes or sleeps for too long, with the student's line."""
    first = last = time.process_time()
    idle = 0.0
    while not has_ended.wait(0.2):
        cpu, idle = time.process_time(), idle + 0.2  # by turns: on a busy machine they are rare
        if cpu - last > 0.1:
            last, idle = cpu, 0.0
        is_computing = cpu - first > STUCK_CPU_SECONDS
        if is_computing or idle > STUCK_SECONDS:
            cpu_limit, limit = f"{STUCK_CPU_SECONDS} s of computing", f"{STUCK_SECONDS} s of sleep"
            message = f"Stopped after {cpu_limit if is_computing else limit}: it has not ended."
            stacks = map(traceback.extract_stack, sys._current_frames().values())
            # Of the rank that runs: the other ranks pause.
            stacks = (stack for stack in stacks if "pause" not in (f.name for f in stack))
            if where := next(filter(None, (line_in(student, stack) for stack in stacks)), ""):
                message += f"\n    it was at {where}"
            finish(Verdict(False, {}, "timeout", message))


if __name__ == "__main__":
    serve()
