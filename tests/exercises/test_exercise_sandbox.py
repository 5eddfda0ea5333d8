"""Checks in processes of their own: their limits, what they leave behind, and their verdicts."""

import json
import multiprocessing
import os
import re
import signal
import time
from pathlib import Path

import pytest

from exercises import child, sandbox
from exercises.child import Printed
from exercises.exercise import Verdict, load
from exercises.sandbox import Sandbox
from exercises.source import solution

# Of a child's child, which is in no group of processes of the check's.
FORKS = """system = getattr(torch, "os")
    if system.fork() == 0:
        system.setsid()
        if pid := system.fork():
            torch.save(pid, {file!r})
            system._exit(0)
        import time
        time.sleep(1000)
    system.wait()"""


def checked(tmp_path: Path, body: str) -> Verdict:
    """Exercise 4, whose solution does something else beside its work."""
    path = tmp_path / "04_shift.py"
    path.write_text(solution(load(4)).replace("axis.ledger", f"{body}\n    axis.ledger"))
    return Sandbox().check(4, path)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("print('x' * 10**7); torch.empty(10**10)", "on rank 0: RuntimeError.* memory"),
        ("getattr(torch, 'os')._exit(3)", "exited with code 3 and left no verdict"),
        ("torch.save(torch.zeros(10**7), 'file')", "left no verdict|on rank 0: "),
    ],
)
def test_a_check_has_limits(tmp_path, body, message):
    verdict = checked(tmp_path, body)
    assert not verdict.passed and re.search(message, verdict.message), verdict
    assert len(verdict.printed) < 5000 and verdict.seconds


def test_a_check_leaves_nothing_running(tmp_path):
    import torch

    assert checked(tmp_path, FORKS.format(file=str(tmp_path / "pid"))).passed
    with pytest.raises(ProcessLookupError):
        os.kill(torch.load(tmp_path / "pid"), 0)


class Stuck(Exception):
    pass


@pytest.mark.parametrize(
    ("line", "limits", "message"),
    [
        ("while True: pass", (0.1, 99), "Stopped after 0.1 s of computing: "),
        ("time.sleep(99)", (99, 0.1), "Stopped after 0.1 s: "),
    ],
)
def test_a_check_that_does_not_end_is_stopped_with_its_line(
    tmp_path, monkeypatch, line, limits, message
):
    def finish(verdict: Verdict) -> None:
        assert verdict.mistake == "timeout" and verdict.message.startswith(message)
        assert verdict.message.endswith(f"it was at line 1: {line}")
        raise Stuck

    monkeypatch.setattr(child, "STUCK_CPU_SECONDS", limits[0])
    monkeypatch.setattr(child, "STUCK_SECONDS", limits[1])
    (path := tmp_path / "student.py").write_text(line)
    before = [signal.getsignal(kind) for kind in (signal.SIGPROF, signal.SIGALRM)]
    with pytest.raises(Stuck):
        child.stop_when_stuck(path, finish)
        exec(compile(line, str(path), "exec"), {"time": time})
    child.set_timers(0, 0)
    for kind, handler in zip((signal.SIGPROF, signal.SIGALRM), before, strict=True):
        signal.signal(kind, handler)


@pytest.mark.quick
def test_what_is_printed_is_cut_after_some_lines_and_characters():
    for text, shown in (
        ("whole\n", "whole\n"),
        ("".join(f"{i}\n" for i in range(99)), "".join(f"{i}\n" for i in range(20)) + "... cut\n"),
        ("x" * 10**5, "x" * 4000 + "\n... cut\n"),
    ):
        printed = Printed()
        printed.write(text)
        assert printed.shown() == shown and len(printed.text) < 5000


@pytest.mark.parametrize(
    ("change", "limit", "is_read"),
    [
        ({}, 1000, True),
        ({}, 10, False),
        ({"passed": 1}, 1000, False),
        ({"message": 1}, 1000, False),
        ({"gates": {"V": 1}}, 1000, False),
        ({"gates": [1]}, 1000, False),
    ],
)
def test_a_verdict_is_read_only_if_it_has_the_right_form_and_size(
    change, limit, is_read, monkeypatch
):
    verdict = Verdict(True, {"V": "", "Z": "no gate"}, "", "text")._asdict() | change
    ours, theirs = multiprocessing.Pipe(duplex=False)
    theirs.send_bytes(json.dumps(verdict).encode())
    monkeypatch.setattr(sandbox, "LARGEST_VERDICT", limit)
    found = sandbox._received(ours)
    assert found.gates == ({"V": ""} if is_read else {}) and found.passed == is_read
    assert is_read or found.message == "The check left no verdict."


def test_a_check_that_does_not_answer_is_ended(monkeypatch):
    monkeypatch.setattr(sandbox, "KILL_SECONDS", 0)
    ours, _theirs = multiprocessing.Pipe(duplex=False)
    assert sandbox._received(ours).message == "The check was ended after 0 s."
