"""Charts: SVG that takes its colours from the page that it stands in, and curves over the steps.

matplotlib draws with fixed colours; `finish` replaces them by the page's CSS variables, which are
light or dark. Text stays text, in the page's font, so that it can be searched and read out.
"""

import io
import math
import re
from collections.abc import Callable, Sequence
from html import escape
from typing import NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator

from picotron_min.report.reading import Run

# Okabe and Ito's colours, which remain distinct to the colour-blind. page.html has two shades of
# each: the lighter ones are hard to see on white, the darker ones on black.
COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"]
# With six colours, 18 kinds of lines; by their names in CSS, for the legend of a comparison.
DASHES = {"solid": "-", "dashed": "--", "dotted": ":"}
# Text and axes; lines of a grid; where nothing is; text on one of the colours.
INK, GRID, EMPTY, ON_COLOUR = "#010101", "#020202", "#030303", "#040404"
CSS = {colour: f"var(--series-{i})" for i, colour in enumerate(COLOURS)}
CSS |= {INK: "currentColor", GRID: "var(--grid)", EMPTY: "var(--empty)"}
CSS |= {ON_COLOUR: "var(--on-colour)"}

STYLE = {
    "svg.fonttype": "none",  # text as text, not as outlines
    "path.simplify_threshold": 0.4,  # points: a page of 100,000 steps has some 50 kB a picture
    "svg.hashsalt": "picotron-min",  # the same report from the same run
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.facecolor": "none",
    "axes.axisbelow": True,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "lines.linewidth": 1.6,
    "grid.color": GRID,
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "axes.titlecolor"), INK),
    **dict.fromkeys(("xtick.color", "ytick.color"), INK),
}
SMALL = 3.5, 2.4  # inches: readable without scrolling on a phone
WIDE = 6.4  # of a page that is 500 pixels wide


def chart(
    draw: Callable[[Figure], None], title: str, about: str, size: tuple[float, float] = SMALL
) -> str:
    """A <figure> with what `draw` draws; `about` is a caption in words."""
    with matplotlib.rc_context(STYLE):
        figure, out = Figure(figsize=size, layout="constrained"), io.StringIO()
        draw(figure)
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
    svg = finish(out.getvalue(), title)
    caption = f"<figcaption>{escape(about)}</figcaption>" if about else ""
    kind = "wide" if size[0] > SMALL[0] else "small"
    return f'<figure class="{kind}"><div class="scroll">{svg}</div>{caption}</figure>'


def finish(svg: str, title: str) -> str:
    """matplotlib's file as an element of a page: ids of its own, the page's colours and font."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<(metadata|style).*?</\1>", "", svg, flags=re.DOTALL)  # the page has a style
    prefix = re.sub(r"\W+", "-", title)
    svg = re.sub(r'\bid="', rf"\g<0>{prefix}-", svg)
    svg = re.sub(r'(url\(#|href="#)', rf"\g<1>{prefix}-", svg)
    svg = re.sub("#[0-9a-f]{6}", lambda m: CSS.get(m[0].upper(), m[0]), svg)
    svg = re.sub(r"'DejaVu Sans'.*?sans-serif", "var(--font)", svg)
    width, height = re.search(r'viewBox="0 0 (\S+) (\S+)"', svg).groups()  # in points
    start = f'<svg role="img" aria-label="{escape(title)}" viewBox="0 0 {width} {height}"'
    return f'{start} style="--width: {width}px">' + svg[svg.index(">") + 1 :]


class Line(NamedTuple):
    x: Sequence[float]
    y: Sequence[float | None]  # None: a gap
    colour: int = 0
    label: str = ""
    is_faint: bool = False  # behind another one
    has_points: bool = False


class Quantity(NamedTuple):
    """What a chart shows of each step."""

    title: str
    unit: str
    name: str  # in the metrics file
    scale: float = 1
    is_noisy: bool = True  # then it is smoothed, with each step's value behind

    def values(self, run: Run) -> list[float | None]:
        numbers = [(vars(step) | step.measures).get(self.name) for step in run.steps]
        return [None if number is None else self.scale * number for number in numbers]

    def lines(self, runs: Sequence[Run]) -> list[Line]:
        """One or two a run, in its colour."""
        lines = []
        for colour, run in enumerate(runs):
            x, y = [step.step for step in run.steps], self.values(run)
            lines.append(Line(x, y, colour, is_faint=self.is_noisy))
            lines += [Line(x, smooth(y), colour)] * self.is_noisy
        return lines


LOSS = Quantity("Loss", "nats a token", "loss")
OTHERS = [
    *(Quantity(f"Loss {j} further ahead", LOSS.unit, f"mtp_{j}_loss") for j in range(1, 5)),
    Quantity("Acceptance", "% of drafts of one further token", "mtp_1_acceptance", scale=100),
    Quantity("Learning rate", "learning rate", "learning_rate", is_noisy=False),
    Quantity("Gradient norm", "norm before clipping", "grad_norm"),
    Quantity("Speed", "tokens/s", "tokens_per_second"),
    Quantity("MFU: mfu", "% of the peak", "mfu", scale=100),
    Quantity("MFU: mfu_common", "% of the peak", "mfu_common", scale=100),
    Quantity("Power", "W, mean of what is measured", "watts"),
    Quantity("Zeros in the gradient", "elements", "num_zeros_in_grad"),
    Quantity("Imbalance", "fullest expert / mean", "load_imbalance"),
    Quantity("Imbalance of a ring", "busiest rank / mean", "cp_imbalance"),
]


def curve_pictures(runs: Sequence[Run]) -> list[str]:
    """A chart for each quantity that any run has, with one colour a run."""
    known = [q for q in OTHERS if any(value is not None for run in runs for value in q.values(run))]
    others = [curves(quantity.lines(runs), quantity.title, quantity.unit) for quantity in known]
    losses, validation = LOSS.lines(runs), []
    for colour, run in enumerate(runs):
        if run.evaluations:
            x, y = [e.step for e in run.evaluations], [e.val_loss for e in run.evaluations]
            validation.append(Line(x, y, colour, has_points=True))
    if len(runs) > 1:
        more = [curves(validation, "Validation loss", LOSS.unit)] if validation else []
        return [curves(losses, LOSS.title, LOSS.unit), *more, *others]
    each_step, smoothed = losses
    both = [each_step, smoothed._replace(label="training")]
    both += [line._replace(label="validation", colour=1) for line in validation]
    about = "Faint: each step. Strong: smoothed. The same holds below."
    return [curves(both, LOSS.title, LOSS.unit, about=about), *others]


def curves(lines: Sequence[Line], title: str, unit: str, x_unit="step", about="") -> str:
    """Lines over steps or tokens."""

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        axes.grid(axis="y")
        for line in lines:
            plot_line(axes, line)
        axes.set(title=title, xlabel=x_unit, ylabel=unit)
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=x_unit == "step"))
        axes.yaxis.set_major_locator(MaxNLocator(5))
        if len(points := {x for line in lines for x in line.x}) == 1:
            axes.set(xticks=[*points], xlim=(min(points) - 1, min(points) + 1))
        for axis in (axes.xaxis, axes.yaxis):
            if (high := axis.get_view_interval()[1]) >= 10_000:
                axis.set_major_formatter(EngFormatter(sep=""))  # 20k
            elif 0 < high < 0.01:
                axis.get_major_formatter().set_powerlimits((0, 0))  # 1e-3 above the axis
        if len([line for line in lines if line.label]) > 1:
            axes.legend(loc="best")

    return chart(draw, title, about)


def plot_line(axes: Axes, line: Line) -> None:
    y = [math.nan if value is None else value for value in line.y]
    dash, colour = divmod(line.colour, len(COLOURS))
    style = {"color": COLOURS[colour], "linestyle": [*DASHES.values()][dash]}
    if line.is_faint:
        style |= {"alpha": 0.35, "linewidth": 1.0}
    if line.has_points or len(y) == 1:  # one point makes no line
        style |= {"marker": "o"}
    axes.plot(line.x, y, **style, markersize=3, label=line.label)


def smooth(values: Sequence[float | None]) -> list[float | None]:
    """Means in which a value's weight halves every 2% of the steps; gaps stay out of them."""
    keep, total, weight, means = 0.5 ** (1 / max(1.0, 0.02 * len(values))), 0.0, 0.0, []
    for value in values:
        if value is not None:
            total, weight = keep * total + value, keep * weight + 1
        # Without dividing by the weights so far, the first value would count as if it were many.
        means.append(total / weight if weight else None)
    return means
