"""Energy: what counters have counted, once, and only in steps; and the reason where they do not."""

import itertools
import sys
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import train
from picotron_min.runtime import energy
from picotron_min.runtime.energy import Meter, open_meter
from tests.assembled import MODEL, make_config, make_training

CPU, GPU = torch.device("cpu"), torch.device("cuda:1")
PASS, UPDATE, EVALUATION = 3_001, 250, 10**6  # mJ of rank 0; rank 1 uses ten times as much


def spending(name: str, millijoules: int, used: list[int]):
    """In place of a function of train.py: it uses energy, too."""
    function = getattr(train, name)

    def spends(*args):
        used[0] += millijoules * 10 ** dist.get_rank()
        return function(*args)

    return mock.patch.object(train, name, spends)


def steps_that_use_energy(readers: int) -> tuple[list[dict], list[int]]:
    """Measures of two steps with an evaluation between, and bytes without and with."""
    config, used, sent = make_config(dp=2), [10**6], []
    read = (lambda: used[0]) if dist.get_rank() < readers else None
    clock = SimpleNamespace(perf_counter=itertools.count(step=2).__next__)  # 2 s from look to look
    for meters in ([], [Meter(CPU, read, tokens=100)]):
        training = make_training(config, MODEL, meters)
        training.axes.world.ledger.take_bytes()
        with (
            spending("measure_gradient", PASS, used),
            spending("learning_rate_at", UPDATE, used),
            spending("evaluate", EVALUATION, used),
            mock.patch.object(energy, "time", clock),
        ):
            steps = [training.step(0).measures]
            sent.append(training.axes.world.ledger.take_bytes())
            training.evaluate()
            steps.append(training.step(1).measures)
    return steps, sent


@pytest.mark.parametrize("readers,times", [(1, 1), (2, 11)])
def test_a_run_has_the_joules_of_its_steps_and_of_nothing_else(readers, times, pool):
    joules = [times * PASS / 1e3, times * (PASS + UPDATE) / 1e3]  # an update: in the next step's
    for steps, (without, with_meter) in pool.run(2, steps_that_use_energy, readers):
        for measured, number in zip(steps, joules, strict=True):
            expected = {"joules": number, "joules_per_token": number / 100}
            assert measured == pytest.approx(expected | {"watts": number / 2 / readers})
        assert with_meter == without + 16, "2 float64, in the message of the loss"


@pytest.mark.quick
def test_a_gpu_is_known_by_its_uuid_and_is_read_once(monkeypatch):
    nvml, properties = mock.Mock(NVMLError=LookupError), SimpleNamespace(uuid="12-ab")
    nvml.__spec__, nvml.nvmlDeviceGetTotalEnergyConsumption.return_value = "installed", 5
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert open_meter(GPU, 1, 100).take() == 0.005
    nvml.nvmlDeviceGetHandleByUUID.assert_called_once_with("GPU-12-ab")
    assert open_meter(GPU, 3, 100).read is None, "rank 1 reads the GPU that they share"
    nvml.nvmlDeviceGetTotalEnergyConsumption.side_effect = LookupError("Not Supported")
    with pytest.raises(ValueError, match=r"no energy of GPU-12-ab \(Not Supported\): set it to"):
        open_meter(GPU, 1, 100)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(ValueError, match=r'pip install -e "\.\[energy\]"  or set it to false'):
        open_meter(GPU, 1, 100)
    with pytest.raises(ValueError, match=r"by NVML, .* on a CPU: set it to false; zeus"):
        open_meter(CPU, 0, 100)
