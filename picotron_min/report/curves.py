"""Curves: what a run recorded over its steps, and the losses of several runs in one plot.

A plot has the name of its quantity in metrics.jsonl.
"""

from collections.abc import Sequence
from functools import partial

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from picotron_min.report.drawing import COLOURS, WIDE, picture
from picotron_min.report.page import Picture
from picotron_min.report.reading import Run

# In this order; then whatever else steps have as numbers: extensions add measures of their own.
UNITS = {
    "loss": "nats a token",
    "learning_rate": "",
    "grad_norm": "before clipping",
    "tokens_per_second": "tokens/s",
    "mfu": "share of the peak",
    "mfu_common": "share of the peak",
    "load_imbalance": "fullest expert / mean",
}


def curves(run: Run) -> list[Picture]:
    """A plot for each quantity that the run has recorded."""
    steps, pictures = [vars(step) | step.measures for step in run.steps], []
    others = sorted({name for step in run.steps for name in step.measures})
    for name in dict.fromkeys([*UNITS, *others]):
        values = [step.get(name) for step in steps]
        if {type(value) for value in values} & {int, float}:  # not lists, a value for each layer
            draw = partial(_draw_curve, run=run, name=name, values=values)
            pictures.append(picture(draw, name))
    return pictures


def _draw_curve(figure: Figure, run: Run, name: str, values: list[float | None]) -> None:
    axes, steps = _axes(figure, name, "step"), [step.step for step in run.steps]
    style = {"color": COLOURS[0], "marker": "o" * (len(steps) == 1)}  # one point makes no line
    axes.plot(steps, values, **style, alpha=0.35, linewidth=1)
    # Smoothed, the learning rate would lag behind itself: it has no noise.
    smoothed = values if name == "learning_rate" else smooth(values)
    axes.plot(steps, smoothed, **style, label="training")
    if name == "loss" and run.evaluations:
        validated = {record.step: record.val_loss for record in run.evaluations}
        losses = [*validated.values()]
        axes.plot([*validated], losses, color=COLOURS[1], marker="o", label="validation")
        axes.legend()


def _axes(figure: Figure, name: str, spent: str) -> Axes:
    axes = figure.add_subplot(title=name, xlabel=spent, ylabel=UNITS.get(name, ""))
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.grid(axis="y")
    return axes


def losses_of(runs: Sequence[Run]) -> Picture:
    """The losses of all runs over tokens: a step of one run may be larger than of another."""

    def draw(figure: Figure) -> None:
        axes = _axes(figure, "loss", "tokens")
        for number, run in enumerate(runs, 1):
            tokens = {step.step: step.tokens for step in run.steps}
            losses = smooth([step.loss for step in run.steps])
            (line,) = axes.plot([*tokens.values()], losses, label=f"run {number}")
            points = {tokens[e.step]: e.val_loss for e in run.evaluations if e.step in tokens}
            axes.plot([*points], [*points.values()], "o", color=line.get_color())
        figure.legend(loc="outside lower center", ncols=6)

    caption = "Lines: training, smoothed. Points: validation."
    return picture(draw, "loss", caption, (WIDE, 3.6))


HALVED_IN = 0.02  # of all steps


def smooth(values: Sequence[float | None]) -> list[float | None]:
    """Means in which a value's weight halves every HALVED_IN of the steps, without the gaps."""
    keep, total, weight, means = 0.5 ** (1 / max(1.0, HALVED_IN * len(values))), 0.0, 0.0, []
    for value in values:
        if value is not None:
            total, weight = keep * total + value, keep * weight + 1
        # Without dividing by the weights so far, the first value would count as if it were many.
        means.append(total / weight if weight else None)
    return means
