"""A traced step, on a GPU that is emulated: it must not wait for messages; and how it is read."""

import time
from types import SimpleNamespace

import pytest
import torch

from picotron_min.extensions.schedules.registry import build_plans
from picotron_min.pipeline_schedule import Kind
from picotron_min.runtime.draw import plan_of_trace, read_trace
from picotron_min.runtime.trace import Trace


@pytest.mark.quick
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
    trace = Trace(range(2, 4), one_rank, torch.device("cuda"), "interleaved")
    (plan,) = build_plans("interleaved", 1, 2, 2)
    for step in (2, 3):
        watch = trace.watch(step)
        has_messages = True  # from the first action on to the end of the step
        for action in plan:
            with watch(action):
                clock += 1.0 if action.kind is Kind.FORWARD else 2.0
            clock += 0.5  # waits for a message
        has_messages = False
    gather = lambda mine, all_ranks, **_: all_ranks.__setitem__(0, mine)  # noqa: E731
    monkeypatch.setattr(torch.distributed, "gather_object", gather)
    path = tmp_path / "trace.json"
    trace.write(path)
    engine, step, measured, _ = read_trace(str(path))
    assert (engine, step) == ("interleaved", 3)
    assert [span.action for span in measured.spans] == plan
    took = [span.end - span.start for span in measured.spans]
    assert took == [1000.0 if action.kind is Kind.FORWARD else 2000.0 for action in plan]
    assert abs(measured.spans[0].start / 1e6 - time.time()) < 60  # on the host's clock
    assert measured.makespan == pytest.approx(4 * 3000 + 7 * 500, abs=0.5)
    assert plan_of_trace(measured, engine).makespan == 4 * 3000
