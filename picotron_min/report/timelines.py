"""Timelines: when each rank of a pipeline computes what, as planned and as measured.

rank 0   F0 F1       B0 B1      a box is an action on a micro-batch; the ground, where there is
rank 1      F0 B0 F1 B1         no box, is the bubble
"""

from statistics import fmean

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from picotron_min.extensions.schedules.simulator import Timeline
from picotron_min.pipeline_schedule import Kind
from picotron_min.report.drawing import COLOURS, EMPTY, INK, ON_COLOUR, WIDE, picture
from picotron_min.report.page import Picture


def timelines(named: dict[str, Timeline], unit: str, scale: float) -> Picture:
    """Timelines below each other, on one time scale; `scale` of a timeline's units are one."""
    longest = max(timeline.makespan for timeline in named.values()) / scale
    ranks = max(timeline.num_ranks for timeline in named.values())

    def draw(figure: Figure) -> None:
        all_axes = figure.subplots(len(named), sharex=True, squeeze=False)[:, 0]
        for axes, (name, timeline) in zip(all_axes, named.items(), strict=True):
            bubble = fmean(map(timeline.bubble, range(ranks)))
            title = f"{name}: {timeline.makespan / scale:.4g} {unit}, bubble {bubble:.1%}"
            axes.set(title=title, ylabel="rank", xlim=(0, longest), ylim=(ranks - 0.5, -0.5))
            axes.set_yticks(range(ranks))
            _draw_boxes(axes, timeline, scale)
        axes.set_xlabel(f"time ({unit})")

    caption = (
        "F: forward of a micro-batch, B: backward, W: gradients of weights, where they are apart."
    )
    caption += " Paler: a later chunk of the rank's layers."
    height = 0.7 + len(named) * (0.45 + 0.24 * ranks)  # inches
    return picture(draw, "The pipeline in time", caption, (WIDE, height))


def _draw_boxes(axes: Axes, timeline: Timeline, scale: float) -> None:
    origin = min(span.start for span in timeline.spans)
    colours = dict(zip(Kind, COLOURS, strict=False))
    ground = (0, -0.45), timeline.makespan / scale, timeline.num_ranks - 0.1
    axes.add_patch(Rectangle(*ground, color=EMPTY))
    for rank, action, start, end in timeline.spans:
        left, width = (start - origin) / scale, (end - start) / scale
        style = {"facecolor": colours[action.kind], "alpha": 1 / (1 + 0.5 * action.chunk)}
        style |= {"edgecolor": INK, "linewidth": 0.4}
        axes.add_patch(Rectangle((left, rank - 0.45), width, 0.9, **style))
        # Some 75 letters fit side by side.
        name, letters = f"{action.kind.value}{action.micro_batch}", 75 * width / axes.get_xlim()[1]
        if letters > len(name):
            middle = {"ha": "center", "va": "center", "fontsize": 8, "color": ON_COLOUR}
            axes.text(left + width / 2, rank, name, **middle)
