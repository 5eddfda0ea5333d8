"""Pages of HTML from titles, tables and pictures: one file that opens anywhere, offline."""

from collections.abc import Iterable, Sequence
from html import escape

from picotron_min.report.charts import DASHES, PALETTE


class Cell(str):
    """A number of a table as text; the page also has `value`, the number in full."""

    value: float | None = None

    @classmethod
    def of(cls, value: float | None, form: str = ".5g") -> "Cell":
        if value is None:
            return cls("n/a")
        cell = cls(format(value, form))
        cell.value = value
        return cell


def cells(form: str, *values: float | None) -> list[Cell]:
    return [Cell.of(value, form) for value in values]


def table(head: Sequence[str], rows: Iterable[Sequence[str]], caption: str = "") -> str:
    """The first column names its row. Wide tables scroll inside a box of their own."""
    rows = list(rows)
    # A title stands where its column's content does: numbers to the right.
    columns = zip(head, (*rows, head)[0], strict=False)
    top = "".join(f'<th scope="col"{_side(cell)}>{escape(name)}</th>' for name, cell in columns)
    body = "\n".join(f"<tr>{_row(*row)}</tr>" for row in rows)
    head = f"<thead><tr>{top}</tr></thead>" if top else ""
    title = f'<p class="caption">{escape(caption)}</p>' if caption else ""
    return f'{title}<div class="scroll"><table>{head}<tbody>{body}</tbody></table></div>'


def _row(name: str, *cells: str) -> str:
    content = "".join(f"<td{_side(cell)}{_full(cell)}>{escape(cell)}</td>" for cell in cells)
    return f'<th scope="row">{escape(name)}</th>{content}'


def _side(cell: str) -> str:
    return ' class="number"' if isinstance(cell, Cell) else ""


def _full(cell: str) -> str:
    value = getattr(cell, "value", None)
    return "" if value is None else f' data-value="{value!r}"'


def section(title: str, *parts: str) -> str:
    return f"<section><h2>{escape(title)}</h2>\n{''.join(parts)}</section>"


def paragraph(text: str) -> str:
    return f"<p>{escape(text)}</p>"


def legend(names: Sequence[str]) -> str:
    """The line of each run, by which all charts of a comparison draw it."""
    items = []
    for i, name in enumerate(names):
        dash, colour = [*DASHES][i // len(PALETTE)], f"var(--series-{i % len(PALETTE)})"
        line = f'<span class="line" style="border-top: 3px {dash} {colour}"></span>'
        items.append(f"<li>{line} {escape(name)}</li>")
    return f'<ul class="legend">{"".join(items)}</ul>'


def gallery(*figures: str) -> str:
    return f'<div class="pictures">{"".join(figures)}</div>'


def notes(sentences: Sequence[str]) -> str:
    items = "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences)
    return f'<ul class="notes">{items}</ul>' if items else ""


def page(title: str, *parts: str) -> str:
    """The whole document. Its policy keeps it from loading anything, even by a slip."""
    light, dark = (
        " ".join(f"--series-{i}: {shades[shade]};" for i, shades in enumerate(PALETTE.values()))
        for shade in (0, 1)
    )
    style = STYLE.replace("LIGHT;", light).replace("DARK;", dark)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<title>{escape(title)}</title>
<style>{style}</style>
</head>
<body>
<h1>{escape(title)}</h1>
{"".join(parts)}
</body>
</html>
"""


POLICY = "default-src 'none'; style-src 'unsafe-inline'"
STYLE = """
:root {
  --font: system-ui, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
  --ink: #1b1b1f; --paper: #ffffff; --quiet: #5a5a66; --grid: #dcdce2; --empty: #ececf1;
  --on-colour: #ffffff; LIGHT;
}
@media (prefers-color-scheme: dark) {
  :root {
    --ink: #e8e8ee; --paper: #16161a; --quiet: #a4a4b2; --grid: #3a3a44; --empty: #2a2a32;
    --on-colour: #000000; DARK;
  }
}
body {
  font: 15px/1.5 var(--font); color: var(--ink); background: var(--paper);
  max-width: 1200px; margin: 0 auto; padding: 1rem;
}
h1 { font-size: 1.5rem; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin-top: 2.5rem; border-bottom: 1px solid var(--grid); }
p, figcaption { color: var(--quiet); font-size: 0.87rem; max-width: 48rem; }
.notes { border-left: 4px solid var(--series-1); padding: 0.4rem 1rem 0.4rem 2rem; }
.notes li { overflow-wrap: anywhere; }
.legend { list-style: none; padding: 0; display: flex; flex-wrap: wrap; gap: 0.3rem 1.5rem; }
.legend li { overflow-wrap: anywhere; }
.line { display: inline-block; width: 2rem; vertical-align: middle; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; margin: 0.25rem 0; font-variant-numeric: tabular-nums; }
th, td { text-align: left; vertical-align: top; padding: 0.2rem 1rem 0.2rem 0; }
tr { border-bottom: 1px solid var(--grid); }
tbody th, thead th { font-weight: 600; white-space: nowrap; }
thead th { color: var(--quiet); font-size: 0.87rem; }
.number { text-align: right; white-space: nowrap; }
td:not(.number) { min-width: 9rem; }
.caption { margin: 1.25rem 0 0; }
.pictures {
  display: grid; gap: 1rem 1.5rem; align-items: start;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 340px), 1fr));
}
figure { margin: 0; max-width: 420px; min-width: 0; }
figure.wide { max-width: 800px; grid-column: 1 / -1; }
svg { display: block; width: 100%; min-width: var(--width); height: auto; }
svg * { stroke-linejoin: round; stroke-linecap: butt; }
"""
