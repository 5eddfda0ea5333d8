"""Pictures of a layout: where ranks are, who sends to whom, memory, the pipeline in time."""

import math
from collections.abc import Mapping, Sequence
from itertools import groupby, product

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from picotron_min.extensions.schedules.simulator import Timeline
from picotron_min.extensions.settings import Layout
from picotron_min.pipeline_schedule import Kind
from picotron_min.planner.memory import RankMemory
from picotron_min.report.charts import COLOURS, EMPTY, GRID, INK, ON_COLOUR, SMALL, WIDE, chart

MOST_ROWS, MOST_COLUMNS, MOST_RANKS = 16, 16, 64
CENTRED = {"ha": "center", "va": "center"}


def rank_grid(layout: Layout, layers: list[list[int]]) -> str:
    """A box a rank: columns are (cp, tp), rows are (pp, dp), a colour a pipeline stage."""
    a_row = layout.cp * layout.tp  # ranks
    columns, rows = min(a_row, MOST_COLUMNS), min(layout.pp * layout.dp, MOST_ROWS)

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        for row in range(rows):
            pp, dp = divmod(row, layout.dp)
            y = row + 0.5 * pp  # a gap between stages
            for column in range(columns):
                cp, tp = divmod(column, layout.tp)
                x, rank = column + 0.25 * cp, row * a_row + column
                _box(axes, x, y, 0.92, 0.88, color=COLOURS[pp % len(COLOURS)], alpha=0.3)
                experts = f"\nep {rank // layout.etp % layout.ep}" if layout.ep > 1 else ""
                axes.text(x + 0.46, y + 0.44, f"{rank}{experts}", **CENTRED)
                if row == 0:
                    name = f"tp {tp}" if layout.cp == 1 else f"cp {cp}\ntp {tp}"
                    axes.text(x + 0.46, -0.2, name, ha="center", va="bottom", fontsize=8)
            name = f"layers {ranges(layers[pp])}\n" if dp == 0 else ""
            name += f"pp {pp}  dp {dp}" if layout.pp > 1 else f"dp {dp}"
            axes.text(-0.15, y + 0.44, name, ha="right", va="center")
        axes.set(title="Where ranks stand", xlim=(-2.2, max(4.0, x + 1)), ylim=(y + 1, -1.0))
        axes.axis("off")

    size = (WIDE if columns > 4 else SMALL[0], 0.6 + 0.32 * (rows + 0.5 * layout.pp))
    left_out = layout.world_size - columns * rows
    more = f" {left_out:,} more ranks are not drawn." if left_out else ""
    about = f"A box is a rank; a row shares a part of the batch, a colour the same layers.{more}"
    return chart(draw, "Where ranks stand", about, size)


def _box(axes: Axes, x: float, y: float, width: float, height: float, **style) -> None:
    axes.add_patch(Rectangle((x, y), width, height, **{"linewidth": 0} | style))


def ranges(numbers: Sequence[int]) -> str:
    """0-3, 8-11: consecutive numbers together, as a rank with several chunks has several groups."""
    pairs = groupby(enumerate(sorted(numbers)), lambda pair: pair[1] - pair[0])
    groups = [[number for _, number in group] for _, group in pairs]
    return ", ".join(f"{g[0]}-{g[-1]}" if len(g) > 1 else str(g[0]) for g in groups)


def traffic_picture(traffic: Mapping[tuple[int, int], float], ranks: int, step: int) -> str:
    """Bytes from each rank, a row, to each rank, a column: the darker, the more."""
    size, largest = min(ranks, MOST_RANKS), max(traffic.values())
    unit, name = unit_for(largest)

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot(aspect="equal")
        for sender, receiver in product(range(size), repeat=2):
            square = receiver - 0.5, sender - 0.5, 1, 1
            if sender == receiver:
                _box(axes, *square, color=EMPTY)
            elif sent := traffic.get((sender, receiver)):
                _box(axes, *square, color=COLOURS[0], alpha=0.12 + 0.5 * sent / largest)
                if size <= 8:
                    text = f"{sent / unit:.3g}" if sent >= unit / 100 else "<.01"
                    axes.text(receiver, sender, text, **CENTRED, fontsize=7)
        axes.set(xlim=(-0.5, size - 0.5), ylim=(size - 0.5, -0.5))
        axes.set(xlabel="to rank", ylabel="from rank", title=f"Sent in step {step} ({name})")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(MaxNLocator(min(size, 8), integer=True))

    how = "As if every collective were a ring: what a rank sends goes to its neighbour on the axis."
    more = f" The first {size} of {ranks:,} ranks." if size < ranks else ""
    return chart(draw, "Who sends to whom", how + more, (SMALL[0], 3.2))


def unit_for(size: float) -> tuple[float, str]:
    """The unit in which `size` bytes are a number of at least 1."""
    units = [(1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "bytes")]
    return next((unit, name) for unit, name in units if size >= unit or unit == 1)


def memory_picture(planned: Sequence[RankMemory], measured: Sequence[float]) -> str:
    """A bar for each pipeline rank, by part; marks where ranks of that stage were fullest."""
    count, largest = min(len(planned), MOST_ROWS), max(memory.total for memory in planned)
    unit, name = unit_for(largest)
    # Of a small model on a CPU, torch itself takes most: then bars would be too short to see.
    fits = max(measured) <= 3 * largest
    limit = max(largest, *measured) / unit if fits else largest / unit

    def draw(figure: Figure) -> None:
        axes, left = figure.add_subplot(), [0.0] * count
        for part, colour in zip(RankMemory._fields, COLOURS, strict=False):
            sizes = [getattr(memory, part) / unit for memory in planned[:count]]
            label = part.replace("_", " ")
            axes.barh(range(count), sizes, 0.6, left=left, color=colour, label=label)
            left = [a + b for a, b in zip(left, sizes, strict=True)]
        if fits:
            peaks = [peak / unit for peak in measured[:count]]
            style = {"color": INK, "marker": "D", "linestyle": "none", "markersize": 5}
            axes.plot(peaks, range(len(peaks)), **style, label="measured peak")
        axes.set(title="Memory", xlabel=name, ylabel="pipeline rank", xlim=(0, 1.05 * limit))
        axes.set(ylim=(count - 0.5, -0.5), yticks=range(count))
        axes.grid(axis="x")
        figure.legend(loc="outside lower center", ncols=2)

    about = "Bars: planned. Diamonds: the fullest rank of the stage."
    if not fits:
        about = f"Planned. Measured: {max(measured) / unit:,.0f} {name}, far to the right."
    return chart(draw, "Memory by part", about, (SMALL[0], 1.9 + 0.35 * count))


MOST_SPANS = 3000


def pipeline_picture(timelines: dict[str, Timeline], unit: str = "ms", scale: float = 1e3) -> str:
    """Timelines below each other, on one time scale; `scale` of a timeline's units are one."""
    longest = max(timeline.makespan for timeline in timelines.values()) / scale
    ranks = max(timeline.num_ranks for timeline in timelines.values())
    present = {span.action.kind for timeline in timelines.values() for span in timeline.spans}
    colour_of = dict(zip((kind for kind in Kind if kind in present), COLOURS, strict=False))

    def draw(figure: Figure) -> None:
        all_axes = figure.subplots(len(timelines), sharex=True, squeeze=False)[:, 0]
        for axes, (name, timeline) in zip(all_axes, timelines.items(), strict=True):
            bubble = sum(map(timeline.bubble, range(timeline.num_ranks))) / timeline.num_ranks
            title = f"{name}: {timeline.makespan / scale:.4g} {unit}, bubble {bubble:.1%}"
            axes.set(title=title, ylabel="rank", xlim=(0, longest))
            _draw_timeline(axes, timeline, scale, colour_of)
        all_axes[-1].set_xlabel(f"time ({unit})")
        names = [*(kind.name.lower() for kind in colour_of), "bubble"]
        handles = [Rectangle((0, 0), 1, 1, color=c) for c in (*colour_of.values(), EMPTY)]
        figure.legend(handles, names, loc="outside lower center", ncols=4)

    height = 0.7 + len(timelines) * (0.45 + 0.24 * ranks)
    about = "A number is a micro-batch; paler is a later chunk of the rank's layers."
    if max(len(timeline.spans) for timeline in timelines.values()) > MOST_SPANS:
        about += f" Only the first {MOST_SPANS:,} of each are drawn."
    return chart(draw, "The pipeline in time", about, (WIDE, height))


def _draw_timeline(axes: Axes, timeline: Timeline, scale: float, colour_of: dict) -> None:
    for rank in range(timeline.num_ranks):
        _box(axes, 0, rank - 0.45, timeline.makespan / scale, 0.9, color=EMPTY)
    spans = sorted(timeline.spans, key=lambda span: span.start)
    for rank, action, start, end in spans[:MOST_SPANS]:
        left, width = (start - spans[0].start) / scale, (end - start) / scale
        style = {"facecolor": colour_of[action.kind], "edgecolor": INK, "linewidth": 0.4}
        _box(axes, left, rank - 0.45, width, 0.9, **style, alpha=1 / (1 + 0.5 * action.chunk))
        label = str(action.micro_batch)
        if width / axes.get_xlim()[1] * 75 > 1 + len(label):  # some 75 digits fit side by side
            axes.text(left + width / 2, rank, label, **CENTRED, fontsize=8, color=ON_COLOUR)
    axes.set_ylim(timeline.num_ranks - 0.5, -0.5)
    axes.set_yticks(range(timeline.num_ranks)[:: math.ceil(timeline.num_ranks / 16)])
    axes.tick_params(axis="y", length=0)
    axes.spines[["left"]].set_visible(False)
    axes.grid(axis="x", color=GRID)
