"""Pages of HTML from titles, tables and pictures: one file that opens anywhere, offline."""

from collections.abc import Iterable, Sequence
from html import escape
from itertools import product
from pathlib import Path
from string import Template

from picotron_min.report.charts import COLOURS, DASHES


class Cell(str):
    """A number of a table as text; `data` also has it in full, for who wants to compute."""

    data = ""

    @classmethod
    def of(cls, value: float | None, form: str) -> "Cell":
        cell = cls("n/a" if value is None else format(value, form))
        cell.data = "" if value is None else f' data-value="{value!r}"'
        return cell


def cells(form: str, *values: float | None) -> list[Cell]:
    return [Cell.of(value, form) for value in values]


def table(head: Sequence[str], rows: Iterable[Sequence[str]], caption: str = "") -> str:
    """The first column names its row. Wide tables scroll inside a box of their own."""
    rows = list(rows)
    # A title stands where its column's content does: numbers to the right.
    columns = zip(head, next(iter(rows), head), strict=False)
    top = "".join(f'<th scope="col"{_side(cell)}>{escape(name)}</th>' for name, cell in columns)
    body = "\n".join(f"<tr>{_row(*row)}</tr>" for row in rows)
    head = f"<thead><tr>{top}</tr></thead>" if top else ""
    title = f'<p class="caption">{escape(caption)}</p>' if caption else ""
    return f'{title}<div class="scroll"><table>{head}<tbody>{body}</tbody></table></div>'


def _row(name: str, *cells: str) -> str:
    pairs = ((_side(cell) + getattr(cell, "data", ""), escape(cell)) for cell in cells)
    content = "".join(f"<td{attributes}>{text}</td>" for attributes, text in pairs)
    return f'<th scope="row">{escape(name)}</th>{content}'


def _side(cell: str) -> str:
    return ' class="number"' if isinstance(cell, Cell) else ""


def section(title: str, *parts: str) -> str:
    return f"<section><h2>{escape(title)}</h2>\n{''.join(parts)}</section>"


def paragraph(text: str) -> str:
    return f"<p>{escape(text)}</p>"


def legend(names: Sequence[str]) -> str:
    """The line of each run, by which all charts of a comparison draw it."""
    items = ""
    for name, (dash, colour) in zip(names, product(DASHES, range(len(COLOURS))), strict=False):
        style = f"border-top: 3px {dash} var(--series-{colour})"
        items += f'<li><span class="line" style="{style}"></span> {escape(name)}</li>'
    return f'<ul class="legend">{items}</ul>'


def gallery(*figures: str) -> str:
    return f'<div class="pictures">{"".join(figures)}</div>'


def page(title: str, notes: Sequence[str], *sections: str) -> str:
    """The whole document. Its policy keeps it from loading anything, even by a slip."""
    items = "".join(f"<li>{escape(note)}</li>" for note in notes)
    content = f'<ul class="notes">{items}</ul>' * bool(notes) + "".join(sections)
    template = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    return Template(template).substitute(title=escape(title), content=content)
