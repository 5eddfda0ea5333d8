"""Pages: plain data and a template, which make one file that opens offline.

one_run.html, comparison.html     the words of a page, in the frame and the theme of page.html
parts.html                        how a table and a row of plots look
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined

Row = Sequence[str | float | None]  # its first cell names it; None is a number that is not known


class Picture(NamedTuple):
    svg: str
    caption: str = ""
    is_wide: bool = False


def render(template: str, **values: object) -> str:
    """The whole document; texts of a run are escaped, since they may hold any characters."""
    frame = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,  # a forgotten value is an error and no gap
        trim_blocks=True,
        lstrip_blocks=True,
    )
    frame.filters["shown"] = shown
    return frame.get_template(template).render(values)


def shown(value: str | float | None) -> str:
    """Integers whole, others with five digits; the page has all digits in `data-value`."""
    if value is None:
        return "n/a"
    if isinstance(value, str):
        return value
    return f"{value:,.0f}" if isinstance(value, int) or abs(value) >= 1e4 else f"{value:,.5g}"
