"""The command: python -m difference --config a.json"""

import argparse
import sys
import tempfile
from pathlib import Path

from difference.first import compare, first
from difference.parts import Context
from difference.report import lines_of
from difference.runs import run_ranks
from difference.tiny import Trial, text_of, trial_of
from difference.whole import RightRun
from picotron_min.runtime.config_file import load_config


def main(arguments: list[str] | None = None) -> int:
    about = "Find the first tensor of a layout that one process computes otherwise, and say why."
    parser = argparse.ArgumentParser(prog="python -m difference", description=about)
    parser.add_argument("--config", required=True, help="of the run, as for train.py")
    parser.add_argument("--steps", type=int, default=2, help="to compare; default: 2")
    text = "the config's own model and batch, not tiny ones"
    parser.add_argument("--own-sizes", action="store_true", help=text)
    parser.add_argument("--list", action="store_true", help="print every tensor with its error")
    given = parser.parse_args(arguments)
    try:
        if given.steps < 1:
            raise ValueError(f"--steps {given.steps}: use 1 or more")
        trial = trial_of(load_config(given.config), given.steps, given.own_sizes)
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    return run(trial, given.list)


def run(trial: Trial, lists: bool = False) -> int:
    """Train a layout and its right run, and print what differs first; the exit code."""
    if trial.changes:
        print(f"compared in float64 without: {', '.join(trial.changes)}")
    text = text_of(trial)
    right = RightRun(trial, text)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        runs = run_ranks(trial, text, Path(folder))
    compared = compare(trial, right.whole, runs)
    found = first(compared, right.whole)
    if lists:
        for one in compared:
            of, phase, name = one.key.micro_batch, one.key.phase, one.key.name
            print(f"{one.at} step {one.key.step + 1} {of} {phase:16} {one.error:8.1e} {name}")
    print(*lines_of(found, runs, compared, Context(trial, right)), sep="\n")
    return int(bool(found) or any(one.problem for one in runs))


if __name__ == "__main__":
    sys.exit(main())
