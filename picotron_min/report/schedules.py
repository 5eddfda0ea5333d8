"""All schedules in one picture, which README.md shows.

python -m picotron_min.report.schedules docs/schedules.svg
"""

import sys
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from picotron_min.extensions.schedules.registry import SCHEDULES, plan_on_paper
from picotron_min.extensions.schedules.simulator import Timeline
from picotron_min.report.drawing import EMPTY, GRID, INK, ON_COLOUR, STYLE, WIDE
from picotron_min.report.timelines import draw_timelines, height_of

# Readable on light and on dark pages, as a file has no page's variables.
ON_PAPER = {INK: "#1f2328", GRID: "#d0d7de", EMPTY: "#e6e9ed", ON_COLOUR: "#ffffff"}


def write_schedules(path: Path, ranks: int = 4, micro_batches: int = 8) -> None:
    timelines = {}
    for name, schedule in SCHEDULES.items():
        sizes, _, timeline = plan_on_paper(name, ranks, micro_batches)
        chunks = sizes[-1]  # a chunk's forward takes 1/chunks of a rank's
        spans = [s._replace(start=s.start / chunks, end=s.end / chunks) for s in timeline.spans]
        live = max(schedule.live_activations(rank, *sizes) for rank in range(ranks)) / chunks
        about = f"{name}, at most {live:g} micro-batches alive"
        timelines[about] = Timeline(ranks, spans)
    with matplotlib.rc_context(STYLE | {"font.sans-serif": ["DejaVu Sans"]}):  # else a long list
        figure = Figure(figsize=(WIDE, height_of(timelines)), layout="constrained")
        draw_timelines(timelines, "forwards", 1.0, figure)
        figure.savefig(path, format="svg", facecolor="white", metadata={"Date": None})
    svg = path.read_text()
    for colour, on_paper in ON_PAPER.items():
        svg = svg.replace(colour, on_paper)
    path.write_text(" ".join(svg.split()) + "\n")  # else 6,000 lines, half of them coordinates


if __name__ == "__main__":
    write_schedules(Path(sys.argv[1]))
