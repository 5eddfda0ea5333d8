"""How runs end: well, badly, and on request.

Most of these runs have no model: `run_rank` does what train.py does around its steps.
"""

import itertools
import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

import train
from picotron_min.runtime import failures
from picotron_min.runtime.failures import RankMonitor, monitored
from picotron_min.runtime.launch import Launch, listen_on_loopback, torchrun_launch
from picotron_min.runtime.processes import start_processes
from tests.pool import exit_codes, fork
from tests.workplace import STANDALONE, torchrun

SAVED = "step-00000001"


def shorten_waits() -> None:
    failures.HEARTBEAT, failures.GRACE = 0.1, 0.6


def run_rank(
    place: str, ranks: Iterable[int], action: Callable, folder: Path, launch: Launch
) -> None:
    """Steps of one number, until SIGTERM; some ranks do something in a place."""

    def at(here: str) -> None:
        if here == place and launch.rank in ranks:
            action()

    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo", "gloo authenticates no one"
    shorten_waits()
    failures.LONG_WAIT = timedelta(seconds=2)
    at("start")
    with monitored(launch, 2, str(folder)) as monitor:
        at("inputs")
        monitor.connect("gloo")
        at("weights")
        monitor.wait_for_all()
        for step in itertools.count(1):
            monitor.note_step(step)
            if step == 2:
                at("step")
            dist.all_reduce(torch.zeros(1))
            if monitor.stop_requested():
                return


def fails(error: BaseException) -> None:
    raise error


def dies() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


hangs = partial(time.sleep, 600)
finds_the_disk_full = partial(fails, OSError(28, "No space left on device", "runs/somewhere"))


@pytest.mark.parametrize(
    "place,ranks,action,reason",
    [
        ("start", [1], hangs, "lost rank 1: not started within 2 s"),
        ("inputs", [1], partial(fails, ValueError("no such tokens")), "\nno such tokens\n"),
        ("step", [1], hangs, "timed out waiting for rank 1: hanging, or busy for more than 2 s"),
        ("step", [1], dies, "rank 1 was killed by SIGKILL (perhaps because memory ran out)"),
        ("step", [0], finds_the_disk_full, "No space left on device: 'runs/somewhere'"),
        ("step", range(3), partial(fails, RuntimeError("a database timed out")), " failed\n"),
    ],
)
def test_a_rank_that_fails_ends_the_others_and_is_named_once(
    place, ranks, action, reason, tmp_path, capfd
):
    (tmp_path / SAVED).mkdir()
    (tmp_path / SAVED / "state.json").touch()
    with pytest.raises(SystemExit) as ended:
        start_processes(partial(run_rank, place, ranks, action, tmp_path), 3)
    output = capfd.readouterr().err
    assert ended.value.code == (2 if place == "inputs" else 1)
    assert output.count(reason) == 1 and "torchrun" not in output, output
    assert output.count("Traceback") == (len(ranks) == 3)
    resume = f"This was in step 2: resume from {tmp_path}/{SAVED} with checkpoint.load_path latest"
    when = {"step": resume, "inputs": ""}.get(place, "This was before the first step")
    assert when in output and output.count("This was") == bool(when)


@pytest.mark.parametrize(
    "place,message", [("weights", "stopped by SIGTERM before the first step: "), ("step", "")]
)
def test_after_sigterm_to_the_parent_a_run_ends_well(place, message, tmp_path, capfd):
    # By then the parent waits for its ranks.
    stops = lambda: time.sleep(0.2) or os.kill(os.getppid(), signal.SIGTERM)  # noqa: E731
    run = partial(run_rank, place, [1], stops, tmp_path)
    assert exit_codes(fork(start_processes, run, 2)) == [0]
    output = capfd.readouterr().err
    assert output.count("stopped") == bool(message) and message in output


def rank_1_is_slow(launch: Launch) -> None:
    """To read its tokens, to read its weights, and with what a rank does alone at the end."""
    shorten_waits()
    nap = lambda: launch.rank == 1 and time.sleep(1.2)  # noqa: E731
    with monitored(launch, 1) as monitor:
        nap()
        monitor.connect("gloo")
        nap()
        monitor.wait_for_all()
        nap()


def test_ranks_may_prepare_and_finish_for_longer_than_the_timeout():
    start_processes(rank_1_is_slow, 2)  # SystemExit unless both succeed


def rank_1_gets_sigterm() -> None:
    step_of = train.train_step

    def step_with_signal(run, step, watch):
        if step == 2 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return step_of(run, step, watch)

    train.train_step = step_with_signal


def test_after_sigterm_to_one_rank_all_save_after_the_same_step(workplace):
    config = workplace.config("stopped", checkpoint={"async": True})
    code, output, _ = workplace.main(config, rank_1_gets_sigterm)
    warning = "stopped by SIGTERM after step 3: resume from runs/stopped/step-00000003"
    assert code == 0 and output.index("step 3/6") < output.index(warning), output
    assert len(workplace.steps("stopped")) == 3 and "hf" not in workplace.files("stopped")


# Parts of a run, each in a process group of its own.


def lead_a_group(interrupts, function: Callable, *arguments) -> None:
    os.setsid()
    signal.signal(signal.SIGINT, interrupts)
    function(*arguments)


def wait_until(happens: Callable[[], object], *groups: int) -> None:
    for _ in range(1200):
        if happens():
            return
        time.sleep(0.05)
    for group in groups:
        os.killpg(group, signal.SIGKILL)
    pytest.fail("waited for a minute")


def is_gone(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return True
    return False


def started(folder: Path, interrupts) -> multiprocessing.Process:
    """A run in its second step."""
    run = partial(run_rank, "step", [1], (folder / "begun").touch, folder)
    process = fork(lead_a_group, interrupts, start_processes, run, 2)
    wait_until((folder / "begun").exists, process.pid)
    return process


@pytest.mark.parametrize(
    "interrupts,end,number,code",
    [
        (signal.SIG_IGN, os.kill, signal.SIGKILL, -signal.SIGKILL),  # as in a script, with "&"
        (signal.default_int_handler, os.killpg, signal.SIGINT, 130),  # as in a terminal
    ],
    ids=["killed", "ctrl-c"],
)
def test_when_the_parent_ends_the_ranks_end(interrupts, end, number, code, tmp_path, capfd):
    (tmp_path / SAVED).mkdir()  # of the user, or without its state
    process = started(tmp_path, interrupts)
    end(process.pid, number)
    process.join(20)
    assert process.exitcode == code
    wait_until(lambda: is_gone(process.pid), process.pid)
    output, is_ctrl_c = capfd.readouterr().err, number == signal.SIGINT
    assert output.count("stopped by Ctrl-C\nThis was in step") == is_ctrl_c
    assert "Traceback" not in output
    assert ("this run has saved no checkpoint" in output) == is_ctrl_c


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def under_torchrun(options: tuple[str, ...], rank: int, action: Callable, folder: Path) -> None:
    """Two ranks of this node; one rank of all does something in its second step."""

    def main() -> None:
        listen_on_loopback()
        run_rank("step", [rank], action, folder, torchrun_launch())

    torchrun(*options, "--nproc_per_node", "2", main=main)


def dies_once_then_stops() -> None:
    is_first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    os.kill(os.getpid(), signal.SIGKILL if is_first else signal.SIGTERM)


def test_torchrun_restarts_a_run_after_its_message(tmp_path, capfd):
    options = (*STANDALONE, "--max-restarts", "1")
    assert exit_codes(fork(under_torchrun, options, 1, dies_once_then_stops, tmp_path)) == [0]
    output = capfd.readouterr().err
    assert output.count("lost rank 1: killed, or hanging\nThis was in step 2: ") == 1, output
    assert "saved no checkpoint\n(What follows is torchrun's own report." in output


def test_when_a_node_dies_the_other_ends_and_names_its_ranks(tmp_path, capfd):
    options = ("--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(free_port()))
    what = 2, (tmp_path / "begun").touch, tmp_path
    nodes = [
        fork(lead_a_group, signal.SIG_IGN, under_torchrun, (*options, "--node-rank", node), *what)
        for node in "01"
    ]
    wait_until((tmp_path / "begun").exists, *(node.pid for node in nodes))
    os.killpg(nodes[1].pid, signal.SIGKILL)
    assert exit_codes(*nodes) == [1, -signal.SIGKILL]
    message = "lost ranks 2, 3: killed, or hanging\nThis was in step"
    assert capfd.readouterr().err.count(message) == 1


def monitor_alone(port: int, rank: int, act: Callable[[RankMonitor], None]) -> None:
    """A rank of two, without a parent, that is connected. The store ends with rank 0."""
    shorten_waits()
    more = {"is_master": rank == 0, "wait_for_workers": False}
    launch = Launch(rank, rank, 2, lambda timeout: dist.TCPStore("127.0.0.1", port, **more))
    with monitored(launch, 60) as monitor:
        monitor.connecting = True  # no mistake of the user's any more
        act(monitor)


def fails_when(name: str, error: Exception, monitor: RankMonitor) -> None:
    """When this name is in the store."""
    while not monitor.store.check([name]):
        time.sleep(0.02)
    raise error


def test_an_error_is_reported_alone_and_ends_those_that_wait(capfd):
    alone = partial(fork, monitor_alone, free_port())
    failed_wait = RuntimeError("gloo: connection closed")
    gone = alone(0, partial(fails_when, "hangs", failed_wait))
    # It fails while rank 0 looks for missing ranks.
    faulty = alone(1, partial(fails_when, "failed 0", KeyError("a fault")))
    hanging = alone(1, lambda monitor: monitor.store.set("hangs", "") or hangs())
    assert exit_codes(gone, faulty, hanging) == [1, 1, 1]
    output = capfd.readouterr().err
    assert output.count("This was") == output.count("rank 1 failed") == 1, output
    assert output.count("Traceback") == 1


CUDA_MESSAGE = "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of "
CUDA_MESSAGE += "79.18 GiB. If reserved but unallocated memory is large try setting PYTORCH_ALLOC."


def allocates(allocate: Callable, size: int) -> Exception:
    with pytest.raises((RuntimeError, MemoryError)) as raised:
        allocate(size)
    return raised.value


@pytest.mark.quick
@pytest.mark.parametrize(
    "error,numbers",
    [
        (torch.OutOfMemoryError(CUDA_MESSAGE), "of 79.18 GiB): use a smaller"),
        (allocates(torch.empty, 2**50), f"you tried to allocate {2**52} bytes. Error code 12 ("),
        (allocates(np.empty, 2**50), "Unable to allocate 8.00 PiB for an array"),
    ],
    ids=["cuda", "torch", "numpy"],
)
def test_the_message_of_too_little_memory_has_the_numbers_and_the_remedy(error, numbers):
    message = failures.plain_message(error, rank=3, is_usage=False)
    assert message.startswith("rank 3 has too little memory (") and "\n" not in message
    assert numbers in message and "use a smaller micro_batch_size" in message
