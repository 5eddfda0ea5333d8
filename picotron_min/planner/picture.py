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
    marks = ['<path d="M{} {}L{} {}" stroke="#888" fill="none"/>']
    marks[0] = marks[0].format(*point(LEAST, LEAST), *point(MOST, MOST))
    for run in (run for run in runs if run.use == "counted"):
        x, y = point(run.measured, run.predicted)
        ends = "V".join(str(point(1, end)[1]) for end in run.interval)
        marks.append(f'<g stroke="{COLOURS[run.kind]}" fill="{COLOURS[run.kind]}">')
        marks.append(f'<path d="M{x} {ends}" opacity="0.4"/><circle cx="{x}" cy="{y}" r="2"/>')
        marks.append(f"<title>{escape(run.name)}: {run.error:+.1%}</title></g>")
    title = "Predicted above published tokens/s of a GPU, with 90% intervals"
    return log_log(title, LEAST, MOST, marks, COLOURS)


def log_log(
    title: str, least: float, most: float, marks: Sequence[str], colours: dict[str, str]
) -> str:
    """A square with two logarithmic axes from `least` to `most`, and marks at `point`s of it."""
    lines = []
    for power in range(round(math.log10(least)), round(math.log10(most)) + 1):
        x, y = point(10**power, 10**power, least, most)
        lines.append(f'<path d="M{x} {TOP}V{TOP + SIZE}M{LEFT} {y}H{LEFT + SIZE}" stroke="#8884"/>')
        number, below = f"{10**power:,}</text>", TOP + SIZE + 16
        lines.append(f'<text x="{x}" y="{below}" text-anchor="middle">{number}')
        lines.append(f'<text x="{LEFT - 6}" y="{y + 4}" text-anchor="end">{number}')
    lines += marks
    for i, (kind, colour) in enumerate(colours.items()):
        lines.append(f'<text x="{LEFT + 10}" y="{TOP + 20 + 16 * i}" fill="{colour}">{kind}</text>')
    lines.append(f'<text x="{LEFT}" y="20">{title}</text>')
    width, height = LEFT + SIZE + 30, TOP + SIZE + 26
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"'
    style = 'font-family="sans-serif" font-size="12" fill="#777"'
    return "\n".join([f"{head} {style}>", *lines, "</svg>", ""])


def point(right: float, up: float, least: float = LEAST, most: float = MOST) -> tuple[float, float]:
    """Pixels of two values."""
    x, y = (SIZE * math.log(v / least) / math.log(most / least) for v in (right, up))
    return round(LEFT + x, 1), round(TOP + SIZE - y, 1)
