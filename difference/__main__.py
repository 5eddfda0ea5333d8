"""The command: python -m difference --config a.json."""

import argparse
import signal
import sys

from difference.report import run
from difference.tiny import trial_of
from picotron_min.runtime.config_file import load_config

STEPS = 3  # the third shows what the first update has left wrong for the second


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m difference",
        description="Find the first tensor of a layout that one process computes otherwise.",
    )
    parser.add_argument("--config", required=True, help="of the run, as for train.py")
    parser.add_argument("--own-sizes", action="store_true", help="the config's model and batch")
    given = parser.parse_args(arguments)
    try:
        return run(trial_of(load_config(given.config), STEPS, given.own_sizes))
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it without a traceback
    sys.exit(main())
