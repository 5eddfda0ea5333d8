"""Runs one case of an exercise on simulated ranks, and records what each rank did."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from exercises.exercise import Case, Sent, together
from exercises.loading import Course
from exercises.simulated_dist import axis_group
from exercises.world import Event, RankThread, World
from picotron_min.collectives import Axis
from picotron_min.extensions.settings import Layout
from picotron_min.mesh import Axes


class Rank:
    """What `on_rank` of an exercise gets: which rank it is, and the course to call."""

    def __init__(self, course: Course, thread: RankThread) -> None:
        self.number, self.course, self.thread = thread.rank, course, thread
        self.used: list[Axis] = []  # whose ledgers are compared with what the network has seen

    def axis(self, name: str = "tp") -> Axis:
        """An axis of the mesh with all simulated ranks, as one of several."""
        self.used.append(self.course.collectives.Axis(name, axis_group(), torch.device("cpu")))
        return self.used[-1]

    def axes(self, layout: Layout) -> Axes:
        """All axes of a layout."""
        axes = self.course.mesh.build_axes(torch.device("cpu"), layout)
        self.used += axes
        return axes

    def mark(self, text: str) -> None:
        """Note, among the events, that something happens now."""
        self.thread.record("mark", text)


@dataclass
class Record:
    """What one rank did in one case."""

    values: dict[str, Any]  # what on_rank returned
    events: list[Event]
    ledger: dict[str, Sent]  # calls and bytes, by the ledgers of its axes
    changed: list[int]  # to whom it was sending a tensor when it changed that

    @property
    def sent(self) -> dict[str, Sent]:
        """Calls and bytes by operation, as the network has seen them; receives are not counted."""
        starts = (e for e in self.events if e.kind == "start" and not e.alone)
        sends = (e for e in starts if e.what not in ("receive", "barrier"))
        return together((e.what, Sent(1, e.bytes)) for e in sends)

    @property
    def unawaited(self) -> list[str]:
        """Operations that were started, and never waited for."""
        awaited = {event.number for event in self.events if event.kind == "wait"}
        starts = (event for event in self.events if event.kind == "start")
        return [event.what for event in starts if event.number not in awaited]

    def place(self, kind: str, what: str, which: int = 0) -> int:
        """The index among the events of the which-th of a kind; the number of events if none."""
        found = [i for i, e in enumerate(self.events) if (e.kind, e.what) == (kind, what)]
        return found[which] if -len(found) <= which < len(found) else len(self.events)

    def hop_problem(self, rank: int, hops: int) -> str | None:
        """What is wrong with the order of a ring: each hop travels while a mark says "used"."""
        # The caller of a ring marks each use of a tensor.
        uses = [i for i, event in enumerate(self.events) if event.kind == "mark"]
        for hop, use in enumerate(uses[:hops]):
            if self.place("start", "send", hop) > use:
                return f"rank {rank} begins hop {hop} only after tensor {hop} was used"
            if min(self.place("wait", what, hop) for what in ("send", "receive")) < use:
                return f"rank {rank} waits for hop {hop} before tensor {hop} is used"
        return None


def run_case(
    course: Course, case: Case, on_rank: Callable[[Rank, Case], dict[str, Any]], student: Path
) -> list[Record]:
    """Run a case; raises what the first failing rank raises, or Deadlock."""

    def run(thread: RankThread) -> Record:
        rank = Rank(course, thread)
        values = on_rank(rank, case)
        # The framework makes the groups, not the version that is checked.
        events = [event for event in thread.events if event.what != "new_group"]
        # Axes can share a ledger. Of one rank alone it may count 0 bytes.
        ledgers = {id(axis.ledger): axis.ledger for axis in rank.used if axis.size > 1}.values()
        sends = ((what, Sent(n, x.bytes[what])) for x in ledgers for what, n in x.calls.items())
        return Record(values, events, together(sends), thread.changed)

    return World(case.ranks, student).run(run)
