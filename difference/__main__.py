"""The command: python -m difference --config a.json.

It imports the course, which can be broken, only where it can say so in one line.
"""

import argparse
import signal
import sys
import traceback

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
        return _compare(given.config, given.own_sizes)
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2


def _compare(path: str, own_sizes: bool) -> int:
    try:
        from difference.report import run
        from difference.tiny import trial_of
        from picotron_min.runtime.config_file import load_config
    except Exception as error:  # whatever a file of the course raises
        last = traceback.extract_tb(error.__traceback__)[-1]
        file = getattr(error, "filename", None) or last.filename  # of a SyntaxError its own
        line = getattr(error, "lineno", None) or last.lineno
        what = f"{file}:{line}: {type(error).__name__}: {error}"
        raise ValueError(f"the course cannot be imported: {what}") from None
    return run(trial_of(load_config(path), STEPS, own_sizes))


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it without a traceback
    sys.exit(main())
