"""The layouts that fit and are fastest; where none does, how much a small one needs.

Counting the time and memory of all would take minutes: 64 GPUs have 90,000 layouts of an 8B model.
So groups of choices (choices.py) are taken in the order of the time that they need at best, and the
search ends where no group can beat what is found: all that it leaves out is slower. What is fast
enough is then counted exactly, by memory.py.
"""

from collections.abc import Iterator
from dataclasses import replace
from heapq import heappop, heappush
from itertools import count
from operator import itemgetter

from picotron_min.planner import choices
from picotron_min.planner.choices import Candidate, Request, rule_problems
from picotron_min.planner.memory import gb
from picotron_min.planner.step_time import StepTime

TIE = 1.01  # steps that are this close may be equal in three digits


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
    return sorted(found, key=order)[:top]


def by_time(request: Request) -> Iterator[tuple]:
    """(seconds, number, layout, workload, prediction) of all layouts, the fastest first.

    Groups come in the order of their time at best. So what waits is next in line as soon as it is
    faster than the next group at best. Of two as fast, the one that was counted first is first.
    """
    waiting, numbers = [], count()
    groups = (StepTime(request.setting(*group)) for group in choices.groups(request))
    for at_best, times in sorted(((g.at_best(), g) for g in groups), key=itemgetter(0)):
        while waiting and waiting[0][0] <= at_best:
            yield heappop(waiting)
        for layout in choices.variants(request, times.layout):
            prediction = times.at(layout).prediction()
            heappush(waiting, (prediction.step, next(numbers), layout, times.work, prediction))
    yield from sorted(waiting)


def order(candidate: Candidate) -> tuple[float, int, float]:
    """As a table sorts them: by the step that it prints, then fewer axes, then less memory."""
    num_axes = sum(size > 1 for size in candidate.layout.sizes)
    return float(f"{candidate.prediction.step:.3g}"), num_axes, candidate.memory.total


# What needs least memory, as far as it is not fixed.
SMALL = {"micro_batch_size": 1, "recompute": "full", "pp_engine": "1f1b"}


def nothing_fits(request: Request) -> str:
    """Why there is no plan, with the numbers and the remedy."""
    small = replace(request, fixed=SMALL | request.fixed)
    needed = [
        small.memory(layout, work).total
        for group, work in choices.groups(small)
        for layout in choices.variants(small, group)
        if not rule_problems(small, layout, work)
    ]
    if not needed:
        batch = f"{request.global_batch} sequences of {request.work.seq_length} tokens"
        why = f"no layout of {request.gpus} GPUs in powers of two suits the model and {batch}"
        return f"{why}: use another --gpus or --global_batch, or --fix other sizes"
    why = f"the smallest layout needs {gb(min(needed))} a GPU of {request.budget_text}"
    return f"{why}: use more GPUs, a smaller model, shorter sequences, or less in --fix"
