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
from typing import Any, NamedTuple


class Deadlock(Exception):
    """No rank can continue; the message has the circle of ranks that wait for each other."""


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


class Wait(NamedTuple):
    """What a rank waits for."""

    text: str  # "waits to send to rank 1"
    is_over: Callable[[], bool]
    blockers: Callable[[], list[int]]  # the ranks that it waits for


class RankThread(threading.Thread):
    """One rank. It runs only between `resume` and the next `pause`."""

    def __init__(self, world: "World", rank: int, function: Callable[[int], Any]) -> None:
        super().__init__(daemon=True)
        self.world, self.rank, self.function = world, rank, function
        self.turn, self.events, self.operations = threading.Semaphore(0), [], 0
        self.wait: Wait | None = None
        self.abort: BaseException | None = None
        self.result, self.error, self.is_done = None, None, False

    def run(self) -> None:
        self.turn.acquire()
        try:
            if not self.abort:
                self.result = self.function(self.rank)
        except BaseException as error:  # SystemExit, too, and whatever a student raises
            self.error = error
        self.is_done = True
        self.world.turn.release()

    def pause(self, wait: Wait) -> None:
        """Let others run until the wait is over."""
        if self.abort:
            raise self.abort
        if wait.is_over():
            return
        self.wait = wait
        self.world.turn.release()
        self.turn.acquire()
        self.wait = None
        if self.abort:
            raise self.abort

    def resume(self) -> None:
        self.turn.release()
        self.world.turn.acquire()

    def record(self, kind: str, what: str, **more: Any) -> None:
        self.events.append(Event(kind, what, **more))


class World:
    """Some ranks, and what travels between them."""

    def __init__(self, size: int, student: Path | None = None) -> None:
        self.size, self.student, self.turn = size, student, threading.Semaphore(0)
        self.threads: list[RankThread] = []
        self.meetings, self.messages = {}, {}  # of network.py
        self.counts: Counter = Counter()

    def next_index(self, *key: Any) -> int:
        """How many times this was called with a key: of collectives, messages and groups."""
        self.counts[key] += 1
        return self.counts[key] - 1

    def run(self, function: Callable[[int], Any]) -> list[RankThread]:
        """Call `function(rank)` on every rank; the first error of a rank, or Deadlock, is raised.

        The error has the attribute `rank`.
        """
        self.threads = [RankThread(self, rank, function) for rank in range(self.size)]
        for thread in self.threads:
            thread.start()
        while any(not thread.is_done for thread in self.threads):
            thread = next(filter(self._can_run, self.threads), None)
            if not thread:
                error = Deadlock(self._describe_circle())
                error.lines = self._waiting_lines()
                self._stop()
                raise error
            thread.resume()
            if error := thread.error:
                self._stop()
                error.rank = thread.rank
                raise error
        return self.threads

    def _can_run(self, thread: RankThread) -> bool:
        return not thread.is_done and (thread.wait is None or thread.wait.is_over())

    def _stop(self) -> None:
        for thread in self.threads:
            thread.abort = Stopped()
            if not thread.is_done:
                thread.resume()

    def _waiting_lines(self) -> list[str]:
        """What each rank waits for, with the student's line."""
        lines, frames = [], sys._current_frames()
        for thread in (thread for thread in self.threads if not thread.is_done):
            others = ", ".join(f"rank {rank}" for rank in thread.wait.blockers())
            line = line_in(self.student, traceback.extract_stack(frames[thread.ident]))
            where = f"   at {line}" if line else ""
            lines.append(f"rank {thread.rank} {thread.wait.text.format(others)}{where}")
        return lines

    def _describe_circle(self) -> str:
        """Follow who waits for whom until a rank recurs, or one that has returned."""
        waiting = {thread.rank: thread for thread in self.threads if not thread.is_done}
        path = [min(waiting)]
        while path[-1] in waiting:
            blockers = waiting[path[-1]].wait.blockers()
            path.append(next((rank for rank in blockers if rank in waiting), blockers[0]))
            if path[-1] in path[:-1]:
                break
        circle = path[path.index(path[-1]) :] if path[-1] in waiting else path
        text = f"rank {circle[0]}"
        for rank, other in pairwise(circle):
            text += f" {waiting[rank].wait.text.format(f'rank {other}')},"
            text += " which" if other in waiting else " which has returned"
        return text.removesuffix(", which")


def line_in(student: Path | None, stack: traceback.StackSummary) -> str:
    """Where in the student's file a stack is: `line 12: work.wait()`, or nothing."""
    here = [frame for frame in stack if frame.filename == str(student)]
    return f"line {here[-1].lineno}: {here[-1].line}" if here else ""
