"""Why this layout: what goes wrong if one of its choices is another.

For every choice of the best layout the next smaller and the next larger value, or each other value,
is predicted, with all other choices as they are; the number of data-parallel ranks and of
micro-batches takes up the difference. The reason is what the prediction shows: it cannot be
configured, it does not fit, or it is slower, by the part of the step that changed most.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby
from typing import NamedTuple

from picotron_min.extensions.schedules.registry import SCHEDULES
from picotron_min.extensions.settings import Layout, Workload
from picotron_min.planner.choices import Candidate, Request, rule_problems
from picotron_min.planner.memory import gb
from picotron_min.planner.uncertainty import is_toss_up

# The choices that are explained.
EXPLAINED = ["tp", "cp", "pp", "micro_batch_size", "recompute", "sequence_parallel", "cp_engine"]
EXPLAINED += ["pp_engine", "pp_chunks", "sharding", "ep"]


class Reason(NamedTuple):
    """What another value of a choice would do."""

    choice: str
    value: object  # of the best layout
    other: object
    text: str
    candidate: Candidate | None = None  # None where the rules allow no such layout


def why(request: Request, best: Candidate) -> Iterator[Reason]:
    """The reasons for every choice that had an alternative."""
    for choice in (choice for choice in EXPLAINED if choice not in request.fixed):
        value, values = best.chosen[choice], request.values(choice, best.layout)
        others = [v for v in values if v != value]
        if not isinstance(value, str):  # the next values
            others = [v for v in others if v < value][-1:] + [v for v in others if v > value][:1]
        for other in others:
            changed = _changed(request, best, choice, other)
            if isinstance(changed, str):
                yield Reason(choice, value, other, changed)
            else:
                there = request.candidate(*changed)
                yield Reason(choice, value, other, _verdict(request, best, there), there)


def _verdict(request: Request, best: Candidate, there: Candidate) -> str:
    """What goes wrong with another value, by the part that grows most."""
    is_too_large = there.memory.total > request.budget
    before, after = best.prediction.parts, there.prediction.parts
    if is_too_large:
        before, after = best.memory._asdict(), there.memory._asdict()
    part = max(reversed(after), key=lambda name: after[name] - before.get(name, 0.0))
    if is_too_large:
        needs = f"it would need {gb(there.memory.total)} of {gb(request.budget)}"
        return f"{needs}: {part.replace('_', ' ')} {gb(before[part])} -> {gb(after[part])}"
    slower = there.prediction.step / best.prediction.step - 1
    took = f"{part} {before.get(part, 0.0):.3g} s -> {after[part]:.3g} s"
    if is_toss_up(best.prediction, there.prediction):
        return f"a toss-up ({slower:+.1%}; {took})"
    return f"{slower:.1%} slower: {took}"


def _changed(
    request: Request, best: Candidate, choice: str, other: object
) -> tuple[Layout, Workload] | str:
    """The best layout with another value of a choice; or why there is none."""
    layout, work = best.layout, best.workload
    if choice in vars(work):
        work = replace(work, **{choice: other})
    else:
        layout = replace(layout, **{choice: other})
    if choice == "pp_engine":
        layout = replace(layout, pp_chunks=SCHEDULES[other].chunks)
    if layout.tp == 1:
        layout = replace(layout, sequence_parallel=False)
    if layout.pp == 1 or layout.num_stages > request.model_config.num_hidden_layers:
        layout = replace(layout, pp_engine="1f1b", pp_chunks=1)
    ranks = layout.tp * layout.cp * layout.pp
    if request.gpus % ranks:
        return f"tp x cp x pp = {ranks} would not divide {request.gpus} GPUs"
    layout = replace(layout, dp=request.gpus // ranks)
    sequences = layout.dp * work.micro_batch_size
    if request.global_batch % sequences:
        made = f"dp {layout.dp} x micro-batches of {work.micro_batch_size}"
        return f"{made} would not divide the batch of {request.global_batch} sequences"
    work = replace(work, num_micro_batches=request.global_batch // sequences)
    problems = rule_problems(request, layout, work)
    return f"it is not possible: {problems[0]}" if problems else (layout, work)


def lines_of(reasons: Iterator[Reason]) -> Iterator[str]:
    """A line for each choice: `pp 2, not 1: ...; not 4: ...`"""
    for choice, group in groupby(reasons, key=lambda reason: reason.choice):
        first, *others = group
        line = f"{choice} {shown(first.value)}"
        line += f", not {shown(first.other)}: {first.text}"
        yield line + "".join(f".\n    Not {shown(o.other)}: {o.text}" for o in others)


def shown(value: object) -> str:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)
