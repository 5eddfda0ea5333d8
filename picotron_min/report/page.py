"""Pages: sections as plain data, and page.html, which makes them one file that opens offline."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from jinja2 import Environment, StrictUndefined


class Picture(NamedTuple):
    svg: str
    caption: str = ""
    is_wide: bool = False


class Table(NamedTuple):
    """The first cell of a row names it; None is a number that is not known."""

    columns: Sequence[str]  # titles
    rows: Sequence[Sequence[str | float | None]]
    caption: str = ""


class Section(NamedTuple):
    """In this order on the page."""

    title: str
    facts: dict[str, str] | None = None  # name -> text
    text: str = ""
    pictures: Sequence[Picture] = ()
    tables: Sequence[Table] = ()


def render(title: str, notes: Sequence[str], sections: Sequence[Section]) -> str:
    """The whole document; texts of a run are escaped, since they may hold any characters."""
    frame = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    frame.filters["shown"] = shown
    template = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    return frame.from_string(template).render(title=title, notes=notes, sections=sections)


def shown(value: str | float | None) -> str:
    """Integers whole, others with five digits; the page has all digits in `data-value`."""
    if value is None:
        return "n/a"
    if isinstance(value, str):
        return value
    return f"{value:,.0f}" if isinstance(value, int) or abs(value) >= 1e4 else f"{value:,.5g}"
