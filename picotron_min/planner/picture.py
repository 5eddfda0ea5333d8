"""Draws predictions beside published speeds: both axes logarithmic, with 90% intervals, as SVG."""

import math
from collections.abc import Sequence
from html import escape

from picotron_min.planner.validate import Run

SIZE, LEFT, TOP = 560, 60, 34  # pixels of the square, and of what is beside it
LEAST, MOST = 10, 100_000  # tokens/s of a GPU
COLOURS = {"dense, bf16": "#0072B2", "dense, 8 bits": "#D55E00"}
COLOURS |= {"mixtures, bf16": "#009E73", "mixtures, 8 bits": "#CC79A7"}


def draw(runs: Sequence[Run]) -> str:
    """All counted runs: the published speed to the right, the predicted one upwards."""
    lines = ['<path d="M{} {}L{} {}" stroke="#888" fill="none"/>']
    lines[0] = lines[0].format(*point(LEAST, LEAST), *point(MOST, MOST))
    for power in range(round(math.log10(LEAST)), round(math.log10(MOST)) + 1):
        x, y = point(10**power, 10**power)
        lines.append(f'<path d="M{x} {TOP}V{TOP + SIZE}M{LEFT} {y}H{LEFT + SIZE}" stroke="#8884"/>')
        number, below = f"{10**power:,}</text>", TOP + SIZE + 16
        lines.append(f'<text x="{x}" y="{below}" text-anchor="middle">{number}')
        lines.append(f'<text x="{LEFT - 6}" y="{y + 4}" text-anchor="end">{number}')
    for run in (run for run in runs if run.use == "counted"):
        x, y = point(run.measured, run.predicted)
        ends = "V".join(str(point(1, end)[1]) for end in run.interval)
        lines.append(f'<g stroke="{COLOURS[run.kind]}" fill="{COLOURS[run.kind]}">')
        lines.append(f'<path d="M{x} {ends}" opacity="0.4"/><circle cx="{x}" cy="{y}" r="2"/>')
        lines.append(f"<title>{escape(run.name)}: {run.error:+.1%}</title></g>")
    for i, (kind, colour) in enumerate(COLOURS.items()):
        lines.append(f'<text x="{LEFT + 10}" y="{TOP + 20 + 16 * i}" fill="{colour}">{kind}</text>')
    title = "Predicted above published tokens/s of a GPU, with 90% intervals"
    lines.append(f'<text x="{LEFT}" y="20">{title}</text>')
    width, height = LEFT + SIZE + 30, TOP + SIZE + 26
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"'
    style = 'font-family="sans-serif" font-size="12" fill="#777"'
    return "\n".join([f"{head} {style}>", *lines, "</svg>", ""])


def point(right: float, up: float) -> tuple[float, float]:
    """Pixels of two speeds."""
    x, y = (SIZE * math.log(v / LEAST) / math.log(MOST / LEAST) for v in (right, up))
    return round(LEFT + x, 1), round(TOP + SIZE - y, 1)
