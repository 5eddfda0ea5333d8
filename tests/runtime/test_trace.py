"""A traced step, on a GPU that is emulated: it must not wait for messages."""

import json
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from picotron_min.pipeline_schedule import Action, Kind
from picotron_min.runtime.trace import Trace

PLAN = [Action(kind, i) for kind in (Kind.FORWARD, Kind.BACKWARD) for i in range(3)]


class FakeGpu:
    """A stream that computes, beside messages that end only when other ranks have come."""

    def __init__(self) -> None:
        self.clock, self.has_messages = 0.0, False  # ms

    def synchronize(self) -> None:
        assert not self.has_messages, "deadlock: waits for messages, and the others for this rank"

    def Event(self, enable_timing: bool) -> SimpleNamespace:
        """torch.cuda.Event: what it waits for is in its own stream, but that too has to come."""
        event = SimpleNamespace(synchronize=self.synchronize)
        event.record = lambda: setattr(event, "at", self.clock)
        event.elapsed_time = lambda end: end.at - event.at
        return event


def test_a_traced_step_does_not_wait_for_messages(tmp_path):
    gpu = FakeGpu()
    with mock.patch.multiple("torch.cuda", synchronize=gpu.synchronize, Event=gpu.Event):
        trace = Trace(range(2, 3), None, torch.device("cuda"), "1f1b")
        watch = trace.watch(2)
        gpu.has_messages = True  # from the first action on to the end of the step
        for action in PLAN:
            with watch(action):
                gpu.clock += 1.0 if action.kind is Kind.FORWARD else 2.0
        gpu.has_messages = False
        events = gathered(trace, tmp_path / "trace.json")
    assert [event["dur"] for event in events] == [1000.0] * 3 + [2000.0] * 3
    assert [event["ts"] - events[0]["ts"] for event in events] == pytest.approx(
        [0, 1000, 2000, 3000, 5000, 7000], abs=0.5
    )
    assert abs(events[0]["ts"] / 1e6 - time.time()) < 60  # on the host's clock


def gathered(trace: Trace, path: Path) -> list[dict]:
    """The events that a trace writes, as the only rank of its pipeline."""
    trace.pp = SimpleNamespace(rank=0, size=1, group=None)

    def gather(events: list, into: list, **_) -> None:
        into[0] = events

    with mock.patch("torch.distributed.gather_object", gather):
        trace.write(path)
    return json.loads(path.read_text())["traceEvents"]
