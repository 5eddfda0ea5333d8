"""Schedules as a picture: a row is a rank, a box an action with the number of its micro-batch.

`python -m picotron_min.runtime.draw --svg docs/schedules.svg` writes the README's.
"""

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from picotron_min.extensions.schedules.registry import SCHEDULES, plan_on_paper
from picotron_min.extensions.schedules.simulator import Timeline
from picotron_min.pipeline_schedule import Kind

LEFT, FORWARD, ROW, TITLE = 19, 14, 14, 24  # pixels: margin, a forward, a rank, a schedule's title
PAPER, IDLE, INK = "#ffffff", "#e6e9ed", "#1f2328"  # readable on light and on dark pages
COLOURS = {Kind.FORWARD: "#7db4f0", Kind.BACKWARD: "#f2a65a", Kind.WEIGHT: "#8fd19e"}
NAMES = ("forward", "backward", "gradients of weights, where backward is cut in two")
NOTE = "A row is a rank, a number a micro-batch; pale: the second chunk of its layers"


def write_picture(svg: str, engine="", stages=4, microbatches=8, chunks=0) -> None:
    """Write one schedule, or all of them on one time scale, to a file; 0: their usual chunks."""
    shapes, top, width = [], 0, 500.0
    for name in [engine] if engine else SCHEDULES:
        sizes, _, timeline = plan_on_paper(name, stages, microbatches, chunks)
        each = (SCHEDULES[name].live_activations(rank, *sizes) for rank in range(stages))
        live = max(each) / sizes[-1]
        about = f"bubble {timeline.bubble(0):.1%}, activations of at most {live:g} micro-batches"
        shapes.append(_text(LEFT, top + 18, f"<tspan font-weight='bold'>{name}</tspan>: {about}"))
        shapes += _timeline(timeline, FORWARD / sizes[-1], top + TITLE)
        width = max(width, 2 * LEFT + timeline.makespan * FORWARD / sizes[-1])
        top += TITLE + ROW * stages
    keys = zip(COLOURS.values(), NAMES, strict=True)
    legend = [f"<tspan fill='{colour}'>■</tspan> {name} &#160;" for colour, name in keys]
    shapes += [_text(LEFT, top + 20, " ".join(legend)), _text(LEFT, top + 36, NOTE)]
    size, font = f'width="{width:g}" height="{top + 46}"', 'font-family="sans-serif" font-size="11"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} {font}>'
    panel = f'<rect {size} rx="6" fill="{PAPER}"/>'
    Path(svg).write_text("\n".join([head, panel, *shapes, "</svg>\n"]), encoding="utf-8")


def _timeline(timeline: Timeline, scale: float, top: float) -> Iterator[str]:
    """Idle time, and over it the actions: of each kind and chunk one shape of boxes."""
    size = f'width="{timeline.makespan * scale:g}" height="{ROW * timeline.num_ranks - 2}"'
    yield f'<rect x="{LEFT}" y="{top}" {size} fill="{IDLE}"/>'
    boxes, numbers = defaultdict(str), []
    for rank, action, start, end in timeline.spans:
        if action.peer is None:  # it computes
            x, y, width = LEFT + start * scale, top + ROW * rank, (end - start) * scale
            box = f"M{x:g} {y:g}h{width - 1:g}v{ROW - 2}h{1 - width:g}z"
            boxes[action.kind, action.chunk] += box
            if width >= 7 * len(str(action.micro_batch)):
                numbers.append(_text(x + width / 2, y + 10, action.micro_batch))
    for (kind, chunk), path in boxes.items():
        yield f'<path fill="{COLOURS[kind]}" opacity="{1 / (1 + chunk):g}" d="{path}"/>'
    yield "\n".join(['<g text-anchor="middle" font-size="9">', *numbers, "</g>"])


def _text(x: float, y: float, text: object) -> str:
    return f'<text x="{x:g}" y="{y:g}" fill="{INK}">{text}</text>'
