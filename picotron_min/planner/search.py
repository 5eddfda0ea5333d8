"""The layouts that fit and are fastest; where none does, how much the smallest one needs.

Trying everything would take minutes: 64 GPUs have 180,000 layouts of an 8B model. So groups of
choices (choices.py) are taken in the order of the time that they need at best, and the search ends
where no group can beat what is found: all that it leaves out is slower. What certainly needs too
much memory is never timed; what is fast enough is then counted exactly, by memory.py.
"""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from heapq import heappop, heappush
from itertools import count
from operator import itemgetter

from picotron_min.extensions.schedules.registry import SCHEDULES
from picotron_min.extensions.settings import Layout, ModelConfig, Workload
from picotron_min.planner import choices, memory
from picotron_min.planner.choices import Candidate, Request, rule_problems
from picotron_min.planner.memory import gb
from picotron_min.planner.parameters import LayerParameters, Rank, Share, Unit, ranks_of
from picotron_min.planner.step_time import StepTime

TIE = 1.005  # predictions that are this close are equal


def search(request: Request, top: int = 10) -> list[Candidate]:
    """The best layouts that fit, the fastest first; none if nothing does.

    Of layouts that differ only in the number of chunks a rank, the fastest one that fits.
    """
    found, settled = [], set()
    for seconds, _, layout, work, prediction in by_time(request):
        if len(found) >= top and seconds > TIE * found[top - 1].prediction.step:
            break
        but_for_chunks = replace(layout, pp_chunks=1), work
        if but_for_chunks in settled or rule_problems(request, layout, work):
            continue
        needed = request.memory(layout, work)
        if needed.total <= request.budget:
            settled.add(but_for_chunks)
            found.append(Candidate(layout, work, prediction, needed))
    return ranked(found)[:top]


def by_time(request: Request) -> Iterator[tuple]:
    """(seconds, number, layout, workload, prediction) of all that may fit, the fastest first.

    Groups come in the order of their time at best. So what waits is next in line as soon as it is
    faster than the next group at best. Of two as fast, the one that was counted first is first.
    """
    waiting, numbers = [], count()
    groups = (StepTime(request.setting(*group)) for group in choices.groups(request))
    for at_best, times in sorted(((g.at_best(), g) for g in groups), key=itemgetter(0)):
        while waiting and waiting[0][0] <= at_best:
            yield heappop(waiting)
        for needed, changes in options(request, times.layout, times.work):
            if needed <= request.budget:
                layout = replace(times.layout, **changes)
                prediction = times.at(layout).prediction()
                heappush(waiting, (prediction.step, next(numbers), layout, times.work, prediction))
    yield from sorted(waiting)


def options(request: Request, layout: Layout, work: Workload) -> Iterator[tuple[float, dict]]:
    """The bytes that a group needs at least with each schedule and sharding, and these.

    The terms are memory.py's for what is quickly known of the first pipeline rank: no norms
    and ends, rows without padding, and no plan of a schedule that splits backward, whose B frees a
    part before its W.
    """
    c, grid = request.model_config, memory.of_parameters_alone(layout)
    tokens, kept, again = work.micro_batch_size * work.seq_length // layout.cp, {}, []
    for has_experts, layer in {c.has_experts(i): i for i in range(c.num_hidden_layers)}.items():
        of_layer = layer, work.fp8, 1.0, request.device
        kept[has_experts], more = memory.kept_and_made(c, layout, work, *of_layer)
        again.append(more)
    for engine, numbers in choices.schedules(request, layout.pp).items():
        schedule = SCHEDULES[engine]
        for chunks in numbers:
            pipeline = Layout(pp=layout.pp, pp_engine=engine, pp_chunks=chunks)
            first = next(iter(ranks_of(c, pipeline, work.seq_length)))
            sizes = 0, layout.pp, work.num_micro_batches, chunks
            # Of chunks, at least one micro-batch in all; so where B frees a part before its W.
            least = chunks > 1 or schedule.splits_backward
            live = 1 if least else schedule.live_activations(*sizes)
            saved = sum(number * kept[has_experts] for number, has_experts in first.layers)
            for kind in request.values("sharding", layout):
                needed = least_parameters(c, grid, kind, first, work.dtype, work.optimizer)
                changes = {"pp_engine": engine, "pp_chunks": chunks, "sharding": kind}
                yield needed + tokens * (saved * live + min(again)), changes


@lru_cache(maxsize=2**14)
def least_parameters(
    c: ModelConfig, layout: Layout, sharding: str, first: Rank, dtype: str, optimizer: str
) -> float:
    """Bytes of the weights, gradients and optimizer state of a rank with these layers at least."""
    layout = replace(layout, sharding=sharding)
    sizes, units = layout.axis_sizes, []
    for number, has_experts in first.layers:
        linears, _, experts = LayerParameters.of(c, layout, has_experts)
        elements, rows = Counter(), {}
        for axis, size in {"dp_cp": linears, "edp": experts}.items():
            is_sharded = sharding != "none" and sizes[axis] > 1
            elements["sharded_hidden" if is_sharded else "hidden"] += size
            rows |= {axis: size / sizes[axis]} if is_sharded else {}
        units += number * [Unit([], rows, elements)]
    work = Workload(1, 1, 1, dtype, optimizer=optimizer)
    return sum(memory.parameter_bytes(Share([], False, [units]), layout, work).values())


def ranked(found: list[Candidate]) -> list[Candidate]:
    """By the printed step; but first, of all as fast as the fastest, that with the fewest axes."""
    found = sorted(found, key=order)
    fast = [c for c in found if c.prediction.step <= TIE * found[0].prediction.step]
    best = min(fast, key=lambda c: order(c)[1:], default=None)
    return sorted(found, key=lambda c: c is not best)  # which keeps the order of others


def order(candidate: Candidate) -> tuple[float, int, float]:
    """As a table sorts them: by the step that it prints, then fewer axes, then less memory."""
    num_axes = sum(size > 1 for size in candidate.layout.sizes)
    return float(f"{candidate.prediction.step:.4g}"), num_axes, candidate.memory.total


def nothing_fits(request: Request) -> str:
    """Why there is no plan, with the numbers and the remedy."""
    kept = ",".join(f"{name}={value}" for name, value in request.fixed.items())
    with_fix, or_fix = (f" with --fix {kept}", ", or leave out --fix") if kept else ("", "")
    smallest = least_of_all(request)
    if smallest == math.inf:
        batch = f"{request.global_batch} sequences of {request.work.seq_length} tokens"
        why = f"no layout of {request.gpus} GPUs suits the model and {batch}{with_fix}"
        return f"{why}: use another --gpus or --global_batch{or_fix}"
    why = f"the smallest layout needs {gb(smallest)} a GPU of {request.budget_text}{with_fix}"
    return f"{why}: use more GPUs, a smaller model or shorter sequences{or_fix}"


def least_of_all(request: Request) -> float:
    """Bytes a GPU of the layout that needs least; infinite if no layout can be configured."""
    groups, smallest = choices.groups(request), math.inf
    bounds = [(*bound, *group) for group in groups for bound in options(request, *group)]
    for needed, changes, layout, work in sorted(bounds, key=itemgetter(0)):
        if needed >= smallest:
            break  # all that follow need more
        layout = replace(layout, **changes)
        if not rule_problems(request, layout, work):
            smallest = min(smallest, request.memory(layout, work).total)
    return smallest
