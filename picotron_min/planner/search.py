"""The layouts that fit and are fastest.

Groups of choices (choices.py) are taken in the order of the time that they need at best, and the
search ends where no group can beat what is found: all that it leaves out is slower. What certainly
needs too much memory is never timed; what is fast enough is then counted exactly, by memory.py.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, lru_cache
from heapq import heappop, heappush
from itertools import count

from picotron_min.extensions.schedules.registry import SCHEDULES
from picotron_min.extensions.settings import Layout, ModelConfig, Workload
from picotron_min.planner.activations import saved_per_token
from picotron_min.planner.choices import Candidate, Request, groups, rule_problems, schedules
from picotron_min.planner.memory import Share, of_parameters_alone, parameter_bytes
from picotron_min.planner.step_time import Rank, StepTime, layer_parameters, ranks_of

TIE = 1.005  # predictions that are this close are equal


def search(request: Request, top: int = 10) -> list[Candidate]:
    """The best layouts that fit, the fastest first; none if nothing does.

    Of layouts that differ only in the number of chunks a rank, the fastest one that fits.
    """
    found: list[Candidate] = []
    waiting: list[tuple[float, int, Options]] = []  # a heap: the fastest is first
    numbers = count()  # of two that are as fast, the one that came first
    for at_best, times in [*by_best_time(request), (math.inf, None)]:
        # Nothing that is still to come is faster than what can be settled now.
        while waiting and waiting[0][0] <= at_best:
            _, _, options = heappop(waiting)
            if len(found) >= top and options.seconds > TIE * found[top - 1].prediction.step:
                return ranked(found)[:top]
            if best := options.settle(request):
                found.append(best)
            elif options.timed:  # the next slower one
                heappush(waiting, (options.seconds, next(numbers), options))
        for options in expanded(request, times) if times else ():
            heappush(waiting, (options.seconds, next(numbers), options))
    return ranked(found)[:top]


def by_best_time(request: Request) -> list[tuple[float, StepTime]]:
    """All groups with the time of a step at best, those that can be fastest first."""
    times = [StepTime(request.setting(*group)) for group in groups(request)]
    return sorted(((of.at_best(), of) for of in times), key=lambda pair: pair[0])


class Options:
    """Layouts that differ in their chunks alone, the fastest last."""

    def __init__(self, times: StepTime, layouts: list[Layout]) -> None:
        timed = [(times.at(layout).prediction(), layout) for layout in layouts]
        self.timed = sorted(timed, key=lambda pair: -pair[0].step)
        self.work = times.work

    @property
    def seconds(self) -> float:
        return self.timed[-1][0].step

    def settle(self, request: Request) -> Candidate | None:
        """Take out the fastest: a candidate, if it can be configured and fits."""
        prediction, layout = self.timed.pop()
        if rule_problems(request, layout):
            return None
        candidate = Candidate(layout, self.work, prediction, request.memory(layout, self.work))
        return candidate if candidate.memory.total <= request.budget else None


def expanded(request: Request, times: StepTime) -> Iterator[Options]:
    """A group with each schedule and each kind of sharding that may fit."""
    least, budget = least_memory(request, times.layout, times.work), request.budget
    for engine, numbers in schedules(request, times.layout.pp).items():
        needed = {chunks: least(engine, chunks) for chunks in numbers}
        for sharding in request.values("sharding", times.layout):
            layouts = [
                replace(times.layout, pp_engine=engine, pp_chunks=chunks, sharding=sharding)
                for chunks, by_sharding in needed.items()
                if by_sharding[sharding] <= budget
            ]
            if layouts:
                yield Options(times, layouts)


def least_memory(
    request: Request, layout: Layout, work: Workload
) -> Callable[[str, int], dict[str, float]]:
    """Bytes that the first pipeline rank needs at least, of engine and chunks, by kind of sharding.

    The terms are those of memory.py for what is quickly known of the rank: no norms, rows without
    padding, and no plan of a schedule that splits backward, whose B frees a part before its W.
    """
    c, grid = request.model_config, of_parameters_alone(layout)
    tokens, kept, again = work.micro_batch_size * work.seq_length // layout.cp, {}, []
    for i in {c.has_experts(i): i for i in (0, c.num_hidden_layers - 1)}.values():
        saved, everything = (  # of a layer, for a micro-batch
            tokens * saved_per_token(c, work.dtype, recompute, layout, i)
            for recompute in (work.recompute, "none")
        )
        kept[c.has_experts(i)] = saved
        again.append(everything if work.recompute == "full" else everything - saved)

    @cache
    def of_parameters(sharding: str, first: Rank) -> float:
        return least_parameters(c, grid, sharding, first, work.dtype, work.optimizer)

    def least(engine: str, chunks: int) -> dict[str, float]:
        pipeline = Layout(pp=layout.pp, pp_engine=engine, pp_chunks=chunks)
        first = ranks_of(c, pipeline, work.seq_length)[0]
        schedule, sizes = SCHEDULES[engine], (0, layout.pp, work.num_micro_batches, chunks)
        live = 1 if schedule.splits_backward else schedule.live_activations(*sizes)
        saved = sum(number * kept[has_experts] for number, has_experts in first.layers)
        others = saved * live / chunks + min(again)
        return {kind: of_parameters(kind, first) + others for kind in kinds}

    kinds = request.values("sharding", layout)
    return least


@lru_cache(maxsize=2**14)
def least_parameters(
    c: ModelConfig, layout: Layout, sharding: str, first: Rank, dtype: str, optimizer: str
) -> float:
    """Bytes of the weights, gradients and optimizer state of a rank with these layers at least."""
    layout = replace(layout, sharding=sharding)
    sizes, windows, elements = layout.axis_sizes, [], Counter()

    def rows(number: int, kind: str, of_unit: dict[str, float]) -> list[dict[str, float]]:
        """R of so many units by axis; their elements are counted."""
        sharded = [a for a in of_unit if layout.sharding != "none" and sizes[a] > 1]
        for axis, size in of_unit.items():
            elements[f"sharded_{kind}" if axis in sharded else kind] += number * size
        return number * [{axis: of_unit[axis] / sizes[axis] for axis in sharded}]

    experts = 3 * c.hidden_size * c.moe_intermediate_size * c.num_local_experts
    for number, has_experts in first.layers:
        of_unit = {"dp_cp": layer_parameters(c, layout, has_experts)}
        if has_experts:
            of_unit["edp"] = experts / (layout.ep * layout.etp)
            of_unit["dp_cp"] -= of_unit["edp"] + c.hidden_size * c.num_local_experts  # the router
        windows += rows(number, "hidden", of_unit)
    ends = rows(1, "others", {"dp_cp": c.vocab_size // layout.tp * c.hidden_size})
    share, work = Share([], False, windows, ends, **elements), Workload(1, 1, 1, dtype)
    return sum(parameter_bytes(share, layout, replace(work, optimizer=optimizer)).values())


def ranked(found: list[Candidate]) -> list[Candidate]:
    """The fastest first; of equally fast ones that with fewer axes, then with less memory."""
    left, ordered = sorted(found, key=lambda candidate: candidate.prediction.step), []
    while left:
        equal = [c for c in left if c.prediction.step <= TIE * left[0].prediction.step]
        best = min(equal, key=lambda c: (c.num_axes, c.memory.total))
        ordered.append(best)
        left.remove(best)
    return ordered
