"""Curves: numbers of each step, of one run or of several on shared axes."""

from collections.abc import Sequence
from typing import NamedTuple

from picotron_min.report.charts import Line, curves, smooth
from picotron_min.report.reading import Run


class Quantity(NamedTuple):
    """What a chart shows of each step."""

    title: str
    unit: str
    name: str  # in the metrics file
    scale: float = 1
    is_noisy: bool = True  # then it is smoothed, with each step's value behind

    def values(self, run: Run) -> list[float | None]:
        numbers = [(vars(step) | step.balance).get(self.name) for step in run.steps]
        return [None if number is None else self.scale * number for number in numbers]

    def lines(self, run: Run, colour: int) -> list[Line]:
        x, y = [step.step for step in run.steps], self.values(run)
        if not self.is_noisy:
            return [Line("", x, y, colour)]
        return [Line("", x, y, colour, is_faint=True), Line("", x, smooth(y), colour)]


LOSS = Quantity("Loss", "nats a token", "loss")
OTHERS = [
    Quantity("Learning rate", "learning rate", "learning_rate", is_noisy=False),
    Quantity("Gradient norm", "norm before clipping", "grad_norm"),
    Quantity("Speed", "tokens/s", "tokens_per_second"),
    Quantity("MFU: mfu", "% of the peak", "mfu", scale=100),
    Quantity("MFU: mfu_common", "% of the peak", "mfu_common", scale=100),
    Quantity("Zeros in the gradient", "elements", "num_zeros_in_grad"),
    Quantity("Imbalance", "fullest expert / mean", "load_imbalance"),
]


def curve_pictures(runs: Sequence[Run]) -> list[str]:
    """A chart for each quantity that any run has, with one colour a run."""
    validation = [_validation(run, i) for i, run in enumerate(runs) if run.evaluations]
    if len(runs) == 1:
        each_step, smoothed = LOSS.lines(runs[0], 0)
        lines = [each_step, smoothed._replace(label="training")]
        lines += [line._replace(label="validation", colour=1) for line in validation]
        about = "Faint: each step. Strong: smoothed. The same holds below."
        charts = [curves(lines, LOSS.title, LOSS.unit, about=about)]
    else:
        charts = [_picture(LOSS, runs)]
        if validation:
            charts.append(curves(validation, "Validation loss", LOSS.unit))
    known = [q for q in OTHERS if any(value is not None for run in runs for value in q.values(run))]
    return charts + [_picture(quantity, runs) for quantity in known]


def _validation(run: Run, colour: int) -> Line:
    x, y = [e.step for e in run.evaluations], [e.val_loss for e in run.evaluations]
    return Line("", x, y, colour, has_points=True)


def _picture(quantity: Quantity, runs: Sequence[Run]) -> str:
    lines = [line for colour, run in enumerate(runs) for line in quantity.lines(run, colour)]
    return curves(lines, quantity.title, quantity.unit)
