"""Several runs' page: a table of what they reached and how they differ, and a plot of their losses.

A row is a run:  run  folder  steps  loss  val_loss ...  and each key in which runs differ.
"""

from collections.abc import Sequence

from picotron_min.report.curves import losses_of
from picotron_min.report.page import render
from picotron_min.report.reading import Run, tokens_of
from picotron_min.runtime.config import DATA_ORDER, KEYS
from picotron_min.runtime.wording import shown

# What decides on which text a run validates, and how much of it a token attends to.
VALIDATION = {*DATA_ORDER, "dataset.tokenizer", "dataset.document_mask"}
VALIDATION -= {"training.seed", "dataset.packing"}  # these only order the training


def comparison(runs: Sequence[Run]) -> str:
    """The page about several folders."""
    values = [_results(run) | _settings(run) for run in runs]
    different = {name: {of_run[name] for of_run in values} for name in values[0]}
    # Of the results whatever is known, of the keys those in which runs differ.
    columns = [n for n, of in different.items() if of != {None} and (n not in KEYS or len(of) > 1)]
    notes = [note for run in runs for note in run.notes]
    keys = [key for key in columns if key in VALIDATION]
    if keys and "val_loss" in columns:
        notes.append(f"The runs differ in {', '.join(keys)}: their val_loss does not compare")
    rows = []
    for run, of_run in zip(runs, values, strict=True):
        rows.append((len(rows) + 1, str(run.folder), *map(of_run.get, columns)))
    columns = ["run", "folder", *columns]
    page = {"losses": losses_of(runs), "columns": columns, "rows": rows}
    return render("comparison.html", notes=notes, **page)


def _results(run: Run) -> dict[str, float | None]:
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
    }


def _settings(run: Run) -> dict[str, str | None]:
    """All keys of the config; not where the run saves, which is its folder."""
    keys = dict.fromkeys(KEYS)
    if run.config:
        for name, section in run.config.model_dump(by_alias=True).items():
            keys |= {f"{name}.{key}": shown(value) for key, value in section.items()}
        keys["dataset.tokenizer"] = run.config.tokenizer
    del keys["checkpoint.save_dir"]
    return keys
