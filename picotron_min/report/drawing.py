"""Drawing: a plot as SVG that takes its colours and its font from the page that it stands in.

matplotlib draws with fixed colours; they are replaced by the page's CSS variables, which are light
or dark. Text stays text, so that it can be searched and read out.
"""

import io
import re
from collections.abc import Callable
from html import escape

import matplotlib
from cycler import cycler
from matplotlib.figure import Figure

from picotron_min.report.page import Picture

# Okabe and Ito's colours, which remain distinct to the colour-blind. page.html has two shades of
# each: the lighter ones are hard to see on white, the darker ones on black.
COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"]
# Text and axes; lines of a grid; where nothing is; text on one of the colours. matplotlib writes
# any colour as it is given, so these need only differ from each other and from COLOURS.
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
    "axes.axisbelow": True,
    "axes.formatter.limits": (-2, 4),  # larger and smaller numbers have their 1e6 at the axis
    # 18 kinds of lines; then they repeat.
    "axes.prop_cycle": cycler(linestyle=["-", "--", ":"]) * cycler(color=COLOURS),
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "lines.markersize": 3,
    "grid.color": GRID,
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "axes.titlecolor"), INK),
    **dict.fromkeys(("xtick.color", "ytick.color"), INK),
}
SMALL = 3.5, 2.4  # inches: readable without scrolling on a phone
WIDE = 6.4  # of a page that is 500 pixels wide


def picture(
    draw: Callable[[Figure], None],
    title: str,
    caption: str = "",
    size: tuple[float, float] = SMALL,
) -> Picture:
    """What `draw` draws into a figure; each title may occur once on a page."""
    with matplotlib.rc_context(STYLE):
        figure, out = Figure(figsize=size, layout="constrained"), io.StringIO()
        draw(figure)
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
    return Picture(for_page(out.getvalue(), title), caption, is_wide=size != SMALL)


def for_page(svg: str, title: str) -> str:
    """matplotlib's file as an element of a page: ids of its own, the page's colours and font."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<(metadata|style).*?</\1>", "", svg, flags=re.DOTALL)  # the page has a style
    # matplotlib counts ids from 1 in every file, and a reference finds the first of the page.
    prefix = re.sub(r"\W+", "-", title)
    svg = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{prefix}-", svg)
    svg = re.sub("#[0-9a-f]{6}", lambda m: CSS.get(m[0].upper(), m[0]), svg)
    svg = re.sub(r"'DejaVu Sans'.*?sans-serif", "var(--font)", svg)
    width, height = re.search(r'viewBox="0 0 (\S+) (\S+)"', svg).groups()  # in points
    start = f'<svg role="img" aria-label="{escape(title)}" viewBox="0 0 {width} {height}"'
    return f'{start} style="--width: {width}px">' + svg[svg.index(">") + 1 :]
