"""Energy: what counters have counted, once, and only in steps; and the reason where they do not."""

import itertools
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import train
from picotron_min.runtime import energy
from picotron_min.runtime.energy import Meter, nvml_reader, open_meter, rapl_reader
from picotron_min.runtime.saver import Saver
from tests.assembled import MODEL, make_config, make_training

CPU, GPU = torch.device("cpu"), torch.device("cuda:1")
PASS, UPDATE, EVALUATION, SAVE = 3_000_001, 250_000, 10**9, 5 * 10**8  # uJ


def clock() -> SimpleNamespace:
    """In place of `time`: two seconds pass between any two looks."""
    return SimpleNamespace(perf_counter=itertools.count(step=2).__next__)


def powered() -> None:
    """In a run: its passes, updates, evaluations and saves use what is written above."""
    used = [10**6]

    def spend(owner, name: str, joules: int) -> None:
        function = getattr(owner, name)

        def spends(*args):
            used[0] += joules
            return function(*args)

        setattr(owner, name, spends)

    spend(train, "measure_gradient", PASS)
    spend(train, "learning_rate_at", UPDATE)
    spend(train, "evaluate", EVALUATION)
    spend(Saver, "save", SAVE)
    energy.rapl_reader, energy.time = lambda: lambda: used[0], clock()


def test_a_run_has_the_joules_of_its_steps_and_of_nothing_else(workplace):
    """Two ranks of one node, of which one reads for both: nothing counts twice."""
    config = workplace.config("energy", logging={"log_energy": True})
    outcome = workplace.main(config, powered)
    assert outcome.code == 0, outcome.output
    joules = [step["joules"] for step in workplace.steps("energy")]
    # An update is in the next step's number, the last one in none.
    assert joules == pytest.approx([PASS / 1e6] + 5 * [(PASS + UPDATE) / 1e6], abs=1e-9)
    for step in workplace.steps("energy"):
        assert step["watts"] == step["joules"] / 2
        assert step["joules_per_token"] == step["joules"] / 256
    assert f"energy      0.02 kJ, {sum(joules) / 6 / 256:.3g} J a token," in outcome.output


def two_ranks_with_readers() -> tuple[list, list]:
    """What a step reports where both ranks read, and the bytes that steps send without and with."""
    config, sent = make_config(dp=2), []
    grows = itertools.count(step=(5, 10**6)[dist.get_rank()])
    for meters in ([], [Meter(CPU, grows.__next__, tokens=100)]):
        training = make_training(config, MODEL, meters)
        training.axes.world.ledger.take_bytes()
        with mock.patch.object(energy, "time", clock()):
            measures = training.step(0).measures
        sent.append(training.axes.world.ledger.take_bytes())
    return [measures[name] for name in ("joules", "joules_per_token", "watts")], sent


def test_readers_are_summed_in_the_message_of_the_loss(pool):
    for measures, (without, with_meter) in pool.run(2, two_ranks_with_readers):
        assert measures == pytest.approx([1.000005, 0.01000005, 1.000005 / 2 / 2])
        assert with_meter == without + 16, "2 float64, sent once"


def zones(folder: Path, **counters: int) -> Path:
    """/sys/class/powercap of a machine."""
    for i, (name, counter) in enumerate(counters.items()):
        zone = folder / f"intel-rapl:{i}"
        zone.mkdir(parents=True, exist_ok=True)
        (zone / "name").write_text(f"{name}\n")
        (zone / "energy_uj").write_text(f"{counter}\n")
        (zone / "max_energy_range_uj").write_text("1000000\n")
    return folder


@pytest.mark.quick
def test_only_packages_count_and_each_may_wrap(tmp_path, monkeypatch):
    read = rapl_reader(zones(tmp_path, package_0=999_000, package_1=40, psys=7))
    first = read()
    zones(tmp_path, package_0=500, package_1=60, psys=9000)  # the first one is over its end
    assert read() - first == 1_500 + 20
    with pytest.raises(ValueError, match="missing, as in most virtual machines"):
        rapl_reader(zones(tmp_path / "virtual", psys=7))
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may read all
    with pytest.raises(ValueError, match=r"or for root alone: chmod a\+r"):
        rapl_reader(tmp_path)


def test_a_gpu_is_known_by_its_uuid_and_not_by_its_index(monkeypatch):
    nvml, properties = mock.Mock(NVMLError=LookupError), SimpleNamespace(uuid="12-ab")
    nvml.__spec__, nvml.nvmlDeviceGetTotalEnergyConsumption.return_value = "installed", 5
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert nvml_reader(GPU)() == 5000
    nvml.nvmlDeviceGetHandleByUUID.assert_called_once_with("GPU-12-ab")
    nvml.nvmlDeviceGetTotalEnergyConsumption.side_effect = LookupError("Not Supported")
    with pytest.raises(ValueError, match=r"no energy of GPU-12-ab \(Not Supported\): set it to"):
        nvml_reader(GPU)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(ValueError, match=r'pip install -e "\.\[energy\]"  or set it to false'):
        open_meter(GPU, 0, 100)
