"""Golden counts: operations that a step launches on a GPU, their bytes, and the host's waits.

Another count is not wrong, but it is meant, or it is a pass over memory that nobody sees. Write the
file again, and say in the commit why it has changed:

    python -m tests.test_counts
"""

import json
from pathlib import Path

import pytest
import torch

from picotron_min.dry_run.run import dry_run
from tests.rows import lines, row

FILE = Path(__file__).with_name("counts.json")
TORCH = torch.__version__.rpartition(".")[0]
SIZES = {"use_cpu": False, "dtype": "bfloat16", "hidden_size": 64, "intermediate_size": 64}
ROWS = """
core: m=2 optimizer=adamw model=families
overlap: tp=2 dp=2 sp recompute=selective
schedules: pp=2 m=4 engine=zb_h1 model=tied
sharding: dp=2 m=2 sharding=parameters fp8 seq_length=32
experts: dp=2 ep=2 model=softmax
"""


def counts(text: str) -> dict[str, int]:
    run = dry_run(row(text, **SIZES)[0])
    found = {"launches": run.launches, "bytes": run.moved, "waits": run.waits}
    return {name: sum(count.values()) for name, count in found.items()}


@pytest.mark.parametrize("text", lines(ROWS))
def test_a_step_launches_moves_and_waits_as_the_file_has_it(text):
    recorded = json.loads(FILE.read_text())
    if recorded["torch"] != TORCH:
        pytest.skip(f"torch {recorded['torch']} was counted, and this is {TORCH}")
    why = "if so meant: python -m tests.test_counts, and the reason in the commit"
    assert counts(text) == recorded[text], why


if __name__ == "__main__":
    found = {"torch": TORCH} | {text: counts(text) for text in lines(ROWS)}
    FILE.write_text(json.dumps(found, indent=1) + "\n")
