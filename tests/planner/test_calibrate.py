"""Calibration finds what a machine that is known reaches."""

from dataclasses import replace

import pytest

from picotron_min.extensions.settings import Layout, Workload
from picotron_min.planner.calibrate import calibrate
from picotron_min.planner.step_time import predict
from picotron_min.planner.system import Setting, our_system
from picotron_min.runtime.hardware import GPUS
from picotron_min.runtime.public_models import find_preset


@pytest.mark.parametrize("share", ["matmul_share", "float8_share"])
def test_calibration_finds_what_a_machine_reaches(share):
    model = find_preset("Llama-3.2-1B")
    work = Workload(2048, 1, 4, "bfloat16", fp8=share == "float8_share")
    at = Setting(model, GPUS["H100"], Layout(tp=2), work, our_system(model, work))
    seconds = predict(replace(at, gpu=replace(at.gpu, **{share: 0.4}))).step
    assert calibrate(at, seconds) == {share: pytest.approx(0.4)}
    for factor, why in (0.1, "more even at its peak"), (1e4, "less even at 0.1% of its peak"):
        with pytest.raises(ValueError, match=rf"H100 needs {why}: name the GPU of the run"):
            calibrate(at, seconds * factor)
