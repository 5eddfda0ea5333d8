"""The report in a browser, where there is one: Chromium without a window."""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

from picotron_min.report.__main__ import main
from tests.recorded_runs import write_run

NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next(filter(None, map(shutil.which, NAMES)), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason=f"none of {', '.join(NAMES)} is installed")

MEASURE = """
const box = element => element.getBoundingClientRect();
const colour = (element, name) => getComputedStyle(element)[name];
const sizes = [...document.querySelectorAll("svg[role=img]")].map(svg => ({
  name: svg.getAttribute("aria-label"), width: box(svg).width, height: box(svg).height,
  letters: Math.min(...[...svg.querySelectorAll("text")].map(text => box(text).height)),
  ink: colour(svg.querySelector("text"), "fill"),
}));
const page = {
  sizes, sideways: document.documentElement.scrollWidth - document.documentElement.clientWidth,
  width: document.documentElement.clientWidth, paper: colour(document.body, "backgroundColor"),
};
const result = parent.document.body.appendChild(parent.document.createElement("pre"));
result.textContent = JSON.stringify(page);
"""


class View(NamedTuple):
    measured: dict
    console: list[str]


def view(page: Path, width: int, is_dark: bool) -> View:
    """What the browser makes of the page, measured by a script that is added to a copy of it.

    The copy is in a frame: a window would be at least 500 pixels wide.
    """
    text = page.read_text().replace("</body>", f"<script>{MEASURE}</script></body>")
    text = text.replace("default-src 'none';", "default-src 'none'; script-src 'unsafe-inline';")
    frame = f'<iframe srcdoc="{html.escape(text)}" style="width: {width}px; border: 0"></iframe>'
    copy = page.with_name("measured.html")
    copy.write_text(f'<!DOCTYPE html><meta name="color-scheme" content="light dark">{frame}')
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    command += ["--dump-dom", "--window-size=1400,900"]
    command += [f"--user-data-dir={page.parent / 'profile'}"]
    command += [f"--blink-settings=preferredColorScheme={0 if is_dark else 1}"]
    command += ["--enable-logging=stderr", copy.as_uri()]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    found = re.search(r"<pre>(.*?)</pre>", result.stdout, re.DOTALL)
    console = [line for line in result.stderr.splitlines() if ":CONSOLE" in line]
    return View(json.loads(html.unescape(found[1])), console)


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    write_run(folder)
    main([str(folder)])
    return folder / "report.html"


@pytest.mark.parametrize(("width", "is_dark"), [(1280, False), (390, True)])
def test_a_browser_shows_every_picture_and_reports_nothing(page, width, is_dark):
    measured, console = view(page, width, is_dark)
    assert console == []
    assert len(measured["sizes"]) == 7 and measured["width"] == width
    assert measured["sideways"] == 0, "only pictures and tables scroll, in their own boxes"
    ink, paper = ("rgb(232, 232, 238)", "rgb(22, 22, 26)")
    if not is_dark:
        ink, paper = ("rgb(27, 27, 31)", "rgb(255, 255, 255)")
    assert measured["paper"] == paper
    for picture in measured["sizes"]:
        assert picture["width"] >= 250 and picture["height"] >= 80, picture
        assert picture["letters"] >= 8 and picture["ink"] == ink, picture
