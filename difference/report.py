"""Report: what is printed of the first wrong tensor, a rank that failed, and where to look."""

from collections.abc import Iterator

from difference.first import Compared, Found
from difference.parts import Context
from difference.places import Here
from difference.runs import RankRun
from difference.suspects import QUEUE, is_yours, short, suspects
from difference.why import explain

MOST = 3  # reasons, names and functions that are printed


def lines_of(
    found: Found | None, runs: list[RankRun], compared: list[Compared], context: Context
) -> Iterator[str]:
    failed = [rank for rank, run in enumerate(runs) if run.problem]
    count = f"{len(compared):,} tensors"
    if found:
        yield from _first_wrong(found, compared, context)
    if failed:  # the first that failed; one that only lost another rank comes last
        rank = min(failed, key=lambda rank: (runs[rank].lost, runs[rank].failed_at))
        yield f"FAILED       rank {rank}: {runs[rank].problem}"
        for name, line in runs[rank].stack[:MOST]:
            yield f"             {name.replace(':', f':{line} in ')}"
        if not found:
            yield f"             all {count} that were recorded before are right"
            stack = [name for name, _ in runs[rank].stack]
            queue = QUEUE * ("gradients are missing" in runs[rank].problem)
            named = [*queue, *stack[:1], *runs[rank].ran, *stack[1:]]
            yield from _look_at([*dict.fromkeys(map(short, named))])
    elif not found:
        worst = max((one.error for one in compared), default=0.0)
        what = f"all {count} of {len(runs)} ranks"
        yield f"ALL RIGHT    {what} are those of one process, within {worst:.0e} of the largest"


def _look_at(named: list[str]) -> Iterator[str]:
    shown = named[: MOST + any(map(is_yours, named[:MOST]))]
    yield f"look at      {', '.join(shown) or 'no function of the project ran since'}"


def _first_wrong(found: Found, compared: list[Compared], context: Context) -> Iterator[str]:
    key, ranks = found.wrong[0].key, {one.at for one in found.wrong}
    names = {"backward": "gradient of ", "initial": "initial "}
    names |= dict.fromkeys(("forward", "built", "loss", "gradient norm"), "")
    title = f"{names.get(key.phase, f'{key.phase} of ')}{key.name}"
    yield f"FIRST WRONG  step {key.step + 1}, {title}  {_where(ranks, context)}"
    yield f"             {found.num_right:,} tensors before it are right, {found.num_wrong:,} wrong"
    said: dict[str, str] = {}  # sentences, each with the first rank that it holds for
    several = context.trial.workload.num_micro_batches > 1
    for one in found.wrong[:16]:
        is_of_one = several and key.phase in ("forward", "backward")
        of = f", micro-batch {one.key.micro_batch}" * is_of_one
        said.setdefault(explain(one, context), f"{one.at}{of}")
    for text, of in [*said.items()][:MOST]:
        yield f"{of}: {text}"
    if len(said) > MOST:
        yield f"(and {len(said) - MOST} more, which differ in numbers)"
    if names := [*dict.fromkeys(other.key.name for other in found.others)]:
        shown = ", ".join(names[:MOST]) + " ..." * (len(names) > MOST)
        yield f"also in {len(names)} others of this phase: {shown}"
    yield from _look_at(suspects(found, compared, " ".join(said), context))


def _where(ranks: set[Here], context: Context) -> str:
    """The coordinate that these ranks have in common and no others have, if there is one."""
    everyone = set(context.ranks)
    if ranks == everyone:
        return "on all ranks" if len(everyone) > 1 else ""
    numbers = sorted(at.rank for at in ranks)
    listed = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, numbers[:8]))}"
    listed += " ..." * (len(ranks) > 8)
    for axis in ("pp", "dp", "cp", "tp"):
        values = {getattr(at, axis) for at in ranks}
        if len(values) == 1 and ranks == {at for at in everyone if getattr(at, axis) in values}:
            return f"on {axis} {values.pop()} ({listed})"
    return f"on {listed}"
