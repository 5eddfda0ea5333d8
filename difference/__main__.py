"""The command: python -m difference --config a.json"""

import argparse
import contextlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from difference.first import compare, first
from difference.parts import Context
from difference.report import lines_of
from difference.runs import run_ranks
from difference.taps import ROOT
from difference.tiny import Trial, text_of, trial_of
from difference.whole import Whole, right_whole, whole_of
from picotron_min.runtime.config_file import load_config


def main(arguments: list[str] | None = None) -> int:
    about = "Find the first tensor of a layout that one process computes otherwise, and say why."
    parser = argparse.ArgumentParser(prog="python -m difference", description=about)
    parser.add_argument("--config", required=True, help="of the run, as for train.py")
    parser.add_argument("--steps", type=int, default=2, help="to compare; default: 2")
    own = "the config's own model and batch, not tiny ones"
    parser.add_argument("--own-sizes", action="store_true", help=own)
    against = "take the right run from this git revision, or folder, of the project"
    parser.add_argument("--against", metavar="REVISION", help=against)
    parser.add_argument("--list", action="store_true", help="print every tensor with its error")
    given = parser.parse_args(arguments)
    try:
        if given.steps < 1:
            raise ValueError(f"--steps {given.steps}: use 1 or more")
        trial = trial_of(load_config(given.config), given.steps, given.own_sizes)
        whole = None
        if given.against:
            with tree_of(given.against) as folder:
                whole = whole_of(folder, Path(given.config), given.steps, given.own_sizes)
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    return run(trial, given.list, whole)


@contextlib.contextmanager
def tree_of(revision: str) -> Iterator[Path]:
    """A folder with the project as it was in a revision, and this difference/ in it."""
    if Path(revision).is_dir():
        yield Path(revision)
        return
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(["git", "-C", ROOT, "archive", revision], capture_output=True)
        if archive.returncode:
            raise ValueError(f"--against {revision}: {archive.stderr.decode().strip()}")
        subprocess.run(["tar", "x", "-C", folder], input=archive.stdout, check=True)
        shutil.rmtree(Path(folder, "difference"), ignore_errors=True)
        shutil.copytree(ROOT / "difference", Path(folder, "difference"))
        yield Path(folder)


def run(trial: Trial, lists: bool = False, whole: Whole | None = None) -> int:
    """Train a layout and its right run, and print what differs first; the exit code.

    `whole`: what another course's right run has computed, in place of this one's.
    """
    if trial.changes:
        print(f"compared in float64 without: {', '.join(trial.changes)}")
    text = text_of(trial)
    try:
        whole = whole or right_whole(trial, text)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        runs = run_ranks(trial, text, Path(folder))
    compared = compare(trial, whole, runs)
    found = first(compared, whole)
    if lists:
        for one in compared:
            step, phase, name, micro_batch, _ = one.key
            print(f"{one.at} step {step + 1} {micro_batch} {phase:16} {one.error:8.1e} {name}")
    print(*lines_of(found, runs, compared, Context(trial, whole)), sep="\n")
    return int(bool(found) or any(one.problem for one in runs))


if __name__ == "__main__":
    sys.exit(main())
