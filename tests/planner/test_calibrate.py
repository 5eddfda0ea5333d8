"""Calibration finds what a machine that is known reaches."""

from dataclasses import replace

import pytest

from picotron_min.extensions.settings import Layout, Workload
from picotron_min.planner import calibrate
from picotron_min.planner.step_time import predict
from picotron_min.planner.system import Setting, our_system
from picotron_min.runtime.hardware import GPUS
from picotron_min.runtime.public_models import find_preset

REAL = {"matmul_share": 0.5, "attention_share": 0.2, "link_share": 0.3, "latency": 2e-4}
REAL |= {"float8_share": 0.4}
# Runs by tp and sequence length, some in 8 bits: what they show.
ROWS = """
1 2048 | matmul_share
1 2048 fp8 | float8_share
1 2048 fp8, 1 2048 | matmul_share float8_share
1 2048, 1 8192 | matmul_share attention_share
1 2048, 1 8192, 2 2048, 8 2048 | matmul_share attention_share link_share latency
""".strip().splitlines()


def observed(run: str, real: dict[str, float]) -> calibrate.Observation:
    """What a machine with these numbers would measure."""
    tp, seq_length, *precision = run.split()
    model, work = find_preset("Llama-3.2-1B"), Workload(int(seq_length), 1, 4, "bfloat16")
    work = replace(work, fp8=bool(precision))
    layout = Layout(tp=int(tp), sequence_parallel=tp == "8")
    at = Setting(model, GPUS["H100"], layout, work, our_system(model, work))
    return calibrate.Observation(at, predict(replace(at, gpu=replace(at.gpu, **real))).step)


@pytest.mark.parametrize("row", ROWS)
def test_calibration_finds_what_a_machine_reaches(row):
    runs, names = row.split(" | ")
    real = {name: REAL[name] for name in names.split()}
    runs = [observed(run, real) for run in runs.split(",")]
    values = calibrate.calibrate(runs)
    assert [*values] == [*real]
    assert max(map(abs, calibrate.errors_of(runs, values))) < 0.01
    sure = [*real][:2]  # links and latency make up for each other
    assert {n: values[n] for n in sure} == pytest.approx({n: real[n] for n in sure}, rel=0.05)
