"""Simulated ranks: threads that take turns.

Only one rank runs at a time, until it waits for something that has not happened; then the first one
that can continue does. So a check needs no processes, gives the same result each time, and reports
a deadlock at once: no rank can continue.
"""

import sys
import threading
import traceback
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from exercises.network import Meeting, Work


class Deadlock(Exception):
    """No rank can continue; the message says which ranks wait for which."""

    def __init__(self, circle: str) -> None:
        super().__init__(circle)
        self.lines: list[str] = []  # what each rank waits for, with the student's line


class Stopped(BaseException):
    """Ends a rank because another one has failed."""


class Event(NamedTuple):
    """One thing that a rank did, in the order in which it did them."""

    kind: str  # "start" or "wait" of an operation; "mark" of anything else
    what: str  # all_reduce, send, receive, ...; or the text of a mark
    number: int = -1  # of the operation, on this rank
    bytes: float = 0.0  # algorithmic, that this rank sends
    peer: int | None = None  # of a send or receive; a rank of the world
    alone: bool = False  # a collective of one rank, which sends nothing


class RankThread(threading.Thread):
    """One rank. It runs only between `resume` and the next `pause`."""

    def __init__(self, world: "World", rank: int, function: Callable[["RankThread"], Any]) -> None:
        super().__init__(daemon=True)
        self.world, self.rank, self.function = world, rank, function
        # The turn is at 0: `acquire` waits until another thread releases it.
        self.turn, self.events, self.operations = threading.Semaphore(0), [], 0
        self.result, self.error, self.is_done, self.is_stopped = None, None, False, False
        self.changed: list[int] = []  # to whom it was sending a tensor when it changed that
        self.wait: Work | None = None
        self.is_part = False  # whether the world has other ranks, too, which are not simulated

    def run(self) -> None:
        self.turn.acquire()
        try:
            self.result = None if self.is_stopped else self.function(self)
        except BaseException as error:  # SystemExit, too, and whatever a student raises
            self.error = error
        self.is_done = True
        self.world.turn.release()

    def pause(self, wait: "Work") -> None:
        """Let others run until all that this rank waits for are there."""
        if wait.missing() and not self.is_stopped:
            self.wait = wait
            self.world.turn.release()
            self.turn.acquire()
            self.wait = None
        if self.is_stopped:
            raise Stopped

    def resume(self) -> None:
        self.turn.release()
        self.world.turn.acquire()

    def record(self, *event: Any) -> None:
        self.events.append(Event(*event))


class World:
    """Some ranks, and what travels between them."""

    def __init__(self, size: int, student: Path | None = None) -> None:
        self.size, self.student, self.turn = size, student, threading.Semaphore(0)
        self.threads, self.counts = [], Counter()
        self.meetings: dict[tuple, Meeting] = {}  # of network.py

    def next_index(self, *key: Any) -> int:
        """How many times this was called with a key: of collectives, messages and groups."""
        self.counts[key] += 1
        return self.counts[key] - 1

    def run(self, function: Callable[[RankThread], Any]) -> list[Any]:
        """The result of each rank; the first error of one, or Deadlock, is raised.

        The error has the attribute `rank`.
        """
        self.threads = [RankThread(self, rank, function) for rank in range(self.size)]
        for thread in self.threads:
            thread.start()
        while running := [thread for thread in self.threads if not thread.is_done]:
            # The lowest rank that can: so the order is the same in each run.
            ready = (thread for thread in running if not (thread.wait and thread.wait.missing()))
            thread = next(ready, None)
            if not thread:
                error = self._deadlock()
                self._stop()
                raise error
            thread.resume()
            if error := thread.error:
                self._stop()
                error.rank = thread.rank
                raise error
        return [thread.result for thread in self.threads]

    def _stop(self) -> None:
        for thread in self.threads:
            # A thread cannot be killed: it wakes in `pause`, which raises.
            thread.is_stopped = True
            if not thread.is_done:
                thread.resume()

    def _deadlock(self) -> Deadlock:
        """Follow who waits for whom until a rank recurs or has returned."""
        waits = {thread.rank: thread.wait for thread in self.threads if not thread.is_done}
        path = [min(waits)]
        while path[-1] in waits and path[-1] not in path[:-1]:
            missing = waits[path[-1]].missing()
            # One that waits itself leads on; one that has returned ends the search.
            path.append(next((rank for rank in missing if rank in waits), missing[0]))
        circle = path[path.index(path[-1]) :] if path[-1] in waits else path
        steps = [waits[a].text.format(f"rank {b}") for a, b in pairwise(circle)]
        text = f"rank {circle[0]} {', which '.join(steps)}"
        error = Deadlock(text if path[-1] in waits else f"{text}, which has returned")
        frames = sys._current_frames()
        for rank, wait in waits.items():
            others = ", ".join(f"rank {other}" for other in wait.missing())
            line = line_in(self.student, traceback.extract_stack(frames[self.threads[rank].ident]))
            text = f"rank {rank} {wait.text.format(others)}"
            error.lines.append(f"{text}   at {line}" if line else text)
        return error


def line_in(student: Path | None, stack: traceback.StackSummary) -> str:
    """Where in the student's file a stack is: `line 12: work.wait()`, or nothing."""
    here = [frame for frame in stack if frame.filename == str(student)]
    return f"line {here[-1].lineno}: {here[-1].line}" if here else ""
