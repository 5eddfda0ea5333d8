"""A traced step, on a GPU that is emulated: it must not wait for messages."""

import json
import time
from types import SimpleNamespace

import pytest
import torch

from picotron_min.pipeline_schedule import Action, Kind
from picotron_min.runtime.trace import Trace

PLAN = [Action(kind, i) for kind in (Kind.FORWARD, Kind.BACKWARD) for i in range(3)]


def test_a_traced_step_on_a_gpu_does_not_wait_for_messages(tmp_path, monkeypatch):
    clock, has_messages = 0.0, False  # ms of its stream; messages end when other ranks have come

    def synchronize() -> None:
        assert not has_messages, "deadlock: waits for messages, and the others for this rank"

    def event(enable_timing: bool) -> SimpleNamespace:
        """torch.cuda.Event: what it waits for is in its own stream, but that too has to come."""
        made = SimpleNamespace(synchronize=synchronize)
        made.record = lambda: setattr(made, "at", clock)
        made.elapsed_time = lambda end: end.at - made.at
        return made

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(torch.cuda, "Event", event)
    one_rank = SimpleNamespace(rank=0, size=1, group=None)
    trace = Trace(range(2, 3), one_rank, torch.device("cuda"), "1f1b")
    watch = trace.watch(2)
    has_messages = True  # from the first action on to the end of the step
    for action in PLAN:
        with watch(action):
            clock += 1.0 if action.kind is Kind.FORWARD else 2.0
    has_messages = False
    gather = lambda mine, all_ranks, **_: all_ranks.__setitem__(0, mine)  # noqa: E731
    monkeypatch.setattr(torch.distributed, "gather_object", gather)
    trace.write(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert [event["dur"] for event in events] == [1000.0] * 3 + [2000.0] * 3
    starts = [event["ts"] - events[0]["ts"] for event in events]
    assert starts == pytest.approx([0, 1000, 2000, 3000, 5000, 7000], abs=0.5)
    assert abs(events[0]["ts"] / 1e6 - time.time()) < 60  # on the host's clock
