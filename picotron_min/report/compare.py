"""Several runs' page: their curves on shared axes, and how their settings differ."""

from itertools import accumulate

from picotron_min.report.charts import LOSS, Line, curve_pictures, curves, smooth
from picotron_min.report.page import Cell, gallery, legend, page, paragraph, section, table
from picotron_min.report.reading import Run
from picotron_min.report.runs_csv import differing_keys, results_of
from picotron_min.runtime.wording import shown


def comparison(runs: list[Run]) -> str:
    """The page about several folders."""
    named = {str(run.folder): run for run in runs}
    charts = curve_pictures(runs)
    if len({run.config and run.config.tokens_per_step for run in runs}) > 1:
        tokens = [[step.tokens for step in run.steps] for run in runs]
        about = "A step of these runs is not of one size: tokens are the fairer axis."
        charts.insert(1, _loss_by("tokens", tokens, runs, about))
    if all(run.joules is not None for run in runs):
        joules = [[*accumulate(step.measures["joules"] for step in run.steps)] for run in runs]
        charts.insert(1, _loss_by("joules", joules, runs, "Resumed steps count once."))
    lines = legend([*named]), paragraph("Faint: each step. Strong: smoothed.")
    return page(
        "Runs compared",
        [*(note for run in runs for note in run.notes), *_validated_differently(runs)],
        section("Results", _results(named)),
        section("What differs in their settings", _differences(named)),
        section("How they went", *lines, gallery(*charts)),
    )


def _validated_differently(runs: list[Run]) -> list[str]:
    """A note, unless all runs validate on the same sequences, as much of which is attended to."""
    # These only order the training.
    ignored = dict.fromkeys(("training.seed", "sequences a step", "dataset.packing"))
    mask = "dataset.document_mask"
    configs = [run.config for run in runs if run.config and run.evaluations]
    on = [c.data_order | ignored | {mask: c.dataset.document_mask} for c in configs]
    keys = [key for key in on[0] if len({shown(data[key]) for data in on}) > 1] if on else []
    why = f"{', '.join(keys)}: their val_loss does not compare"
    return [f"The runs differ in {why}"] if keys else []


def _loss_by(unit: str, spent: list[list[float]], runs: list[Run], about: str) -> str:
    lines = [Line(spent[i], smooth(LOSS.values(run)), i) for i, run in enumerate(runs)]
    return curves(lines, f"Loss by {unit}", LOSS.unit, unit, f"Smoothed. {about}")


def _results(named: dict[str, Run]) -> str:
    results = {name: results_of(run) for name, run in named.items()}
    known = [n for n in FORMS if any(numbers[n] is not None for numbers in results.values())]
    rows = [(name, *(Cell.of(row[n], FORMS[n]) for n in known)) for name, row in results.items()]
    caption = "Losses are from the last step and the last validation."
    return table(("run", *known), rows, caption)


FORMS = dict.fromkeys(("steps", "tokens"), ",") | {"seconds": ",.1f"}
FORMS |= dict.fromkeys(("loss", "val_loss"), ".4f") | {"tokens_per_second": ",.0f"}
FORMS |= dict.fromkeys(("mfu", "mfu_common"), ".2%")
FORMS |= dict.fromkeys(("joules", "joules_per_token"), ",.4g")


def _differences(named: dict[str, Run]) -> str:
    unknown = [name for name, run in named.items() if not run.config]
    if unknown:
        return paragraph(f"The settings of {', '.join(unknown)} are not known.")
    rows = [(key, *values) for key, values in differing_keys([*named.values()]).items()]
    return table(("key", *named), rows) if rows else paragraph("Nothing: all keys are equal.")
