"""A traced step on a GPU, emulated: what waits for messages that are posted, and what does not."""

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from picotron_min.extensions.schedules.registry import build_plans
from picotron_min.pipeline_schedule import RECEIVES, SENDS, Action, Kind
from picotron_min.runtime.draw import read_trace
from picotron_min.runtime.trace import Trace

RANKS = 2
TIMEOUT = 5.0  # s; only a deadlock takes so long
THIS_THREAD = threading.local()  # .device: the FakeDevice of the rank that runs in the thread


class FakeDevice:
    """A GPU with two streams: the current one computes, the other one has messages.

    A message ends when its other end is posted. `synchronize` waits for both streams, as
    torch.cuda.synchronize does; an event only for what its own stream had before it.
    """

    def __init__(self) -> None:
        self.messages: list[threading.Event] = []
        self.clock = 0.0  # ms of the current stream

    def synchronize(self) -> None:
        for message in self.messages:
            if not message.wait(TIMEOUT):
                raise TimeoutError("deadlock: the device waits for a message that never comes")


class FakeEvent:
    """torch.cuda.Event on the current stream of this thread's device."""

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = THIS_THREAD.device.clock

    def synchronize(self) -> None:
        assert self.at <= THIS_THREAD.device.clock

    def elapsed_time(self, end: "FakeEvent") -> float:
        return end.at - self.at


class OldTrace(Trace):
    """As it was: the device is synchronised around each action."""

    def watch(self, step: int) -> Callable:
        @contextlib.contextmanager
        def timed(action: Action) -> Iterator[None]:
            torch.cuda.synchronize()
            yield
            torch.cuda.synchronize()

        return timed


def run_rank(rank: int, trace: Trace, ends: dict, last: threading.Barrier) -> None:
    """A step of 1F1B. As in a pipeline with a tied embedding, the first and the last rank meet in a
    collective, which each starts in its last backward and which ends when both have."""
    device = THIS_THREAD.device = FakeDevice()
    plan = build_plans("1f1b", RANKS, 3)[rank]
    watch = trace.watch(2)
    for action in plan:
        kind, i = action.kind, action.micro_batch
        if action.peer is not None:
            name = (next(k for k in (SENDS | RECEIVES) if kind in (SENDS[k], RECEIVES[k])), i)
            is_send = kind in SENDS.values()
            ends[name, is_send].set()
            device.messages.append(ends[name, not is_send])
            continue
        if receive := next((a for a in plan if a.kind is RECEIVES[kind] and a[1] == i), None):
            arrived = ends[(kind, receive.micro_batch), True]
            assert arrived.wait(TIMEOUT), f"rank {rank}: nothing arrives for {action}"
        with watch(action):
            device.clock += 1.0 if kind is Kind.FORWARD else 2.0
            if kind is Kind.BACKWARD and i == 2:
                ends["tied", rank].set()
                device.messages.append(ends["tied", 1 - rank])
    last.wait(TIMEOUT)


def run_step(kind: type[Trace]) -> tuple[list[Trace], list[BaseException]]:
    """One traced step on two fake GPUs; the traces, and what failed."""
    device = torch.device("cuda")
    traces = [kind(range(2, 3), SimpleNamespace(rank=r), device, "1f1b") for r in range(RANKS)]
    names = [(k, i) for k in (Kind.FORWARD, Kind.BACKWARD) for i in range(3)]
    ends = {(name, is_send): threading.Event() for name in names for is_send in (False, True)}
    ends |= {("tied", rank): threading.Event() for rank in range(RANKS)}
    last, failures = threading.Barrier(RANKS), []

    def rank_thread(rank: int) -> None:
        try:
            run_rank(rank, traces[rank], ends, last)
        except BaseException as error:
            failures.append(error)
            last.abort()

    threads = [threading.Thread(target=rank_thread, args=(rank,)) for rank in range(RANKS)]
    with (
        mock.patch("torch.cuda.synchronize", lambda: THIS_THREAD.device.synchronize()),
        mock.patch("torch.cuda.Event", FakeEvent),
    ):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return traces, failures


def test_synchronising_the_device_around_actions_deadlocks():
    with mock.patch(f"{__name__}.TIMEOUT", 0.5):
        _, failures = run_step(OldTrace)
    assert any("the device waits for a message that never comes" in str(e) for e in failures)


def test_a_traced_step_does_not_wait_for_messages(tmp_path):
    traces, failures = run_step(Trace)
    assert not failures
    for trace in traces:
        THIS_THREAD.device = FakeDevice()
        THIS_THREAD.device.clock = 9.0  # the end of the step
        events = gathered(trace, tmp_path / "trace.json")
        assert [event["dur"] for event in events if event["name"][0] == "F"] == [1000.0] * 3
        assert [event["dur"] for event in events if event["name"][0] == "B"] == [2000.0] * 3
        busy = [event["ts"] - events[0]["ts"] for event in events]
        assert busy == sorted(busy) and busy[-1] == pytest.approx(7000.0, abs=0.5)
        assert abs(events[0]["ts"] / 1e6 - time.time()) < 60  # on the host's clock


def gathered(trace: Trace, path: Path) -> list[dict]:
    """The events that a trace writes, as the only rank of its pipeline."""
    trace.pp = SimpleNamespace(rank=0, size=1, group=None)

    def gather(events: list, into: list, **_) -> None:
        into[0] = events

    with mock.patch("torch.distributed.gather_object", gather):
        trace.write(path)
    return json.loads(path.read_text())["traceEvents"]


def test_on_a_cpu_actions_are_timed_by_the_host(tmp_path):
    trace = Trace(range(1, 2), SimpleNamespace(rank=0), torch.device("cpu"), "afab")
    with trace.watch(0)(Action(Kind.FORWARD, 0)):  # a step that is not traced
        pass
    watch, began = trace.watch(1), time.time()
    for action in (Action(Kind.FORWARD, 0), Action(Kind.BACKWARD, 0)):
        with watch(action):
            time.sleep(0.02)
    elapsed = time.time() - began
    forward, backward = gathered(trace, tmp_path / "trace.json")
    assert (forward["name"], backward["name"]) == ("F0", "B0")
    assert forward["args"] == {"step": 1, "micro_batch": 0, "chunk": 0}
    assert 20_000 <= forward["dur"] <= elapsed * 1e6
    assert forward["ts"] + forward["dur"] <= backward["ts"] + 1
    assert abs(forward["ts"] - began * 1e6) < 50_000
    engine, step, timeline, _ = read_trace(tmp_path / "trace.json")
    assert (engine, step, len(timeline.spans)) == ("afab", 1, 2)
