"""Simulator: pipeline plans on paper, with the time of each rank.

It finds a deadlock before it happens. runtime/draw.py draws what it returns. Standard library only.
"""

from collections.abc import Callable
from itertools import accumulate
from typing import NamedTuple

from picotron_min.pipeline_messages import in_order, inputs_of, spans_of, textbook_times
from picotron_min.pipeline_schedule import Action, Kind, Place, Plan, loop, splits_backward


class Span(NamedTuple):
    rank: int
    action: Action
    start: float
    end: float


class Timeline(NamedTuple):
    """When every rank computed what, simulated or measured; each rank's spans in their order."""

    num_ranks: int
    spans: list[Span]

    @property
    def makespan(self) -> float:
        return max(span.end for span in self.spans) - min(span.start for span in self.spans)

    def bubble(self, rank: int) -> float:
        """The fraction of the makespan in which the rank does not compute."""
        busy = sum(span.end - span.start for span in self.spans if span.rank == rank)
        return 1 - busy / self.makespan


def simulate(
    plans: list[Plan],
    time_of: Callable[[int, Action], float] | None = None,
    send_time: float = 0.0,
    place: Place = loop,
) -> Timeline:
    """Run the plans of all ranks on paper; ValueError if they cannot run to their end.

    A result is on another rank `send_time` after it is made: sends and receives in the plans are
    passed over, as if each receive were posted in time. By default times are the textbook's.
    """
    needs = in_order(plans, inputs_of(plans, place))
    spans = spans_of(needs, time_of or textbook_times(plans), send_time)
    return Timeline(len(plans), [Span(*event, *span) for event, span in spans.items()])


def peak_live(plan: Plan, held: float = 1.0) -> float:
    """The most activations, each of one micro-batch in one chunk, that are alive at once.

    Backward frees one. Where it is cut in two, B keeps the share `held`, which W frees.
    """
    left = held if splits_backward(plan) else 0.0
    change = {Kind.FORWARD: 1, Kind.BACKWARD: left - 1, Kind.WEIGHT: -left}
    return max(accumulate(change.get(action.kind, 0) for action in plan))
