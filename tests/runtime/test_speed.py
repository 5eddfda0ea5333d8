"""The yardsticks of speed and memory."""

import csv
import re
from pathlib import Path

import pytest
import torch

from picotron_min.costs import model_flops_per_token
from picotron_min.planner.validate import setting_of
from picotron_min.runtime.hardware import common_flops_per_token
from picotron_min.runtime.speed import peak_flops


@pytest.mark.quick
@pytest.mark.parametrize(
    ("name", "bfloat16"),
    [
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("AMD Instinct MI300X", 1307.4e12),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
    ],
)
def test_peaks_are_of_exactly_that_device(name, bfloat16, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peak_flops(torch.device("cuda"), "bfloat16") == pytest.approx(bfloat16)


def test_a_cpus_peak_is_measured_in_the_dtype():
    single, double = (peak_flops(torch.device("cpu"), d) for d in ("float32", "float64"))
    assert 1e9 < double < single < 1e15


ROOT = Path(__file__).parents[2]
ROWS = re.compile(r"^\| (\S+) \|.*\| (\S+%) \| (\S+%) \|$", re.MULTILINE)


@pytest.mark.parametrize("name,mfu,common", ROWS.findall((ROOT / "docs/planner.md").read_text()))
def test_a_published_run_has_the_mfus_of_the_docs(name, mfu, common):
    lines = (ROOT / "tests/published_runs.csv").read_text().splitlines()
    row = next(row for row in csv.DictReader(lines) if row["id"] == name)
    setting = setting_of(row)
    # The MLP of a GPT has two matrices, which are as large as three of two thirds the size.
    c, S = setting.model_config, setting.workload.seq_length
    c = c.override(intermediate_size=c.intermediate_size * int(row["mlp_matrices"]) // 3)
    speed = float(row["tokens_per_second_per_gpu"]) / setting.gpu.peaks["bfloat16"]
    flops = [model_flops_per_token(c, S), common_flops_per_token(c, S)]
    assert [f"{speed * number:.1%}" for number in flops] == [mfu, common]
    assert speed * flops[0] == pytest.approx(float(row["mfu"]), rel=1e-3)
