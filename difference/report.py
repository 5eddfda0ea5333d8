"""Report: what is printed of a trial: the first wrong tensor, why, and where to look."""

from collections.abc import Iterator

from difference.compare import AXES, Comparison, Here
from difference.look_at import look_at
from difference.plain import train_plainly
from difference.runs import Run, run_in_processes, train_layout
from difference.tiny import Trial
from difference.why import explain

MOST = 3  # sentences, names and functions that are printed


def run(trial: Trial) -> int:
    """Train a layout and its right run, and print what differs first; the exit code."""
    print("compared in float64, without compile, fp8, offload, packing, expert limits", flush=True)
    (plain,) = run_in_processes(train_plainly, 1, trial)
    count = trial.layout.world_size * (not plain.problem)
    runs = run_in_processes(train_layout, count, trial)
    lines = [*_lines(Comparison(trial, plain, runs), plain, runs)]
    print(*lines, sep="\n")
    return int(not lines[0].startswith("ALL RIGHT"))


def _lines(both: Comparison, plain: Run, runs: list[Run]) -> Iterator[str]:
    if both.first:
        yield from _first_wrong(both)
    ends = {f"rank {rank}": run for rank, run in enumerate(runs)} | {"one process": plain}
    if failed := [(run.failed_at, who) for who, run in ends.items() if run.problem]:
        _, who = min(failed)
        yield f"FAILED       {who}: {ends[who].problem}"
    elif not both.first:
        what = f"all {len(both.all):,} tensors of {len(runs)} ranks are those of one process"
        yield f"ALL RIGHT    {what}"


def _first_wrong(both: Comparison) -> Iterator[str]:
    key, ranks = both.first[0].key, sorted({one.at for one in both.first})
    title = f"{key.phase} of {key.name}".removeprefix("forward of ")
    yield f"FIRST WRONG  step {key.step + 1}, {title}  on {_name_of(ranks, both)}"
    sentences: dict[str, str] = {}  # each with the first rank that it holds for
    for one in both.first[:16]:
        of = f", micro-batch {one.key.micro_batch}" * (key.phase in ("forward", "gradient"))
        sentences.setdefault(explain(one, both), f"rank {one.at.rank}{of}")
    for text, of in [*sentences.items()][:MOST]:
        yield f"{of}: {text}"
    yield _look_at(look_at(both))


def _name_of(ranks: list[Here], both: Comparison) -> str:
    """The places on axes that these have in common, and their numbers."""
    if len(ranks) == len(both.ranks):
        return "all ranks"
    sizes = both.trial.layout.sizes._asdict()
    shared = [a for a in AXES if len({getattr(at, a) for at in ranks}) == 1 < sizes[a]]
    places = " ".join(f"{axis} {getattr(ranks[0], axis)}" for axis in shared)
    return f"{places} (rank {', '.join(str(at.rank) for at in ranks)})"


def _look_at(functions: list[str]) -> str:
    shown = functions[:MOST] or ["no function of the project was called since"]
    return "look at      " + f"\n{'':13}".join(shown)
