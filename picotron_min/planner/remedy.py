"""What to do where no layout fits: how much the smallest one needs, and what would make it fit."""

import math
from collections.abc import Mapping
from dataclasses import replace

from picotron_min.planner.choices import LIBRARY_BYTES, Request, groups, rule_problems, schedules
from picotron_min.planner.explain import gb
from picotron_min.planner.search import least_memory, search
from picotron_min.runtime.wording import choice


def nothing_fits(request: Request) -> str:
    """Why there is no plan, with the numbers and the nearest remedy."""
    fixed = ",".join(f"{name}={value}" for name, value in request.fixed.items())
    kept = f" with --fix {fixed}" if fixed else ""
    smallest = least_of_all(request)
    if smallest == math.inf:
        batch = f"{request.global_batch} sequences of {request.seq_length} tokens"
        why = f"no layout of {request.gpus} GPUs suits the model and {batch}{kept}"
        flags = ["--gpus", "--global_batch", *(["--fix"] if kept else [])]
        return f"{why}: use another {choice(flags)}"
    made = f"{request.gpu.memory / 1e9:.0f} x {request.fill:g}"
    made += f" - {LIBRARY_BYTES / 1e9:.0f} for libraries" if request.device == "cuda" else ""
    problem = f"the smallest layout needs {gb(smallest)} a GPU of {gb(request.budget)} ({made})"
    return f"{problem}{kept}: {remedy(request)}"


def least_of_all(request: Request) -> float:
    """Bytes a GPU of the layout that needs least; infinite if no layout can be configured."""
    bounds = []
    for layout, workload in groups(request):
        least = least_memory(request, layout, workload)
        for engine, numbers in schedules(request, layout.pp).items():
            for chunks in {numbers[0], numbers[-1]} if numbers else ():
                for sharding, needed in least(engine, chunks).items():
                    changes = {"pp_engine": engine, "pp_chunks": chunks, "sharding": sharding}
                    bounds.append((needed, layout, workload, changes))
    smallest = math.inf
    for needed, layout, workload, changes in sorted(bounds, key=lambda bound: bound[0]):
        if needed >= smallest:
            break  # all that follow need more
        layout = replace(layout, **changes)
        if not rule_problems(request, layout):
            smallest = min(smallest, request.memory(layout, workload).total)
    return smallest


def remedy(request: Request) -> str:
    """The nearest change with which something fits."""
    for name in request.fixed:
        fixed: Mapping = {key: value for key, value in request.fixed.items() if key != name}
        if search(replace(request, fixed=fixed), top=1):
            return f"leave {name} out of --fix"
    for factor in (2, 4, 8, 16, 32, 64):
        more = replace(request, gpus=factor * request.gpus)
        if search(more, top=1):
            return f"use {more.gpus} GPUs"
    return "use a smaller model or shorter sequences"
