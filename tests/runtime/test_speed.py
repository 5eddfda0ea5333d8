"""The yardsticks of speed and memory."""

import pytest
import torch

from picotron_min.costs import model_flops_per_token
from picotron_min.extensions.settings import ModelConfig, Workload
from picotron_min.runtime.hardware import common_flops_per_token
from picotron_min.runtime.speed import Speedometer, peak_flops


@pytest.mark.quick
@pytest.mark.parametrize(
    ("name", "bfloat16", "float32"),
    [
        ("NVIDIA A100-SXM4-80GB", 312e12, 19.5e12),
        ("NVIDIA H100 80GB HBM3", 989.4e12, 66.9e12),
        ("AMD Instinct MI300X", 1307.4e12, 163.4e12),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None, None),
    ],
)
def test_peaks_are_of_exactly_that_device(name, bfloat16, float32):
    assert peak_flops(name, torch.bfloat16) == pytest.approx(bfloat16)
    assert peak_flops(name, torch.float32) == pytest.approx(float32)


def test_a_cpus_peak_is_measured_in_the_dtype():
    single, double = (peak_flops("cpu", d) for d in (torch.float32, torch.float64))
    assert 1e9 < double < single < 1e15


def test_both_definitions_of_mfu_are_measured():
    model_config = ModelConfig(1000, 64, 96, 3, 4, 2)
    speedometer = Speedometer(model_config, Workload(128), torch.device("cpu"))
    measured = speedometer.measure(tokens_per_second=1000.0, devices=2)
    ours, common = (f(model_config, 128) for f in (model_flops_per_token, common_flops_per_token))
    assert measured["mfu"] / measured["mfu_common"] == pytest.approx(ours / common)
    assert measured["hfu"] == measured["mfu"] and measured["tokens_per_second_per_device"] == 500.0
    assert 0.05 < measured["memory_gb"] < 50
