"""Timelines: when each rank of a pipeline computes what, as planned and as measured.

    rank 0   F0 F1       B0 B1      a box: an action on the micro-batch of this number
    rank 1      F0 B0 F1 B1         no box: the bubble

Both are drawn on one time scale, so that what the plan leaves out can be seen.
"""

from functools import partial
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
    caption = "F: forward, B: backward, W: weight gradients. Paler: a rank's later layers."
    draw = partial(draw_timelines, named, unit, scale)
    return picture(draw, "The pipeline in time", caption, (WIDE, height_of(named)))


def height_of(named: dict[str, Timeline]) -> float:
    """In inches, of their picture."""
    return 0.7 + sum(0.45 + 0.24 * timeline.num_ranks for timeline in named.values())


def draw_timelines(named: dict[str, Timeline], unit: str, scale: float, figure: Figure) -> None:
    longest = max(timeline.makespan for timeline in named.values()) / scale
    all_axes = figure.subplots(len(named), sharex=True, squeeze=False)[:, 0]
    for axes, (name, timeline) in zip(all_axes, named.items(), strict=True):
        ranks = range(timeline.num_ranks)
        bubble = fmean(map(timeline.bubble, ranks))
        title = f"{name}: {timeline.makespan / scale:.4g} {unit}, bubble {bubble:.1%}"
        axes.set(title=title, ylabel="rank", xlim=(0, longest))
        axes.set(ylim=(len(ranks) - 0.5, -0.5), yticks=ranks)
        _draw_boxes(axes, timeline, scale)
    axes.set_xlabel(f"time ({unit})")


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
