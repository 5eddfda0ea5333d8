"""When each rank of a pipeline did what, measured: a Chrome trace to lay beside the plan.

    python -m picotron_min.pipeline_schedule --trace FILE     draws it under the plan
    chrome://tracing or ui.perfetto.dev                       opens it, too

Only the forwards and backwards themselves are timed, not the wait for what they need: that is the
bubble. On a GPU the device is synchronised around each, which costs what overlap there was in it;
so only a few steps are traced. The clock is one per machine: between nodes it may be off.
"""

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import torch
import torch.distributed as dist

from picotron_min.collectives import Axis
from picotron_min.pipeline_schedule import Action

Watch = Callable[[Action], AbstractContextManager]


class Trace:
    """Events of the steps in `steps`, on every rank of one pipeline."""

    def __init__(self, steps: range, pp: Axis, device: torch.device) -> None:
        self.steps, self.pp, self.events = steps, pp, []
        self._wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None

    def watch(self, step: int) -> Watch:
        """What the pipeline does its actions within, in a step."""
        if step not in self.steps:
            return contextlib.nullcontext

        @contextlib.contextmanager
        def timed(action: Action) -> Iterator[None]:
            self._wait()
            began = time.time()
            yield
            self._wait()
            self.events.append(
                {
                    "name": str(action),
                    "ph": "X",
                    "ts": began * 1e6,
                    "dur": (time.time() - began) * 1e6,
                    "pid": self.pp.rank,
                    "tid": 0,
                    "args": {
                        "step": step,
                        "micro_batch": action.micro_batch,
                        "chunk": action.chunk,
                    },
                }
            )

        return timed

    def write(self, path: Path) -> None:
        """Gather all ranks' events on the first rank of the pipeline, which writes the file."""
        gathered = [None] * self.pp.size if self.pp.rank == 0 else None
        dist.gather_object(self.events, gathered, group=self.pp.group, group_dst=0)
        if self.pp.rank == 0:
            events = [event for of_rank in gathered for event in of_rank]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps({"traceEvents": events}) + "\n")
