"""Traces of a pipeline: when each rank computed what, as Chrome's tracing format.

    python -m picotron_min.report FOLDER     draws it under the plan: see draw.py
    chrome://tracing or ui.perfetto.dev      also open it

Actions that compute are timed, without the wait for their input: that is the bubble. On a GPU,
events on its stream mark when they begin and end, and are read when the run is over. (Synchronising
the device would also wait for all outstanding messages, and can deadlock.)
"""

import json
import time
from collections.abc import Container, Iterator
from contextlib import contextmanager, nullcontext
from itertools import chain
from pathlib import Path

import torch
import torch.distributed as dist

from picotron_min.collectives import Axis
from picotron_min.pipeline_parallel import Watch
from picotron_min.pipeline_schedule import Action


class HostEvent:
    """torch.cuda.Event, for a CPU."""

    def record(self) -> None:
        self.time = time.perf_counter()

    def synchronize(self) -> None:
        """It has happened."""

    def elapsed_time(self, end: "HostEvent") -> float:
        return (end.time - self.time) * 1e3  # ms


class Trace:
    """What the steps in `steps` compute when, on every rank of one pipeline."""

    def __init__(self, steps: Container[int], pp: Axis, device: torch.device, engine: str) -> None:
        self.steps, self.pp, self.engine, self.events = steps, pp, engine, []
        self.is_cuda = device.type == "cuda"

    def watch(self, step: int) -> Watch:
        """The context that the pipeline runs each action of a step in that computes."""
        if step not in self.steps:
            return nullcontext
        origin = self._record()
        origin.synchronize()  # no message of this step is posted yet, so this cannot deadlock
        at = time.time() * 1e6  # when the GPU was there, to some 0.1 ms; nodes' clocks differ more

        @contextmanager
        def timed(action: Action) -> Iterator[None]:
            began = self._record()
            yield
            self.events.append((step, action, at, origin, began, self._record()))

        return timed

    def _record(self) -> torch.cuda.Event | HostEvent:
        event = torch.cuda.Event(enable_timing=True) if self.is_cuda else HostEvent()
        event.record()
        return event

    def write(self, path: Path, run_began: str | None = None) -> None:
        """Gather all ranks' events on the first rank of the pipeline, which writes the file.

        `run_began` is what the report recognises its run by.
        """
        events, gathered = [], [None] * self.pp.size if self.pp.rank == 0 else None
        for step, action, at, origin, began, ended in self.events:
            ended.synchronize()
            event = {"name": str(action), "ph": "X", "pid": self.pp.rank, "tid": 0}
            event["ts"] = at + 1e3 * origin.elapsed_time(began)
            event["dur"] = 1e3 * began.elapsed_time(ended)
            event["args"] = {"step": step, "micro_batch": action.micro_batch, "chunk": action.chunk}
            events.append(event)
        dist.gather_object(events, gathered, group=self.pp.group, group_dst=0)
        if gathered:
            about = {"pp_engine": self.engine, "run_began": run_began}
            trace = {"traceEvents": [*chain(*gathered)], "otherData": about}
            path.write_text(json.dumps(trace) + "\n")
