"""The rules of who may import whom, and a few that keep a reader's trust in any single file."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = "picotron_min"

# What each file may import of the package: never train.py, never another parallelism.
COURSE = {
    "layout": set(),
    "model_config": set(),
    "placement": {"layout", "pipeline_schedule"},
    "pipeline_action": set(),
    "zero_bubble": {"pipeline_action"},
    "pipeline_schedule": {"pipeline_action", "zero_bubble"},
    "pipeline_simulator": {"pipeline_action", "pipeline_schedule"},
    "activations": {"layout", "model_config"},
    "costs": {"layout", "model_config"},
    "memory": {"activations", "costs", "layout", "model_config", "pipeline_schedule", "placement"},
    "collectives": set(),
    "mesh": {"collectives", "layout"},
    "linear": set(),
    "offload": {"layout", "linear", "model"},
    "float8": set(),
    "float8_linear": {"float8", "linear", "model", "tensor_parallel"},
    "loss": {"layout"},
    "model": {"linear", "loss", "model_config"},
    "data": {"loss"},
    "muon": {"collectives", "layout", "mesh", "placement"},
    "adamw": {"layout"},
    "optimizer": {"adamw", "layout", "muon", "placement"},
    "data_parallel": {"collectives", "linear"},
    "sharding": {"collectives", "layout", "linear", "mesh", "model", "placement"},
    "router": {"layout", "loss", "model_config"},
    "moe": {"collectives", "layout", "linear", "loss", "model", "model_config", "router"},
    "grouped_experts": {"linear", "loss", "model", "moe"},
    "expert_parallel": {"collectives", "mesh", "model", "moe", "router"},
    "tensor_parallel": {"collectives", "linear", "loss", "model"},
    "tensor_overlap": {"collectives", "loss", "tensor_parallel"},
    "block_attention": {"loss", "model"},
    "context_parallel": {"block_attention", "collectives", "model"},
    "pipeline_parallel": {"collectives", "data", "linear", "pipeline_action", "pipeline_schedule"},
    "initialise": {"mesh", "model_config", "placement"},
    "checkpoint": {"mesh", "placement"},
}
# The one file that puts everything together, for train.py, tests and benchmarks.
RUNTIME = {path.stem for path in (ROOT / PACKAGE / "runtime").glob("*.py")} - {"__init__"}
COURSE["parallelize"] = COURSE.keys()
MAY_IMPORT = COURSE | {
    name: COURSE.keys() - {"parallelize"} | RUNTIME | {"runtime"} for name in RUNTIME
}
MAY_IMPORT["speed"] |= {"planner", "hardware"}  # the one table of peaks
# The planner plans with the course's formulas; only its commands know config files.
PLANNER = {path.stem for path in (ROOT / PACKAGE / "planner").glob("*.py")} - {"__init__"}
FORMULAS = {"layout", "model_config", "placement", "pipeline_schedule", "pipeline_simulator"}
FORMULAS |= {"activations", "costs", "memory"}
PURE = {"hardware", "links", "system", "layer_time", "step_time", "traffic", "parameter_traffic"}
PURE |= {"sent"}
MAY_IMPORT |= {name: FORMULAS | PLANNER | RUNTIME | {"planner", "runtime"} for name in PLANNER}
MAY_IMPORT |= {name: FORMULAS | PURE | {"planner"} for name in PURE}
# A command, which nothing else imports.
REPORT = {path.stem for path in (ROOT / PACKAGE / "report").glob("*.py")} - {"__init__"}
FREE = COURSE.keys() | RUNTIME | PLANNER | REPORT | {"planner", "runtime"}
MAY_IMPORT |= dict.fromkeys(REPORT, FREE)
STANDARD_LIBRARY_ONLY = (
    *("layout", "placement", "model_config", "json_file", "pipeline_action", "zero_bubble"),
    *("pipeline_schedule", "pipeline_simulator", "activations", "costs", "memory", "draw"),
    *("architectures", "public_models", "wording", *PURE),
)
HEAVY = {"datasets", "transformers", "tokenizers", "wandb", "huggingface_hub", "matplotlib"}
DRAWS = ("charts", "pictures")  # of a report, and imported where one is made

FILES = sorted(path for path in (ROOT / PACKAGE).rglob("*.py") if path.stem != "__init__")
SCRIPTS = [ROOT / name for name in ("train.py", "create_config.py", "benchmarks/gpu.py")]


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


def test_the_table_names_every_file():
    assert {path.stem for path in FILES} == MAY_IMPORT.keys()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_imports_only_what_it_may(path):
    names = imports(ast.walk(tree(path)))
    assert not {"train", "exercises"} & {name.partition(".")[0] for name in names}
    ours = {
        part for name in names if name.startswith(PACKAGE + ".") for part in name.split(".")[1:]
    }
    ours &= MAY_IMPORT.keys() | {"runtime"}
    assert ours <= MAY_IMPORT[path.stem]
    if path.stem in STANDARD_LIBRARY_ONLY:
        assert not {name.split(".")[0] for name in names} & {"torch", "numpy", "pydantic"} - ours


LIGHT = [path for path in FILES + SCRIPTS if path.stem not in DRAWS]


@pytest.mark.parametrize("path", LIGHT, ids=lambda path: path.stem)
def test_heavy_packages_are_imported_where_they_are_used(path):
    assert not {name.split(".")[0] for name in imports(tree(path).body)} & HEAVY


@pytest.mark.parametrize("path", FILES + SCRIPTS, ids=lambda path: path.stem)
def test_no_globals_and_no_environment_outside_launch(path):
    for node in ast.walk(tree(path)):
        assert not isinstance(node, ast.Global), f"global at line {node.lineno}"
        if path.stem != "launch" and isinstance(node, ast.Attribute):
            assert node.attr not in ("environ", "getenv"), f"environment at line {node.lineno}"
