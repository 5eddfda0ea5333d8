"""What each rank of a ring computes of a row, without and with documents, as `ring_plan` has it.

`python -m tests.ring_picture docs/documents.svg` draws the picture of extensions/documents.
"""

import sys
from pathlib import Path

from picotron_min.extensions.documents.rectangles import Documents, ring_plan

WIDTH, CELL, SIDE = 4, 8, 256  # tokens of a piece; pixels of a token, and of a row of 32
COLOURS = ("#7db4f0", "#f2a65a", "#8fd19e", "#c8a2e0")  # of ranks
RANKS = len(COLOURS)
ROWS = {"one document": (32,), "documents of 7, 3, 14, 2 and 6 tokens": (7, 3, 14, 2, 6)}


def picture() -> str:
    panels = [panel(*row, left) for row, left in zip(ROWS.items(), (24, 336), strict=True)]
    note = "Rows are queries, columns keys, each with its rank; then pairs of a query and a key"
    size, font = 'width="648" height="352"', 'font-family="sans-serif" font-size="11"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} {font}>'
    return "\n".join(
        [head, f'<rect {size} rx="6" fill="#ffffff"/>', *panels, text(24, 340, note), "</svg>\n"]
    )


def panel(title: str, lengths: tuple[int, ...], left: int) -> str:
    shapes = [f'<g transform="translate({left} 44)">']
    shapes.append(f'<path d="M0 0L{SIDE} {SIDE}H0z" fill="#e6e9ed"/>')
    pairs = [0] * RANKS
    for rank, colour in enumerate(COLOURS):
        path = ""
        for source, found in enumerate(ring_plan(Documents((lengths,)), rank, RANKS, WIDTH)):
            for (*_, queries), (*_, keys), is_causal in found:
                x, y = CELL * places(source)[keys.start], CELL * places(rank)[queries.start]
                n, m = queries.stop - queries.start, keys.stop - keys.start
                box = f"h{CELL * m}v{CELL * n}"
                path += f"M{x} {y}{f'h{CELL}v{CELL}' * n if is_causal else box}H{x}z"
                pairs[rank] += n * (n + 1) // 2 if is_causal else n * m
        shapes.append(f'<path fill="{colour}" stroke="#ffffff" d="{path}"/>')
    for rank in range(RANKS):
        for middle in (CELL * (places(rank)[i] + WIDTH // 2) for i in (0, WIDTH)):
            shapes += [text(middle - 3, -6, rank), text(-14, middle + 4, rank)]
    keys = (f'<tspan fill="{c}">■</tspan> rank {r}: {pairs[r]}' for r, c in enumerate(COLOURS))
    shapes += [text(0, -24, title), text(0, SIDE + 20, " &#160;".join(keys)), "</g>"]
    return "\n".join(shapes)


def places(rank: int) -> list[int]:
    """Of a rank's tokens in the row."""
    pieces = rank * WIDTH, (2 * RANKS - 1 - rank) * WIDTH
    return [start + i for start in pieces for i in range(WIDTH)]


def text(x: int, y: int, content: object) -> str:
    return f'<text x="{x}" y="{y}" fill="#1f2328">{content}</text>'


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(picture(), encoding="utf-8")
