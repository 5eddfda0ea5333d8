"""Report: what is printed of the first wrong tensor, a rank that failed, and where to look."""

from collections.abc import Iterator, Sequence

from difference.first import Compared, Found
from difference.parts import Context
from difference.places import Here
from difference.runs import RankRun
from difference.suspects import of_failure, suspects
from difference.tiny import Trial
from difference.why import explain

MOST_RANKS, MOST_OTHERS = 3, 3  # that are printed


def lines_of(
    found: Found | None, runs: list[RankRun], compared: list[Compared], context: Context
) -> Iterator[str]:
    failed = first_failure(runs)
    if found:
        yield from _first_wrong(found, compared, context)
    if failed is not None:
        yield f"FAILED       {runs_named([failed], context.trial)}: {runs[failed].problem}"
        for place in runs[failed].stack:
            yield f"             {place}"
        if not found:
            yield f"             all {len(compared):,} tensors that were recorded before are right"
            named = of_failure(runs[failed], context.trial.layout)
            if named:
                yield f"look at      {', '.join(named[:3])}"
    if not found and failed is None:
        worst = max((one.error for one in compared), default=0.0)
        what = f"all {len(compared):,} tensors of {len(runs)} ranks"
        yield f"ALL RIGHT    {what} are those of one process, within {worst:.0e} of the largest"


def first_failure(runs: list[RankRun]) -> int | None:
    """The rank that failed first; one that only lost another rank comes last."""
    failed = [rank for rank, run in enumerate(runs) if run.problem]
    is_lost = {rank: runs[rank].lost for rank in failed}
    return min(failed, key=lambda rank: (is_lost[rank], runs[rank].failed_at), default=None)


def runs_named(ranks: Sequence[int], trial: Trial) -> str:
    return ", ".join(f"rank {rank}" for rank in ranks)


def _first_wrong(found: Found, compared: list[Compared], context: Context) -> Iterator[str]:
    one = found.wrong[0]
    ranks = list(dict.fromkeys(wrong.at for wrong in found.wrong))
    yield f"FIRST WRONG  step {one.key.step + 1}, {title(one)}  {where(ranks, context)}"
    yield f"             {found.num_right:,} tensors before it are right, {found.num_wrong:,} wrong"
    said = reasons(found, context)
    for text, of in list(said.items())[:MOST_RANKS]:
        yield f"{of[0]}: {text}"
    if len(said) > MOST_RANKS:
        yield f"(and {len(said) - MOST_RANKS} more, which differ in numbers)"
    names = list(dict.fromkeys(other.key.name for other in found.others))
    spared = _spared(found, compared)
    if names:
        shown = ", ".join(names[:MOST_OTHERS]) + " ..." * (len(names) > MOST_OTHERS)
        yield f"also in {len(names)} others of this phase: {shown}{spared}"
    named = suspects(found, compared, " ".join(said) + spared, context.trial.layout)
    yield f"look at      {', '.join(named[:3]) or 'no function of the project ran since'}"


def title(one: Compared) -> str:
    name, phase = one.key.name, one.key.phase
    if phase == "backward":
        return f"gradient of {name}"
    if phase == "initial":
        return f"initial {name}"
    return name if phase in ("forward", "built", "loss", "gradient norm") else f"{phase} of {name}"


def reasons(found: Found, context: Context) -> dict[str, list[str]]:
    """Sentences, each with the ranks that it holds for."""
    said: dict[str, list[str]] = {}
    several = context.trial.workload.num_micro_batches > 1
    for wrong in found.wrong[:16]:
        batch = f", micro-batch {wrong.key.micro_batch}" * several
        batch = batch if wrong.key.phase in ("forward", "backward") else ""
        said.setdefault(explain(wrong, context), []).append(f"{wrong.at}{batch}")
    return said


def where(ranks: list[Here], context: Context) -> str:
    """The coordinate that these ranks have in common and no others have, if there is one."""
    everyone = context.ranks
    if set(ranks) == set(everyone):
        return "on all ranks" if len(everyone) > 1 else ""
    listed = ", ".join(str(at.rank) for at in ranks[:8]) + " ..." * (len(ranks) > 8)
    listed = f"rank{'s' * (len(ranks) > 1)} {listed}"
    for axis in ("pp", "dp", "cp", "tp"):
        values = {getattr(at, axis) for at in ranks}
        if len(values) == 1 and set(ranks) == {a for a in everyone if getattr(a, axis) in values}:
            return f"on {axis} {values.pop()} ({listed})"
    return f"on {listed}"


def _spared(found: Found, compared: list[Compared]) -> str:
    """What kinds of parameters are right in the phase, if all of one kind are."""
    if "gradient" not in found.wrong[0].key.phase:
        return ""
    wrong = {one.key.name for one in [*found.wrong, *found.others]}
    same = {one.key.name for one in compared if one.key[:2] == found.wrong[0].key[:2]}
    norms = {name for name in same if "norm" in name}
    if norms and not norms & wrong:
        return "  (not the weights of norms)"
    if all("embed_tokens" in name or "lm_head" in name for name in wrong):
        return "  (only the embeddings)"
    return "  (only the weights of norms)" if wrong <= norms else ""
