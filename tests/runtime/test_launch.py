"""How a process was started, and what it runs on."""

import os
import socket
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from picotron_min.runtime.launch import (
    Launch,
    Terminal,
    choose_device,
    exit_on_usage_error,
    open_process_group,
    set_environment,
    torchrun_launch,
)

GPU, LAUNCH = torch.device("cuda", 1), Launch(5, 3, 8, None)


@pytest.mark.quick
def test_torchruns_variables_are_checked_and_srun_is_told_of_it(monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "1")
    assert torchrun_launch() is None
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    with pytest.raises(ValueError, match=r"^srun .* 2 times .*let it run  torchrun "):
        torchrun_launch()
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ValueError, match=r"'LOCAL_RANK': start with torchrun, or unset RANK"):
        torchrun_launch()


def test_a_store_that_cannot_be_opened_is_one_line_with_exit_code_2(monkeypatch, capfd):
    with socket.create_server(("127.0.0.1", 0)) as server:
        variables = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1"}
        for name, value in (variables | {"MASTER_PORT": server.getsockname()[1]}).items():
            monkeypatch.setenv(name, str(value))
        with pytest.raises(SystemExit) as raised, exit_on_usage_error():
            torchrun_launch().open_store(0.3)
    message = capfd.readouterr().err.strip().split("\n\n")[-1].strip()  # torch may warn above
    assert raised.value.code == 2 and "EADDRINUSE" in message and "check MASTER_ADDR" in message


@pytest.mark.parametrize("local_rank", [0, 1])
def test_a_mistake_is_reported_by_the_first_rank_of_a_node(local_rank, monkeypatch, capfd):
    waits = []
    monkeypatch.setattr(time, "sleep", waits.append)
    monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    with pytest.raises(SystemExit) as raised, exit_on_usage_error():
        raise OSError("there is no config.json")
    assert raised.value.code == 2 and "no config.json" in capfd.readouterr().err
    assert waits == [5 * local_rank], "in which the launcher ends those that found it, too"


def test_output_that_cannot_be_written_raises_nothing():
    with open("/dev/full", "w", encoding="ascii") as stream:  # without all letters
        terminal = Terminal(stream)
        for _ in range(9):
            print("größe" * 1000, file=terminal, flush=True)
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())  # to be closed


def test_a_backend_that_cannot_work_on_the_device_is_refused_with_the_remedy():
    assert choose_device(LAUNCH, use_cpu=True) == (torch.device("cpu"), "gloo")
    with pytest.raises(ValueError, match=r"backend=nccl does not work .* cpu: set it to auto or"):
        choose_device(LAUNCH, "nccl", use_cpu=True)


@pytest.fixture
def two_gpus(monkeypatch):
    for name, value in (("is_available", True), ("device_count", 2), ("set_device", None)):
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setattr(torch, "empty", lambda size, device: None)


def test_processes_share_gpus_with_gloo_alone(two_gpus):
    assert choose_device(LAUNCH, "gloo") == (GPU, "gloo")
    assert choose_device(LAUNCH._replace(local_rank=1)) == (GPU, "nccl")
    for backend in ("auto", "nccl"):
        with pytest.raises(ValueError, match=r"process 3 .* there are 2; .*backend gloo, or"):
            choose_device(LAUNCH, backend)


def test_nccl_is_not_connected_eagerly_and_ends_a_wait_after_the_timeout(monkeypatch):
    """tests/extensions/test_nccl.py shows what eager connections would hold up."""
    environ, seen = {}, {}
    monkeypatch.setattr(os, "environ", environ)
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **more: seen.update(more | environ))
    timeout = timedelta(seconds=7)
    open_process_group(LAUNCH, "nccl", dist.HashStore(), timeout)
    assert "device_id" not in seen and seen["timeout"] == timeout
    assert seen["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "3"
    assert seen["TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"] == "7"


def test_a_network_interface_of_another_machine_is_refused(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,ib0")
    with pytest.raises(ValueError, match=r"^GLOO_SOCKET_IFNAME=lo,ib0: .* ib0: unset it"):
        set_environment()


def test_memory_in_segments_that_grow_is_tried_once(two_gpus, monkeypatch, capsys):
    settings = []

    def empty(size: int, device: torch.device) -> None:
        if not settings:
            raise RuntimeError("CUDA driver error: operation not supported\nand a stack")

    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", settings.append)
    assert choose_device(Launch(0, 0, 2, None)) == (torch.device("cuda", 0), "nccl")
    assert settings == ["expandable_segments:False"]
    assert "fixed segments: the driver has no other (CUDA driver error" in capsys.readouterr().out
