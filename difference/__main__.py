"""The command: python -m difference --config a.json, and what it prints."""

import argparse
import pickle
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from difference.apart import mixing
from difference.compare import Comparison
from difference.runs import RankRun, run_ranks
from difference.suspects import MOST, QUEUE, look_at, suspects
from difference.taps import RAN, Key, is_yours, name_of, outer, place_of
from difference.tiny import Trial, text_of, trial_of
from difference.whole import Whole, right_whole
from difference.why import explain
from difference.yours import named
from picotron_min.extensions.schedules.registry import SCHEDULES
from picotron_min.runtime.config_file import load_config


def main(arguments: list[str] | None = None) -> int:
    about = "Find the first tensor of a layout that one process computes otherwise, and say why."
    parser = argparse.ArgumentParser(prog="python -m difference", description=about)
    parser.add_argument("--config", required=True, help="of the run, as for train.py")
    parser.add_argument("--steps", type=int, default=3, help="to compare; default: 3")
    own = "the config's own model and batch, not tiny ones"
    parser.add_argument("--own-sizes", action="store_true", help=own)
    right = "compare with the one process saved in FILE, which is written if it is missing"
    parser.add_argument("--right", metavar="FILE", help=right)
    given = parser.parse_args(arguments)
    try:
        if given.steps < 1:
            raise ValueError(f"--steps {given.steps}: use 1 or more")
        trial = trial_of(load_config(given.config), given.steps, given.own_sizes)
        if given.own_sizes:
            print("trains the config's own model several times, which may take minutes", flush=True)
        return run(trial, saved(Path(given.right), trial) if given.right else None)
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2


def saved(file: Path, trial: Trial) -> Whole:
    """What one process computes, of the version of the project that has written the file."""
    if file.is_dir() or not file.parent.is_dir():
        raise ValueError(f"--right {file}: name a file, in a folder that is there")
    if not file.exists():
        whole = {tuple(key): tensor for key, tensor in right_whole(trial).items()}
        torch.save((repr(trial), whole), file)
    try:
        of, whole = torch.load(file, weights_only=True)  # runs no code of the file
    except (pickle.UnpicklingError, EOFError):
        raise ValueError(f"--right {file} is no file that --right has written") from None
    if of != repr(trial):
        raise ValueError(f"--right {file} is of another config or other options: use another file")
    return {Key(*key): tensor for key, tensor in whole.items()}


def run(trial: Trial, whole: Whole | None = None) -> int:
    """Train a layout and its right run, and print what differs first; the exit code.

    `whole`: what another version's right run has computed, in place of this one's.
    """
    if trial.changes:
        print(f"compared in float64; settings left out: {', '.join(trial.changes)}")
    whole = whole or right_whole(trial)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        runs = run_ranks(trial, text_of(trial), Path(folder))
    makers = {of: by for one in runs for of, by in one.makers.items()}
    senders = {name for one in runs for name in one.senders}
    both = Comparison(trial, whole, [one.records for one in runs], makers, senders)
    is_wrong = bool(both.first) or any(one.problem for one in runs)
    is_mixed, more = (False, []) if is_wrong else mixing(trial, whole)
    for line in more if is_mixed else [*lines_of(both, runs), *more]:
        print(line, flush=True)
    return int(is_wrong or is_mixed)


def lines_of(both: Comparison, runs: list[RankRun]) -> Iterator[str]:
    failed = [rank for rank, run in enumerate(runs) if run.problem]
    count = f"{len(both.all):,} tensors"
    if both.first:
        yield from _first_wrong(both)
    if failed:  # the first that failed; one that only lost another rank comes last
        rank = min(failed, key=lambda rank: (runs[rank].lost, runs[rank].failed_at))
        yield f"FAILED       rank {rank}: {runs[rank].problem}"
        for name, line in runs[rank].stack[:MOST]:
            yield f"             {place_of(name, line)}"
        if not both.first:
            yield f"             all {count} that were recorded before are right"
            stack = [name for name, _ in runs[rank].stack]
            queue = QUEUE * ("gradients are missing" in runs[rank].problem)
            if "pipeline_messages:insert_messages" in stack:  # of a plan that cannot run
                queue = [name_of(SCHEDULES[both.trial.layout.pp_engine].plan)]
            ran = map(outer, runs[rank].ran)
            yield look_at([*dict.fromkeys([*queue, *stack[:1], *ran, *stack[1:]])])
    elif not both.first:
        worst = max((one.error for one in both.all), default=0.0)
        what = f"all {count} of {len(runs)} ranks"
        yield f"ALL RIGHT    {what} are those of one process, within {worst:.0e} of the largest"


def _first_wrong(both: Comparison) -> Iterator[str]:
    key, ranks = both.first[0].key, sorted({one.at for one in both.first})
    names = {"backward": "gradient of ", "initial": "initial ", "measure": "measure "}
    names |= dict.fromkeys(("forward", "built", "loss", "gradient norm"), "")
    title = f"{names.get(key.phase, f'{key.phase} of ')}{key.name}"
    where = f"on {both.name_of(ranks)}" * (len(both.ranks) > 1)
    yield f"FIRST WRONG  step {key.step + 1}, {title}  {where}"
    yield f"             {both.num_right:,} tensors before it are right, {both.num_wrong:,} wrong"
    explanations: dict[str, str] = {}  # sentences, each with the first rank that it holds for
    several = both.trial.workload.num_micro_batches > 1
    for one in both.first[:16]:
        is_of_one = several and key.phase in ("forward", "backward")
        of = f", micro-batch {one.key.micro_batch}" * is_of_one
        explanations.setdefault(explain(one, both), f"{one.at}{of}")
    for text, of in [*explanations.items()][:MOST]:
        yield f"{of}: {text}"
    if len(explanations) > MOST:
        yield f"(and {len(explanations) - MOST} more, which differ in numbers)"
    if names := [*dict.fromkeys(other.key.name for other in both.others)]:
        first = ", ".join(names[:MOST]) + " ..." * (len(names) > MOST)
        yield f"also in {len(names)} other{'s' * (len(names) > 1)} of this phase: {first}"
    yours, what = named(both, " ".join(explanations))
    if what:
        yield f"inside       {yours[0]}: {what}"
    methods = {f"{name}.{method}" for name in yours for method in ("forward", "backward")}
    others = [name for name in suspects(both, " ".join(explanations)) if name not in methods]
    if not what:  # then what one process does not run is likelier than what calls it
        apart = [o for o in others if is_yours(o) and Key(0, RAN, o) not in both.whole]
        yours = [*others[:1], *yours[:1], *apart, *yours]
    yield look_at([*dict.fromkeys([*yours, *others])])


if __name__ == "__main__":
    sys.exit(main())
