"""One check, in a process of its own, which sandbox.py starts and ends.

It limits itself, reads the student's file, and sends its verdict as JSON. Modules that import torch
are imported within functions: sandbox.py imports this one.
"""

import io
import json
import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

from exercises.exercise import Verdict, load
from exercises.source import BadFile, parse_checked, solution
from exercises.world import line_in

# A check that has computed for so long reports its line. sandbox.py ends one that only waits.
STUCK_CPU_SECONDS = 5
LIMITS = {"RLIMIT_CPU": 60, "RLIMIT_AS": 4 * 2**30, "RLIMIT_FSIZE": 10 * 2**20, "RLIMIT_CORE": 0}
PRINTED = 2000  # characters of what a student prints that are kept


def run(number: int | str, file: str, seed: int, verdicts: Connection, work: str) -> None:
    """Send the verdict on a file, and end this process."""
    os.setsid()  # a group of processes, which is ended as a whole, and gets no Ctrl-C
    printed = Printed()

    def finish(verdict: Verdict) -> None:
        stop_after(0)
        verdict = verdict._replace(printed=printed.shown())
        verdicts.send_bytes(json.dumps(verdict._asdict()).encode())
        os._exit(0)  # threads of a student may still run

    try:
        path = Path(file)
        os.chdir(work)
        os.environ.clear()
        for stream in range(3):
            os.dup2(os.open(os.devnull, os.O_RDWR), stream)
        sys.stdout = sys.stderr = printed
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


def stop_after(cpu_seconds: float) -> None:
    signal.setitimer(signal.ITIMER_PROF, cpu_seconds)


def stop_when_stuck(student: Path, finish: Callable[[Verdict], None]) -> None:
    """From now on end a check that computes for too long, with the student's line."""

    def stop(*_: object) -> None:
        message = f"Stopped after {STUCK_CPU_SECONDS} s of computing: it has not ended."
        stacks = map(traceback.extract_stack, sys._current_frames().values())
        # Of the rank that runs: the other ranks pause.
        stacks = (stack for stack in stacks if "pause" not in (f.name for f in stack))
        if where := next(filter(None, (line_in(student, stack) for stack in stacks)), ""):
            message += f"\n    it was at {where}"
        finish(Verdict(False, {}, "timeout", message))

    signal.signal(signal.SIGPROF, stop)
    stop_after(STUCK_CPU_SECONDS)


def _exercise(number: int, path: Path, seed: int) -> Verdict:
    import torch

    from exercises.checking import verdict_on
    from exercises.outcome import outcome_of

    torch.set_num_threads(1)
    exercise = load(number)
    text = solution(exercise) if str(path) == "solution" else path.read_text(errors="replace")
    outcome = outcome_of(exercise, text, path, seed)
    stop_after(0)  # what follows may run all known mistakes
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
    return Verdict(marks > 0, {}, "", f"{text}\n{marks} of 3 marks", picture)


class Printed(io.TextIOBase):
    """What a student prints: the beginning is shown, and no more is kept."""

    text = ""

    def write(self, text: str) -> int:
        self.text = (self.text + text)[: PRINTED + 1]
        return len(text)

    def shown(self) -> str:
        text = self.text[:PRINTED]
        return text if text == self.text else f"{text.rstrip()}\n... cut\n"
