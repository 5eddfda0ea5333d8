"""The table of docs/planner.md: published runs by both definitions of MFU, computed again."""

import csv
import re
from pathlib import Path

import pytest

from picotron_min.costs import model_flops_per_token
from picotron_min.extensions.settings import ModelConfig
from picotron_min.runtime.hardware import common_flops_per_token

ROOT = Path(__file__).parents[2]
with (ROOT / "tests/published_runs.csv").open() as file:
    RUNS = {row["id"]: row for row in csv.DictReader(file)}
TABLE = [
    [cell.strip() for cell in line.strip("| \n").split("|")]
    for line in (ROOT / "docs/planner.md").read_text().splitlines()
    if line.startswith("| ") and line.split("|")[1].strip() in RUNS
]
PEAKS = {"A100-80GB": 312e12, "H100": 989.4e12, "H100-500W": 989.4e12}


def both(run: dict[str, str]) -> tuple[float, float]:
    """MFU by both definitions."""
    shape = ModelConfig(
        vocab_size=int(run["vocab"]),
        hidden_size=int(run["hidden"]),
        # The MLP of a GPT has two matrices, which are as large as three of two thirds the size.
        intermediate_size=int(run["intermediate"]) * int(run["mlp_matrices"]) // 3,
        num_hidden_layers=int(run["layers"]),
        num_attention_heads=int(run["heads"]),
        num_key_value_heads=int(run["kv_heads"]),
        tie_word_embeddings=run["tied"] == "1",
    )
    of_peak = float(run["tokens_per_second_per_gpu"]) / PEAKS[run["gpu"]]
    sizes = shape, int(run["seq"])
    return of_peak * model_flops_per_token(*sizes), of_peak * common_flops_per_token(*sizes)


def test_the_table_has_its_runs():
    assert len(TABLE) == 4


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row[0])
def test_a_published_run_has_these_mfus(row):
    ours, common = both(RUNS[row[0]])
    assert (row[4], row[5]) == (f"{ours:.1%}", f"{common:.1%}")
    assert ours == pytest.approx(float(RUNS[row[0]]["mfu"]), rel=1e-3)
    # The figure as published is that of the table of runs.
    number = re.match(r"[\d.]+", RUNS[row[0]]["published"])[0]
    measured = RUNS[row[0]]["published"].endswith(("/GPU", " s"))  # a time or a speed
    assert measured or number in row[2]
