"""Pages: links, modules and tests, sizes, the map, and the picture."""

import importlib.util
import re
from pathlib import Path

import pytest

from picotron_min.report.schedules import write_schedules

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
EXTENSIONS = ROOT / "picotron_min/extensions"
EXTENSION_PAGES = sorted(EXTENSIONS.glob("*/README.md"))
PAGES = [README, *sorted((ROOT / "docs").glob("*.md")), *EXTENSION_PAGES]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_modules_and_tests_exist(page):
    text = page.read_text()
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text)
    assert [link for link in links if not (page.parent / link).exists()] == []
    modules = re.findall(r"python -m ([\w.]+)", text)
    assert [name for name in modules if importlib.util.find_spec(name) is None] == []
    tests = {path.stem for path in (ROOT / "tests").rglob("test_*.py")}
    names = {name for name in re.findall(r"\btest_\w+", text) if "NAME" not in name}
    assert names <= tests


@pytest.mark.parametrize("page", [README, *EXTENSION_PAGES], ids=name_of)
def test_a_page_fits_a_screen_or_two(page):
    lines = page.read_text().splitlines()
    assert len(lines) <= (120 if page == README else 60)
    assert [line for line in lines if len(line) > 120] == []


def test_every_extension_has_a_page_and_the_readme_links_it():
    folders = {path.parent for path in EXTENSIONS.glob("*/*.py")}
    assert {page.parent for page in EXTENSION_PAGES} == folders
    text = README.read_text()
    assert [page for page in EXTENSION_PAGES if f"({name_of(page)})" not in text] == []


def test_the_map_and_the_course_name_every_file_of_the_core_and_minutes_add_up():
    rows = re.findall(r"^\|[^|]*\| (\d+) \| \[(\w+)\]", README.read_text(), re.MULTILINE)
    core = {path.stem for path in (ROOT / "picotron_min").glob("*.py")} - {"__init__"}
    assert {name for _, name in rows} == core | {"train"}
    assert f" {sum(int(minutes) for minutes, _ in rows)} minutes" in README.read_text()
    text = (ROOT / "docs/course.md").read_text()
    assert core <= set(re.findall(r"\]\(\.\./picotron_min/(\w+)\.py\)", text))


def test_the_picture_of_schedules_is_what_its_command_draws(tmp_path):
    drawn = tmp_path / "schedules.svg"
    write_schedules(drawn)
    assert words(drawn) == words(ROOT / "docs/schedules.svg")


def words(svg: Path) -> list[str]:
    """All but the places of things, which are another matplotlib's."""
    return re.findall(r">([^<>]*\w[^<>]*)</text>", svg.read_text())
