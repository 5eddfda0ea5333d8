"""Checks in processes of their own: their limits, what they leave behind, and their verdicts."""

import json
import multiprocessing
import re
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from exercises import child, sandbox
from exercises.exercise import Verdict, load
from exercises.sandbox import Sandbox
from exercises.source import solution


def checked(tmp_path: Path, body: str) -> Verdict:
    """Exercise 4, whose solution does something else beside its work."""
    path = tmp_path / "04_shift.py"
    path.write_text(solution(load(4)).replace("axis.ledger", f"{body}\n    axis.ledger"))
    return Sandbox().check(4, path)


def test_a_check_has_limits(tmp_path):
    verdict = checked(tmp_path, "print('x' * 10**7); torch.empty(10**10)")
    assert re.search("on rank 0: RuntimeError.* memory", verdict.message), verdict
    assert not verdict.passed and verdict.printed == "x" * child.PRINTED + "\n... cut\n"


def test_a_check_leaves_nothing_running_and_its_end_is_seen(tmp_path, monkeypatch):
    import torch

    # The child has the check's end of the pipe, too, and waits for ever.
    file = tmp_path / "pid"
    fork = "system = getattr(torch, 'os'); pid = system.fork(); "
    fork += f"torch.save(pid, {str(file)!r}) if pid else system.read(system.pipe()[0], 1)"
    monkeypatch.setattr(sandbox, "KILL_SECONDS", 60)
    verdict = checked(tmp_path, f"{fork}; system._exit(3)")
    assert verdict.message == "The check left no verdict: its exit code is 3."
    state = Path(f"/proc/{torch.load(file)}/stat")  # none, or a zombie that nobody has awaited yet
    ended = time.monotonic() + 10
    while state.exists() and ") Z " not in state.read_text():
        assert time.monotonic() < ended


class Stuck(Exception):
    pass


def test_a_check_that_does_not_end_is_stopped_with_its_line(tmp_path, monkeypatch):
    def finish(verdict: Verdict) -> None:
        assert verdict.mistake == "timeout"
        assert "Stopped after 0.1 s of computing: " in verdict.message
        assert verdict.message.endswith("it was at line 1: while True: pass")
        raise Stuck

    monkeypatch.setattr(child, "STUCK_CPU_SECONDS", 0.1)
    (path := tmp_path / "student.py").write_text("while True: pass")
    before = signal.getsignal(signal.SIGPROF)
    with pytest.raises(Stuck):
        child.stop_when_stuck(path, finish)
        exec(compile(path.read_text(), str(path), "exec"), {})
    child.stop_after(0)
    signal.signal(signal.SIGPROF, before)


@pytest.mark.quick
def test_a_verdict_is_read_only_if_it_has_the_right_form_and_size(monkeypatch):
    ours, theirs = multiprocessing.Pipe(duplex=False)
    alive = multiprocessing.Pipe()  # of a check that runs
    process = SimpleNamespace(sentinel=alive[0])
    right = Verdict(True, {"V": "", "Z": "no gate"}, "", "text")._asdict()

    def received(**change) -> Verdict:
        theirs.send_bytes(json.dumps(right | change).encode())
        return sandbox._received(ours, process)

    assert received().gates == {"V": ""}
    assert received(passed=1) is received(gates={"V": 1}) is received(gates=[1]) is None
    monkeypatch.setattr(sandbox, "KILL_SECONDS", 0)
    assert sandbox._received(ours, process).message == "The check was ended after 0 s."
    monkeypatch.setattr(sandbox, "LARGEST_VERDICT", 10)
    assert received() is None
