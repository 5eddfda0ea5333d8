"""Rectangles as a picture: what each rank of a ring computes of a row, without and with documents.

`python -m picotron_min.extensions.documents.picture docs/documents.svg` writes the README's.
"""

import sys
from pathlib import Path

from picotron_min.extensions.documents.rectangles import Documents, ring_plan

RANKS, WIDTH, CELL = 4, 4, 8  # of a ring; tokens of a piece; pixels of a token
ROWS = {"one document": (32,), "documents of 7, 3, 14, 2 and 6 tokens": (7, 3, 14, 2, 6)}
PAPER, IDLE, INK = "#ffffff", "#e6e9ed", "#1f2328"  # readable on light and on dark pages
COLOURS = ("#7db4f0", "#f2a65a", "#8fd19e", "#c8a2e0")  # of ranks


def write_picture(svg: str) -> None:
    side, left, top = 2 * RANKS * WIDTH * CELL, 24, 44
    shapes = []
    for title, lengths in ROWS.items():
        pairs = []
        shapes.append(f'<g transform="translate({left} {top})">')
        shapes.append(f'<path d="M0 0L{side} {side}H0z" fill="{IDLE}"/>')
        for rank, colour in enumerate(COLOURS):
            path, count = _shapes(lengths, rank)
            pairs.append(f'<tspan fill="{colour}">■</tspan> rank {rank}: {count}')
            shapes.append(f'<path fill="{colour}" stroke="{PAPER}" d="{path}"/>')
        for piece in range(2 * RANKS):
            rank, middle = min(piece, 2 * RANKS - 1 - piece), (piece + 0.5) * WIDTH * CELL
            shapes += [_text(middle - 3, -6, rank), _text(-14, middle + 4, rank)]
        shapes += [_text(0, -24, title), _text(0, side + 20, " &#160;".join(pairs)), "</g>"]
        left += side + 56
    note = "Rows are queries, columns keys, each with its rank; then pairs of a query and a key"
    shapes.append(_text(24, top + side + 40, note))
    size, font = f'width="{left}" height="{top + side + 52}"', 'font-family="sans-serif"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} {font} font-size="11">'
    panel = f'<rect {size} rx="6" fill="{PAPER}"/>'
    Path(svg).write_text("\n".join([head, panel, *shapes, "</svg>\n"]), encoding="utf-8")


def _shapes(lengths: tuple[int, ...], rank: int) -> tuple[str, int]:
    """A path round each rectangle of a rank, stairs where it is causal; and its pairs."""
    path, pairs = "", 0
    for source, found in enumerate(ring_plan(Documents((lengths,)), rank, RANKS, WIDTH)):
        for _, queries, keys, is_causal in found:
            top, left = (CELL * _place(*of) for of in ((queries, rank), (keys, source)))
            height, width = (some.stop - some.start for some in (queries, keys))
            stairs = f"h{CELL}v{CELL}" * height + f"H{left}z"
            box = f"h{CELL * width}v{CELL * height}H{left}z"
            path += f"M{left} {top}{stairs if is_causal else box}"
            pairs += height * (height + 1) // 2 if is_causal else height * width
    return path, pairs


def _place(some: slice, rank: int) -> int:
    """Where in the row the tokens of a rank begin."""
    piece, place = divmod(some.start, WIDTH)
    return (2 * RANKS - 1 - rank if piece else rank) * WIDTH + place


def _text(x: float, y: float, text: object) -> str:
    return f'<text x="{x:g}" y="{y:g}" fill="{INK}">{text}</text>'


if __name__ == "__main__":
    write_picture(*sys.argv[1:])
