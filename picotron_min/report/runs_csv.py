"""A table of runs as CSV, a line a run: how it ended, what it reached, and the keys that differ."""

import csv
from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path

from picotron_min.report.reading import Run, tokens_of
from picotron_min.runtime.config import KEYS
from picotron_min.runtime.wording import shown

FIRST = "folder,ended,steps"  # how every such file begins


def differing_keys(runs: Sequence[Run]) -> dict[str, list[str]]:
    """Keys of the config that not all runs have alike, each with the value of every run."""
    found = {}
    for key in KEYS:
        path = key.replace("checkpoint.async", "checkpoint.in_background")
        values = [shown(attrgetter(path)(run.config)) if run.config else "" for run in runs]
        if len(set(values)) > 1:
            found[key] = values
    return found


def write_runs(path: Path, runs: Sequence[Run]) -> None:
    """Write the file; ValueError if one of this name is there, and is not such a table."""
    if path.exists() and not path.read_text(errors="replace").startswith(FIRST):
        raise ValueError(f"{path} exists and is not a table of runs: name another file with --out")
    keys = differing_keys(runs)
    with path.open("w", newline="", encoding="utf-8", errors="replace") as file:
        rows = [_row(run) | results_of(run) for run in runs]
        for i, row in enumerate(rows):
            row |= {key: values[i].strip('"') for key, values in keys.items()}
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def _row(run: Run) -> dict[str, object]:
    model = run.folder / "hf" / "config.json"  # written at the end
    is_done = model.is_file() and run.starts
    is_done = is_done and model.stat().st_mtime >= run.starts[-1].at.timestamp()
    return {"folder": run.folder, "ended": "done" if is_done else "early"}


def results_of(run: Run) -> dict[str, float | None]:
    """What a run reached, and took; None where a number is not known."""
    last, seconds, tokens = run.steps[-1], run.seconds, tokens_of(run.all_steps)
    return {
        "steps": last.step,
        "tokens": last.tokens,
        "seconds": seconds,
        "loss": last.loss,
        "val_loss": run.evaluations[-1].val_loss if run.evaluations else None,
        "tokens_per_second": tokens / seconds if seconds else None,
        "mfu": run.mean_over_time("mfu"),
        "mfu_common": run.mean_over_time("mfu_common"),
        "joules": run.joules,
        "joules_per_token": run.joules / tokens if run.joules is not None and tokens else None,
    }
