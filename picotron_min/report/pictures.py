"""The pictures of a layout: where ranks are, who sends to whom, memory, the pipeline in time."""

import math
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from picotron_min.extensions.schedules.simulator import Timeline
from picotron_min.extensions.settings import Layout
from picotron_min.pipeline_schedule import Kind
from picotron_min.planner.memory import RankMemory
from picotron_min.report.charts import COLOURS, EMPTY, GRID, INK, ON_COLOUR, SMALL, WIDE, chart
from picotron_min.report.rank_traffic import ranks_of_axis

MOST_ROWS, MOST_COLUMNS = 16, 16


def rank_grid(layout: Layout, layers: list[list[int]]) -> str:
    """A box a rank: columns are (cp, tp), rows are (pp, dp), a colour a pipeline stage."""
    columns, rows = layout.cp * layout.tp, layout.pp * layout.dp
    shown_columns, shown_rows = min(columns, MOST_COLUMNS), min(rows, MOST_ROWS)

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        for row in range(shown_rows):
            pp, dp = divmod(row, layout.dp)
            y = row + 0.5 * pp  # a gap between stages
            for column in range(shown_columns):
                cp, tp = divmod(column, layout.tp)
                x = column + 0.25 * cp
                colour = COLOURS[pp % len(COLOURS)]
                axes.add_patch(Rectangle((x, y), 0.92, 0.88, color=colour, alpha=0.3, linewidth=0))
                label = _rank_label(layout, row * columns + column)
                axes.text(x + 0.46, y + 0.44, label, ha="center", va="center")
                if row == 0:
                    name = f"tp {tp}" if layout.cp == 1 else f"cp {cp}\ntp {tp}"
                    axes.text(x + 0.46, -0.2, name, ha="center", va="bottom", fontsize=8)
            axes.text(-0.15, y + 0.44, _row_name(layout, layers, pp, dp), ha="right", va="center")
        width = shown_columns + 0.25 * ((shown_columns - 1) // layout.tp)
        height = shown_rows + 0.5 * ((shown_rows - 1) // layout.dp)
        axes.set(xlim=(-2.2, max(4.0, width)), ylim=(height, -1.0))
        axes.set_title("Where ranks stand")
        axes.axis("off")

    is_wide = shown_columns > 4
    size = (WIDE if is_wide else SMALL[0], 0.6 + 0.32 * (shown_rows + 0.5 * layout.pp))
    left_out = layout.world_size - shown_columns * shown_rows
    more = f" {left_out:,} more ranks are not drawn." if left_out else ""
    about = f"A box is a rank; a row shares a part of the batch, a colour the same layers.{more}"
    return chart(draw, "Where ranks stand", about, size)


def _row_name(layout: Layout, layers: list[list[int]], pp: int, dp: int) -> str:
    stage = f"pp {pp}  " if layout.pp > 1 else ""
    return f"layers {ranges(layers[pp])}\n{stage}dp {dp}" if dp == 0 else f"{stage}dp {dp}"


def ranges(numbers: Sequence[int]) -> str:
    """0-3, 8-11: consecutive numbers together, as a rank with several chunks has several groups."""
    groups: list[list[int]] = []
    for number in sorted(numbers):
        if groups and groups[-1][-1] == number - 1:
            groups[-1].append(number)
        else:
            groups.append([number])
    return ", ".join(f"{g[0]}-{g[-1]}" if len(g) > 1 else str(g[0]) for g in groups)


def _rank_label(layout: Layout, rank: int) -> str:
    """Its number and, with expert parallelism, its place among the ranks that share experts."""
    if layout.ep == 1:
        return str(rank)
    return f"{rank}\nep {ranks_of_axis(layout, 'ep', rank).index(rank)}"


def traffic_picture(traffic: Mapping[tuple[int, int], float], ranks: int, step: int) -> str:
    """Bytes from each rank, a row, to each rank, a column: the darker, the more."""
    size, largest = min(ranks, 64), max(traffic.values())
    unit, name = unit_for(largest)

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot(aspect="equal")
        for sender in range(size):
            for receiver in range(size):
                sent = traffic.get((sender, receiver), 0.0)
                if not sent and sender != receiver:
                    continue
                colour, strength = COLOURS[0], 0.12 + 0.5 * sent / largest
                if sender == receiver:
                    colour, strength = EMPTY, 1.0
                corner = receiver - 0.5, sender - 0.5
                axes.add_patch(Rectangle(corner, 1, 1, color=colour, alpha=strength, linewidth=0))
                if sent and size <= 8:
                    text = f"{sent / unit:.3g}" if sent >= unit / 100 else "<.01"
                    axes.text(receiver, sender, text, ha="center", va="center", fontsize=7)
        axes.set(xlim=(-0.5, size - 0.5), ylim=(size - 0.5, -0.5))
        axes.set(xlabel="to rank", ylabel="from rank", title=f"Sent in step {step} ({name})")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(MaxNLocator(min(size, 8), integer=True))

    more = f" The first 64 of {ranks:,} ranks." if size < ranks else ""
    about = (
        "As if every collective were a ring: what a rank sends goes to its neighbour on the axis."
    )
    return chart(draw, "Who sends to whom", about + more, (SMALL[0], 3.2))


def unit_for(size: float) -> tuple[float, str]:
    """The unit in which so many bytes are a number of at least 1."""
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
        axes = figure.add_subplot()
        left = [0.0] * count
        for i, part in enumerate(RankMemory._fields):
            sizes = [getattr(memory, part) / unit for memory in planned[:count]]
            label = part.replace("_", " ")
            axes.barh(range(count), sizes, 0.6, left=left, color=COLOURS[i], label=label)
            left = [a + b for a, b in zip(left, sizes, strict=True)]
        if fits:
            peaks = [peak / unit for peak in measured[:count]]
            style = {"color": INK, "marker": "D", "linestyle": "none", "markersize": 5}
            axes.plot(peaks, range(len(peaks)), **style, label="measured peak")
        axes.set(title="Memory", xlabel=name, ylabel="pipeline rank", xlim=(0, 1.05 * limit))
        axes.set_ylim(count - 0.5, -0.5)
        axes.set_yticks(range(count))
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
            _draw_timeline(axes, timeline, scale, longest, colour_of)
        all_axes[-1].set_xlabel(f"time ({unit})")
        names = [kind.name.lower() for kind in colour_of]
        colours = [*colour_of.values(), EMPTY]
        handles = [Rectangle((0, 0), 1, 1, color=colour) for colour in colours]
        figure.legend(handles, [*names, "bubble"], loc="outside lower center", ncols=4)

    height = 0.7 + len(timelines) * (0.45 + 0.24 * ranks)
    about = "A number is a micro-batch; paler is a later chunk of the rank's layers."
    if max(len(timeline.spans) for timeline in timelines.values()) > MOST_SPANS:
        about += f" Only the first {MOST_SPANS:,} of each are drawn."
    return chart(draw, "The pipeline in time", about, (WIDE, height))


def _draw_timeline(
    axes: Axes, timeline: Timeline, scale: float, longest: float, colour_of: Mapping[Kind, str]
) -> None:
    origin = min(span.start for span in timeline.spans)
    for rank in range(timeline.num_ranks):
        width = timeline.makespan / scale
        axes.add_patch(Rectangle((0, rank - 0.45), width, 0.9, color=EMPTY, linewidth=0))
    spans = sorted(timeline.spans, key=lambda span: span.start)
    for rank, action, start, end in spans[:MOST_SPANS]:
        left, width = (start - origin) / scale, (end - start) / scale
        style = {"facecolor": colour_of[action.kind], "edgecolor": INK, "linewidth": 0.4}
        style["alpha"] = 1 / (1 + 0.5 * action.chunk)
        axes.add_patch(Rectangle((left, rank - 0.45), width, 0.9, **style))
        label = str(action.micro_batch)
        if width / longest * 90 > 1 + len(label):  # some 90 digits fit side by side
            style = {"ha": "center", "va": "center", "fontsize": 8, "color": ON_COLOUR}
            axes.text(left + width / 2, rank, label, **style)
    axes.set_ylim(timeline.num_ranks - 0.5, -0.5)
    axes.set_yticks(range(timeline.num_ranks)[:: math.ceil(timeline.num_ranks / 16)])
    axes.tick_params(axis="y", length=0)
    axes.spines[["left"]].set_visible(False)
    axes.grid(axis="x", color=GRID)
