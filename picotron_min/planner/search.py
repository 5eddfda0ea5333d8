"""The layouts that fit and are fastest.

Groups of choices (choices.py) are taken in the order of the time that they need at best, and the
search ends where no group can beat what is found: all that it leaves out is slower. What certainly
needs too much memory is never timed; what is fast enough is then counted exactly, by memory.py.
"""

from collections.abc import Iterator
from dataclasses import replace
from heapq import heappop, heappush
from itertools import count
from typing import NamedTuple

from picotron_min.extensions.schedules.registry import SCHEDULES
from picotron_min.extensions.settings import Layout, Workload
from picotron_min.planner.activations import BYTES, saved_per_token
from picotron_min.planner.choices import Request, groups, rule_problems, schedules, shardings
from picotron_min.planner.memory import RankMemory
from picotron_min.planner.step_time import Prediction, StepTime, ranks_of

TIE = 1.005  # predictions that are this close are equal


class Candidate(NamedTuple):
    """A layout, and what is predicted for it."""

    layout: Layout
    workload: Workload
    prediction: Prediction
    memory: RankMemory

    @property
    def num_axes(self) -> int:
        return sum(size > 1 for size in self.layout.sizes)


def search(request: Request, top: int = 10) -> list[Candidate]:
    """The best layouts that fit, the fastest first; none if nothing does.

    Of layouts that differ only in the number of chunks a rank, the fastest one that fits.
    """
    found: list[Candidate] = []
    waiting: list[tuple[float, int, Options]] = []  # a heap: the fastest is first
    numbers = count()  # of two that are as fast, the one that came first
    for group in [*by_best_time(request), None]:
        # Nothing that is still to come is faster than what can be settled now.
        while waiting and (group is None or waiting[0][0] <= group.seconds):
            _, _, options = heappop(waiting)
            if len(found) >= top and options.seconds > TIE * found[top - 1].prediction.step:
                return ranked(found)[:top]
            if best := options.settle(request):
                found.append(best)
            elif options.timed:  # the next slower one
                heappush(waiting, (options.seconds, next(numbers), options))
        for options in expanded(request, group) if group else ():
            heappush(waiting, (options.seconds, next(numbers), options))
    return ranked(found)[:top]


class Options:
    """Layouts that differ in their chunks alone, the fastest last."""

    def __init__(self, group: "Group", layouts: list[Layout]) -> None:
        self.group = group
        timed = [(group.times.at(layout).prediction(), layout) for layout in layouts]
        self.timed = sorted(timed, key=lambda pair: -pair[0].step)

    @property
    def seconds(self) -> float:
        return self.timed[-1][0].step

    def settle(self, request: Request) -> Candidate | None:
        """Take out the fastest: a candidate, if it can be configured and fits."""
        prediction, layout = self.timed.pop()
        if rule_problems(request, layout):
            return None
        memory = request.memory(layout, self.group.workload)
        fits = memory.total <= request.budget
        return Candidate(layout, self.group.workload, prediction, memory) if fits else None


def expanded(request: Request, group: "Group") -> Iterator[Options]:
    """A group with each schedule and each kind of sharding that may fit."""
    bound = LeastMemory(request, group)
    if bound.at_best(request) > request.budget:
        return
    for engine, numbers in schedules(request, group.layout.pp).items():
        kept = {chunks: bound.of_pipeline(engine, chunks) for chunks in numbers}
        for sharding in shardings(request, group.layout):
            held = bound.of_parameters(sharding)
            changes = {"pp_engine": engine, "sharding": sharding}
            layouts = [
                replace(group.layout, pp_chunks=chunks, **changes)
                for chunks, (layers, others) in kept.items()
                if held[0] * layers + held[1] + others <= request.budget
            ]
            if layouts:
                yield Options(group, layouts)


class Group(NamedTuple):
    """Choices that decide how long a step computes."""

    seconds: float  # of a step without bubble, messages of dp and optimizer
    layout: Layout
    workload: Workload
    times: StepTime


def by_best_time(request: Request) -> list[Group]:
    """All groups, those that can be fastest first."""
    found = []
    for layout, workload in groups(request):
        times = StepTime(request.setting(layout, workload))
        found.append(Group(times.at_best(), layout, workload, times))
    return sorted(found, key=lambda group: group.seconds)


class LeastMemory:
    """Bytes that the first pipeline rank needs at least: quick, where memory.py is exact."""

    def __init__(self, request: Request, group: Group) -> None:
        self.group, work, c = group, group.workload, request.model_config
        self.wide, self.narrow = max(BYTES["float32"], BYTES[work.dtype]), BYTES[work.dtype]
        self.moments = {"adamw": 2 * self.wide, "muon": self.wide, "sgd": 0}[work.optimizer]
        sizes = group.layout.axis_sizes  # experts may be sharded over more ranks than the rest
        self.has_experts = c.num_local_experts > 0
        self.n = max(sizes["dp_cp"], sizes["edp"] if self.has_experts else 1)
        tokens = work.micro_batch_size * work.seq_length // group.layout.cp
        layers = {c.has_experts(i): i for i in (0, c.num_hidden_layers - 1)}.values()
        self.kept, everything = (  # of a layer, for a micro-batch
            tokens * min(saved_per_token(c, work.dtype, again, group.layout, i) for i in layers)
            for again in (work.recompute, "none")
        )
        # What backward runs again, of one layer at a time.
        self.again = everything if work.recompute == "full" else everything - self.kept
        self.layer = min(map(group.times.layer_parameters, group.times.layers))  # elements
        self.embedding = c.vocab_size // group.layout.tp * c.hidden_size

    def at_best(self, request: Request) -> float:
        """Of the group's layouts, with the least of everything."""
        layers = request.model_config.num_hidden_layers // self.group.layout.pp
        kinds = shardings(request, self.group.layout)
        each = min(self.bytes_each(kind, self.narrow) for kind in kinds)
        return layers * each * self.layer + self.again

    def of_pipeline(self, engine: str, chunks: int) -> tuple[float, float]:
        """The rank's layers, and bytes of its activations."""
        pp, m = self.group.layout.pp, self.group.workload.num_micro_batches
        layout = Layout(pp=pp, pp_engine=engine, pp_chunks=chunks)
        first = ranks_of(self.group.times.setting, layout)[0]
        layers = first.dense + first.mixtures
        schedule = SCHEDULES[engine]
        live = schedule.live_activations(0, pp, m, chunks) / chunks
        if schedule.splits_backward:  # B frees a part of each, before its W
            live = 1 / chunks
        return layers, layers * live * self.kept + self.again

    def of_parameters(self, sharding: str) -> tuple[float, float]:
        """Bytes of each layer's weights, gradients and states, and of all else that is held."""
        held = self.bytes_each(sharding, self.wide) * self.embedding
        largest = max(self.layer, self.embedding)
        # One buffer travels while another fills. Experts have buffers of their own, so that the
        # largest is smaller than a layer.
        if sharding in ("gradients", "parameters") and not self.has_experts:
            held += 2 * self.wide * largest
        if sharding == "parameters":  # and two layers are here, or one and an end
            held += self.narrow * (self.layer + largest)
        return self.bytes_each(sharding, self.narrow) * self.layer, held

    def bytes_each(self, sharding: str, narrow: int) -> float:
        """Of a parameter that is computed with in so many bytes, see sharding/README.md."""
        wide, moments = self.wide, self.moments
        if sharding == "none":  # and a copy to compute with, if it is narrower
            return 2 * wide + moments + narrow * (narrow < wide)
        if sharding == "gradients":
            return narrow + (2 * wide + moments) / self.n
        if sharding == "parameters":
            return (2 * wide + moments) / self.n
        return narrow + wide + (wide + moments) / self.n


def ranked(found: list[Candidate]) -> list[Candidate]:
    """The fastest first; of equally fast ones that with fewer axes, then with less memory."""
    left, ordered = sorted(found, key=lambda candidate: candidate.prediction.step), []
    while left:
        equal = [c for c in left if c.prediction.step <= TIE * left[0].prediction.step]
        best = min(equal, key=lambda c: (c.num_axes, c.memory.total))
        ordered.append(best)
        left.remove(best)
    return ordered
