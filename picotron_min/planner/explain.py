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
from picotron_min.planner.choices import (
    Candidate,
    Request,
    all_values,
    rule_problems,
)

TOSS_UP = 0.01  # of the step: too little for a reason


class Reason(NamedTuple):
    """What another value of a choice would do."""

    choice: str
    value: object  # of the best layout
    other: object
    text: str
    candidate: Candidate | None  # None where the rules allow no such layout


def why(request: Request, best: Candidate) -> list[Reason]:
    """The reasons for every choice that had an alternative."""
    return [
        _reason(request, best, choice, other)
        for choice, others in neighbours(request, best).items()
        for other in others
    ]


def neighbours(request: Request, best: Candidate) -> dict[str, list]:
    """For each choice the next values to the best one: all others, if it is a name."""
    near, chosen = {}, {**vars(best.layout), **vars(best.workload)}
    for choice in (choice for choice in EXPLAINED if choice not in request.fixed):
        values, value = all_values(request, choice, best.layout), chosen[choice]
        near[choice] = [other for other in values if other != value]
        if not isinstance(value, str):
            smaller, larger = ([v for v in values if v < value], [v for v in values if v > value])
            near[choice] = smaller[-1:] + larger[:1]
    return near


EXPLAINED = ("tp", "cp", "pp", "micro_batch_size", "recompute", "sequence_parallel", "cp_engine")
EXPLAINED += ("pp_engine", "pp_chunks", "sharding", "ep")


def _reason(request: Request, best: Candidate, choice: str, other: object) -> Reason:
    value = {**vars(best.layout), **vars(best.workload)}[choice]
    changed = changed_choice(request, best, choice, other)
    if isinstance(changed, str):
        return Reason(choice, value, other, changed, None)
    layout, work = changed
    if problems := rule_problems(request, layout):
        return Reason(choice, value, other, f"it is not possible: {problems[0]}", None)
    there = request.candidate(layout, work)
    return Reason(choice, value, other, _verdict(request, best, there), there)


def changed_choice(
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
    most = request.model_config.num_hidden_layers // layout.pp
    if layout.pp == 1 or layout.pp_chunks > most:
        layout = replace(layout, pp_engine="1f1b", pp_chunks=1)
    ranks = layout.tp * layout.cp * layout.pp
    if request.gpus % ranks:
        return f"tp x cp x pp = {ranks} would not divide {request.gpus} GPUs"
    layout = replace(layout, dp=request.gpus // ranks)
    sequences = layout.dp * work.micro_batch_size
    if request.global_batch % sequences:
        made = f"dp {layout.dp} x micro-batches of {work.micro_batch_size}"
        return f"{made} would not divide the batch of {request.global_batch} sequences"
    return layout, replace(work, num_micro_batches=request.global_batch // sequences)


def _verdict(request: Request, best: Candidate, there: Candidate) -> str:
    if there.memory.total > request.budget:
        before, after = best.memory._asdict(), there.memory._asdict()
        part = max(after, key=lambda name: after[name] - before[name])
        grew = f"{part.replace('_', ' ')} {gb(before[part])} -> {gb(after[part])}"
        return f"it would need {gb(there.memory.total)} of {gb(request.budget)}: {grew}"
    before, after = best.prediction.parts, there.prediction.parts
    slower = there.prediction.step / best.prediction.step - 1
    if abs(slower) < TOSS_UP:
        return f"a toss-up ({slower:+.1%})"
    if slower < 0:  # it is faster, and was not chosen: the search prefers fewer axes in a tie
        return f"{-slower:.1%} faster, but with more axes"
    part = sorted(after, key=lambda name: after[name] - before.get(name, 0.0))[-1]
    return f"{slower:.1%} slower: {part} {before.get(part, 0.0):.3g} s -> {after[part]:.3g} s"


def gb(number: float) -> str:
    return f"{gigabytes(number)} GB"


def gigabytes(number: float) -> str:  # 72.3, and 0.0428 of a tiny model
    return f"{number / 1e9:.1f}" if number >= 1e9 else f"{number / 1e9:.3g}"


def lines_of(reasons: list[Reason]) -> Iterator[str]:
    """A line for each choice: `pp 2, not 1: ...; not 4: ...`"""
    for choice, group in groupby(reasons, key=lambda reason: reason.choice):
        first, *others = group
        line = f"{NAMES.get(choice, choice)} {_shown(first.value)}"
        line += f", not {_shown(first.other)}: {first.text}"
        yield line + "".join(f".\n    Not {_shown(o.other)}: {o.text}" for o in others)


NAMES = {"micro_batch_size": "micro-batch", "sequence_parallel": "sequence parallelism"}
NAMES |= {"pp_engine": "schedule", "pp_chunks": "chunks", "cp_engine": "context parallelism"}


def _shown(value: object) -> str:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)
