"""Why this layout: what goes wrong if one of its choices is another.

For every choice of the best layout the next smaller and the next larger value, or each other value,
is predicted, with all other choices as they are; the number of data-parallel ranks and of
micro-batches takes up the difference, and what depends on the choice is the fastest that fits. The
reason is what the prediction shows: it cannot be configured, it does not fit, or it is slower, by
the part of the step that changed most.
"""

from collections.abc import Iterator
from dataclasses import replace

from picotron_min.planner import choices
from picotron_min.planner.choices import CHOICES, Candidate, Request, rule_problems
from picotron_min.planner.memory import gb
from picotron_min.planner.uncertainty import is_toss_up

EXPLAINED = [name for name in CHOICES if name not in ("dp", "etp", "ep_engine")]
# Choices that may have to change with another.
DEPENDENT = {"tp": ["sequence_parallel"], "cp": ["cp_engine"], "pp": ["pp_engine", "pp_chunks"]}
DEPENDENT |= {"pp_engine": ["pp_chunks"]}


def why(request: Request, best: Candidate) -> Iterator[str]:
    """The reasons for every choice that had an alternative: `pp 2, not 1: ...`"""
    for choice in (choice for choice in EXPLAINED if choice not in request.fixed):
        value = best.chosen[choice]
        others = [v for v in request.values(choice, best.layout) if v != value]
        if not isinstance(value, str):  # the next values
            others = [v for v in others if v < value][-1:] + [v for v in others if v > value][:1]
        if others:
            reasons = (f"not {o}: {what_if(request, best, choice, o)}" for o in others)
            yield f"{choice} {value}, " + ",\n    ".join(reasons)


def what_if(request: Request, best: Candidate, choice: str, other: object) -> str:
    """What goes wrong with another value, by the part that grows most."""
    free = {"dp", *DEPENDENT.get(choice, ())}
    kept = {name: best.chosen[name] for name in CHOICES if name not in free}
    asked = replace(request, fixed=kept | request.fixed | {choice: other})
    layouts = [
        (at, work) for group, work in choices.groups(asked) for at in choices.variants(asked, group)
    ]
    if not layouts:
        return f"it would not divide {request.gpus} GPUs, or {request.global_batch} sequences"
    possible = [layout for layout in layouts if not rule_problems(request, *layout)]
    if not possible:
        return f"it is not possible: {rule_problems(request, *layouts[0])[0]}"
    candidates = (request.candidate(*layout) for layout in possible)
    there = min(candidates, key=lambda c: (c.memory.total > request.budget, c.prediction.step))
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
