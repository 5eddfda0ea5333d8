"""The README and docs/: their links, their modules, and the reading course."""

import importlib.util
import re
from pathlib import Path

import pytest

from picotron_min.runtime import draw

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_modules_exist(page):
    text = page.read_text()
    links = re.findall(r"\]\(([^)#:]+)\)", text)
    assert [link for link in links if not (page.parent / link).exists()] == []
    modules = re.findall(r"python -m ([\w.]+)", text)
    assert [name for name in modules if importlib.util.find_spec(name) is None] == []


def test_the_course_names_every_file_and_its_minutes_add_up():
    text = PAGES[0].read_text()
    course = {path.stem for path in (ROOT / "picotron_min").glob("*.py")} - {"__init__"}
    assert course <= set(re.findall(r"\]\(picotron_min/(\w+)\.py\)", text))
    minutes = [int(number) for number in re.findall(r"^\| (\d+) \|", text, re.MULTILINE)]
    assert len(minutes) == 16 and f"{sum(minutes)} minutes in all" in text


def test_the_first_command_is_the_first_block():
    command = "pip install -e . && torchrun --nproc_per_node 4 train.py --config config.json"
    assert re.search(r"```bash\n(.*?)\n```", PAGES[0].read_text(), re.DOTALL)[1] == command


def test_the_picture_is_what_its_command_draws(tmp_path):
    draw.main(["--svg", str(tmp_path / "schedules.svg")])
    drawn = (tmp_path / "schedules.svg").read_bytes()
    assert drawn == (ROOT / "docs/schedules.svg").read_bytes()
