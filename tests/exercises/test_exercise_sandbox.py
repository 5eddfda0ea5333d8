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
    assert verdict.seconds and verdict.printed in ("", "x" * child.PRINTED + "\n... cut\n")


def test_a_check_leaves_nothing_running(tmp_path):
    import torch

    assert checked(tmp_path, FORKS.format(file=str(tmp_path / "pid"))).passed
    with pytest.raises(ProcessLookupError):
        os.kill(torch.load(tmp_path / "pid"), 0)


class Stuck(Exception):
    pass


@pytest.mark.parametrize(
    ("line", "limit", "after"),
    [
        ("while True: pass", "STUCK_CPU_SECONDS", "0.1 s of computing"),
        ("time.sleep(99)", "STUCK_SECONDS", "0.1 s"),
    ],
)
def test_a_check_that_does_not_end_is_stopped_with_its_line(
    tmp_path, monkeypatch, line, limit, after
):
    def finish(verdict: Verdict) -> None:
        assert verdict.mistake == "timeout" and f"Stopped after {after}: " in verdict.message
        assert verdict.message.endswith(f"it was at line 1: {line}")
        raise Stuck

    monkeypatch.setattr(child, limit, 0.1)
    (path := tmp_path / "student.py").write_text(line)
    kinds = signal.SIGPROF, signal.SIGALRM
    before = [signal.getsignal(kind) for kind in kinds]
    with pytest.raises(Stuck):
        child.stop_when_stuck(path, finish)
        exec(compile(line, str(path), "exec"), {"time": time})
    child.set_timers(0, 0)
    for kind, handler in zip(kinds, before, strict=True):
        signal.signal(kind, handler)


@pytest.mark.quick
def test_a_verdict_is_read_only_if_it_has_the_right_form_and_size(monkeypatch):
    ours, theirs = multiprocessing.Pipe(duplex=False)
    right = Verdict(True, {"V": "", "Z": "no gate"}, "", "text")._asdict()

    def received(**change) -> Verdict:
        theirs.send_bytes(json.dumps(right | change).encode())
        return sandbox._received(ours)

    found = received()
    assert found.passed and found.gates == {"V": ""}
    for change in ({"passed": 1}, {"gates": {"V": 1}}, {"gates": [1]}):
        assert received(**change).message == "The check left no verdict."
    monkeypatch.setattr(sandbox, "KILL_SECONDS", 0)
    assert sandbox._received(ours).message == "The check was ended after 0 s."
    monkeypatch.setattr(sandbox, "LARGEST_VERDICT", 10)
    assert received().message == "The check left no verdict."
