"""The command: python -m difference --config a.json"""

import argparse
import sys
import tempfile
from pathlib import Path

import torch

from difference.first import compare, first
from difference.parts import Context
from difference.records import Key
from difference.report import lines_of
from difference.runs import run_ranks
from difference.tiny import Trial, text_of, trial_of
from difference.whole import Whole, right_whole
from picotron_min.runtime.config_file import load_config


def main(arguments: list[str] | None = None) -> int:
    about = "Find the first tensor of a layout that one process computes otherwise, and say why."
    parser = argparse.ArgumentParser(prog="python -m difference", description=about)
    parser.add_argument("--config", required=True, help="of the run, as for train.py")
    parser.add_argument("--steps", type=int, default=2, help="to compare; default: 2")
    own = "the config's own model and batch, not tiny ones"
    parser.add_argument("--own-sizes", action="store_true", help=own)
    save = "only run the one process, and write what it computes"
    parser.add_argument("--save", metavar="FILE", help=save)
    parser.add_argument("--right", metavar="FILE", help="compare with what --save has written")
    parser.add_argument("--list", action="store_true", help="print every tensor with its error")
    given = parser.parse_args(arguments)
    try:
        if given.steps < 1:
            raise ValueError(f"--steps {given.steps}: use 1 or more")
        trial = trial_of(load_config(given.config), given.steps, given.own_sizes)
        if given.save:
            whole = {tuple(key): tensor for key, tensor in right_whole(trial).items()}
            torch.save(whole, given.save)
            return 0
        return run(trial, given.list, saved(given.right, trial) if given.right else None)
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2


def saved(file: str, trial: Trial) -> Whole:
    """What another version of the project has computed in one process."""
    whole = {Key(*key): tensor for key, tensor in torch.load(file).items()}
    shapes = {key.name: tuple(t.shape) for key, t in whole.items() if key.phase == "initial"}
    batches = {(key.step, key.micro_batch, key.dp) for key in whole if key.name == "tokens"}
    mine = {(step, *place) for step in range(trial.steps) for place in trial.micro_batches}
    if shapes != trial.model_config.parameter_shapes() or batches != mine:
        raise ValueError(f"--right {file} is of another config, or of other options: --save again")
    return whole


def run(trial: Trial, lists: bool = False, whole: Whole | None = None) -> int:
    """Train a layout and its right run, and print what differs first; the exit code.

    `whole`: what another version's right run has computed, in place of this one's.
    """
    if trial.changes:
        print(f"compared in float64 without: {', '.join(trial.changes)}")
    whole = whole or right_whole(trial)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        runs = run_ranks(trial, text_of(trial), Path(folder))
    compared = compare(trial, whole, runs)
    found = first(compared, whole)
    if lists:
        for one in compared:
            step, phase, name, micro_batch, _ = one.key
            print(f"{one.at} step {step + 1} {micro_batch} {phase:16} {one.error:8.1e} {name}")
    context = Context(trial, whole, found.wrong if found else ())
    print(*lines_of(found, runs, compared, context), sep="\n")
    return int(bool(found) or any(one.problem for one in runs))


if __name__ == "__main__":
    sys.exit(main())
