"""Pages and comments: links, modules and names, sizes, the map, and the picture."""

import ast
import importlib.util
import io
import pkgutil
import re
import tokenize
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


# Names of other packages, and commands. Where "In production:" stands, all names are theirs.
ELSEWHERE = {
    "_flatten",
    "record_stream",
    "save_to_disk",
    "AutoModelForCausalLM",
    "python",
    "torchrun",
}
IN_PRODUCTION = re.compile(r"In\s+production:.*?(?:\.\s|\.?$)", re.DOTALL)


def names_and_mentions(path: Path) -> tuple[set[str], set[str]]:
    """All names in the code of a file, and those in backticks of its prose."""
    tree, names, prose = ast.parse(path.read_text()), set(), []
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            prose.append(ast.get_docstring(node) or "")
        elif isinstance(node, ast.Constant) and re.fullmatch(r"[\w.]+", str(node.value)):
            names |= set(str(node.value).split("."))  # keys of a config, and of parameters
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type == tokenize.COMMENT:
            prose.append(token.string)
        elif token.type == tokenize.NAME:
            names.add(token.string)
    text = "\n".join(IN_PRODUCTION.sub("", each) for each in prose)
    return names, set(re.findall(r"`([\w.]*\w)[^`\n]*`", text))


def test_names_in_docstrings_and_comments_exist():
    files = [*(ROOT / "picotron_min").rglob("*.py"), ROOT / "train.py", ROOT / "create_config.py"]
    found = {path: names_and_mentions(path) for path in files}
    every = set().union(*(names for names, _ in found.values()), *(path.parts for path in files))
    every |= ELSEWHERE | {path.stem for path in files}
    for path, (_, mentions) in found.items():
        for mention in mentions:
            is_known = every.issuperset(mention.strip(".").split("."))
            is_theirs = mention.startswith("torch.") and resolves(mention)
            assert is_known or is_theirs, f"{name_of(path)}: {mention}"


def resolves(name: str) -> bool:
    try:
        return bool(pkgutil.resolve_name(name))
    except (ImportError, AttributeError):
        return False
