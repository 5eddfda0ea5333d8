"""The rules of who may import whom, and a few that keep a reader's trust in any single file."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = "picotron_min"

# What each file may import of the package: never train.py, never another parallelism.
MAY_IMPORT = {
    "llama_config": set(),
    "pipeline_schedule": {"draw"},
    "draw": {"pipeline_schedule"},
    "tokenizer": set(),
    "costs": {"llama_config", "pipeline_schedule"},
    "config": {"llama_config"},
    "config_checks": {"config", "json_file", "llama_config"},
    "config_file": {"config", "config_checks", "json_file"},
    "collectives": set(),
    "mesh": {"collectives"},
    "processes": {"mesh"},
    "loss": set(),
    "model": {"llama_config", "loss"},
    "token_file": {"tokenizer"},
    "data": {"loss"},
    "metrics": set(),
    "console": {"metrics"},
    "speed": {"costs", "llama_config"},
    "optimizer": {"collectives"},
    "data_parallel": {"collectives"},
    "trace": {"collectives", "pipeline_schedule"},
    "tensor_parallel": {"collectives", "loss", "model"},
    "block_attention": set(),
    "context_parallel": {"block_attention", "collectives", "model"},
    "pipeline_parallel": {"collectives", "pipeline_schedule"},
    "initialise": {"collectives", "llama_config"},
    "folders": set(),
    "json_file": set(),
    "checkpoint": {
        *("collectives", "folders", "hugging_face", "initialise", "json_file", "llama_config"),
    },
    "hugging_face": {
        *("checkpoint", "collectives", "folders", "initialise", "json_file", "llama_config"),
        "tokenizer",
    },
}
# The one file that puts everything together, for train.py, tests and benchmarks.
MAY_IMPORT["training"] = MAY_IMPORT.keys() - {"training", "processes"}
STANDARD_LIBRARY_ONLY = ("llama_config", "json_file", "pipeline_schedule", "draw", "costs")
HEAVY = {"datasets", "transformers", "tokenizers", "wandb", "huggingface_hub"}

FILES = sorted(path for path in (ROOT / PACKAGE).glob("*.py") if path.stem != "__init__")
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
    assert "train" not in names
    ours = {name.split(".")[1] for name in names if name.startswith(PACKAGE + ".")}
    assert ours <= MAY_IMPORT[path.stem]
    if path.stem in STANDARD_LIBRARY_ONLY:
        assert not {name.split(".")[0] for name in names} & {"torch", "numpy", "pydantic"} - ours


@pytest.mark.parametrize("path", FILES + SCRIPTS, ids=lambda path: path.stem)
def test_heavy_packages_are_imported_where_they_are_used(path):
    assert not {name.split(".")[0] for name in imports(tree(path).body)} & HEAVY


@pytest.mark.parametrize("path", FILES + SCRIPTS, ids=lambda path: path.stem)
def test_no_globals_and_no_environment_outside_mesh(path):
    for node in ast.walk(tree(path)):
        assert not isinstance(node, ast.Global), f"global at line {node.lineno}"
        if path.stem != "mesh" and isinstance(node, ast.Attribute):
            assert node.attr not in ("environ", "getenv"), f"environment at line {node.lineno}"
