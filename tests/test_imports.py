"""The rules of who may import whom, and a few that keep a reader's trust in any single file."""

import ast
import functools
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = "picotron_min"

# The core stands alone. An extension knows the core and its own folder, the settings of all, and
# overlap/, whose linears it may build on; never another extension.
MAY_IMPORT = {
    "core": {"core"},
    "extension": {"core", "settings", "overlap"},
    "settings": {"core", "extension"},  # what extensions add to the numbers of a run
    "build": {"core", "settings", "overlap", "extension"},  # the list of a run
    "runtime": {"core", "settings", "build"},
    "planner": {"core", "settings", "extension", "runtime"},
    "report": {"core", "settings", "extension", "runtime", "planner"},
    "dry_run": {"core", "settings", "extension", "build", "runtime", "planner", "train"},
}
# Commands of the runtime: one draws plans, and the other describes a whole run.
FREE = {"draw", "describe"}
STANDARD_LIBRARY_ONLY = {
    f"{folder}{name}.py"
    for folder, names in {
        "": "costs layout model_config pipeline_messages pipeline_schedule placement",
        "extensions/": "documents/rectangles experts/mixture family settings sharding/rows",
        "extensions/schedules/": "registry simulator zero_bubble",
        "planner/": "activations layer_time links memory parameters step_time system traffic",
        "runtime/": "draw hardware json_file public_models wording",
    }.items()
    for name in names.split()
}
HEAVY = {"datasets", "transformers", "tokenizers", "wandb", "huggingface_hub", "matplotlib"}
# The second removes a variable that matplotlib would stop at.
ENVIRONMENT = ("runtime/launch.py", "report/__main__.py")
DRAWS = ("drawing", "curves", "timelines", "schedules")  # imported where a picture is made

FILES = sorted(path for path in (ROOT / PACKAGE).rglob("*.py") if path.stem != "__init__")
SCRIPTS = [ROOT / name for name in ("train.py", "create_config.py", "benchmarks/gpu.py")]


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT / PACKAGE))


STANDARD_LIBRARY_ONLY |= {name_of(path) for path in FILES if path.stem == "shape"}  # of families


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imports(nodes) -> set[str]:
    """The dotted names that import statements among the nodes ask for."""
    names = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are written in full"
            names.add(node.module)
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def files_of(names: set[str]) -> set[Path]:
    """The files of the package among dotted names."""
    paths = {ROOT / f"{name.replace('.', '/')}.py" for name in names if name.startswith(PACKAGE)}
    packages = {ROOT / name.replace(".", "/") / "__init__.py" for name in names if "." in name}
    return {p for p in paths if p.exists()} | {
        p for p in packages if p.exists() and p.stat().st_size
    }


def room(path: Path) -> str:
    """Where a file is in the house: see MAY_IMPORT."""
    folder, *inner = path.relative_to(ROOT / PACKAGE).parts
    if not inner:
        return "core"
    if folder != "extensions":
        return folder
    alone = {"settings.py": "settings", "build.py": "build", "overlap": "overlap"}
    alone["family.py"] = "settings"
    return alone.get(inner[0], "extension")


def test_a_file_imports_only_what_it_may():
    assert set(map(name_of, FILES)) >= STANDARD_LIBRARY_ONLY
    for path in FILES:
        file, names = name_of(path), imports(ast.walk(tree(path)))
        packages = {name.partition(".")[0] for name in names}
        may = MAY_IMPORT.get(room(path), MAY_IMPORT["extension"])
        assert not packages & ({"train", "exercises", "tests"} - may), file
        for other in files_of(names) if path.stem not in FREE else ():
            is_own = other.parent == path.parent and room(path) != "core"
            assert is_own or room(other) in may, f"{file}: {name_of(other)}"
        if file in STANDARD_LIBRARY_ONLY:
            assert not packages & {"torch", "numpy", "pydantic"}, file


def test_imports_of_heavy_packages_globals_and_the_environment_have_their_places():
    for path in FILES + SCRIPTS:
        if path.stem not in DRAWS:
            assert not {name.split(".")[0] for name in imports(tree(path).body)} & HEAVY, path
        for node in ast.walk(tree(path)):
            assert not isinstance(node, ast.Global), f"{path}: global at line {node.lineno}"
            if "/".join(path.parts[-2:]) not in ENVIRONMENT and isinstance(node, ast.Attribute):
                reads = node.attr in ("environ", "getenv")
                assert not reads, f"{path}: environment at line {node.lineno}"
