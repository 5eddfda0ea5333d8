"""How runs end: well, badly, and on request."""

import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from filelock import FileLock

import train
from picotron_min.extensions.settings import Layout
from picotron_min.mesh import build_axes
from picotron_min.runtime import failures, inputs, processes, reporter, saver
from picotron_min.runtime.config_file import load_config
from picotron_min.runtime.failures import monitored
from picotron_min.runtime.launch import (
    OTHER_LAUNCHERS,
    Launch,
    choose_backend,
    choose_device,
    exit_on_usage_error,
    in_words,
    open_communicators,
    open_process_group,
    set_environment,
    torchrun_launch,
)
from picotron_min.runtime.processes import start_processes
from tests.pool import exit_codes, fork
from tests.workplace import STANDALONE, Workplace, numbers, run_main, torchrun


@pytest.fixture(scope="module")
def whole(workplace) -> list[tuple]:
    """The steps of an undisturbed run."""
    assert workplace.main(workplace.config("whole")).code == 0
    return numbers(workplace.steps("whole"))


def shorten_waits() -> None:
    failures.HEARTBEAT, failures.GRACE = 0.1, 0.6


def at_the_third_step(rank: int | None, sabotage: Callable[[], None]) -> None:
    """Patch the train step of one rank, or of all; forked processes inherit it."""
    shorten_waits()
    step = train.train_step

    def sabotaged(run, number, *watch):
        if number == 2 and rank in (None, dist.get_rank()):
            sabotage()
        return step(run, number, *watch)

    train.train_step = sabotaged


def raises(error: Exception) -> Callable[[], None]:
    def sabotage():
        raise error

    return sabotage


def rank_1_dies() -> None:
    at_the_third_step(1, lambda: os.kill(os.getpid(), signal.SIGKILL))


def rank_1_hangs() -> None:
    at_the_third_step(1, lambda: time.sleep(600))


def rank_0_finds_the_disk_full() -> None:
    at_the_third_step(0, raises(OSError(28, "No space left on device", "runs/somewhere")))


def all_ranks_raise() -> None:
    at_the_third_step(None, raises(RuntimeError("the connection to a database timed out")))


BUSY = "hanging, or busy for more than 2 s (distributed.timeout_seconds)"
RESUME = "\nThis was in step 3: resume from runs/{}/step-00000002 with checkpoint.load_path latest"


@pytest.mark.parametrize(
    "sabotage,reason,tracebacks",
    [
        (rank_1_dies, "rank 1 was killed by SIGKILL (perhaps because memory ran out)", 0),
        (rank_1_hangs, f"timed out waiting for rank 1: {BUSY}", 0),
        (rank_0_finds_the_disk_full, "No space left on device: 'runs/somewhere'", 0),
        (all_ranks_raise, " failed", 1),
    ],
)
def test_a_rank_that_fails_ends_the_others_and_is_named_once(
    workplace, sabotage, reason, tracebacks
):
    name = sabotage.__name__
    config = workplace.config(name, distributed={"dp_size": 4, "timeout_seconds": 2})
    outcome = workplace.main(config, sabotage)
    assert outcome.code == 1 and outcome.seconds < 30
    assert outcome.output.count(reason + RESUME.format(name)) == 1, outcome.output
    assert outcome.output.count("Traceback") == tracebacks
    assert outcome.output.count("resume from") == 1 and "torchrun" not in outcome.output
    # What was done before is on the disk.
    assert [record["step"] for record in workplace.steps(name)] == [1, 2]
    assert workplace.files(name) == ["metrics.jsonl", "run.jsonl", "step-00000002"]


def test_a_run_without_a_checkpoint_reports_that_none_was_saved(tmp_path):
    (tmp_path / "step-00000004").mkdir()  # as a user's own, or without its state
    assert failures.how_to_resume(str(tmp_path)) == "this run has saved no checkpoint"


CUDA_MESSAGE = """CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of \
79.18 GiB of which 1.50 GiB is free. Of the allocated memory 70.00 GiB is allocated by PyTorch. If \
reserved but unallocated memory is large try setting PYTORCH_ALLOC_CONF=expandable_segments:True.
"""


def test_the_message_of_too_little_memory_has_the_numbers_and_the_remedy():
    with pytest.raises(RuntimeError) as cpu:
        torch.empty(2**50)
    with pytest.raises(MemoryError) as python:
        bytearray(2**62)
    with pytest.raises(MemoryError) as numpy:
        np.empty(2**50)
    errors = {
        torch.OutOfMemoryError(CUDA_MESSAGE): "(CUDA out of memory. Tried to allocate 20.00 GiB. "
        "GPU 0 has a total capacity of 79.18 GiB of which 1.50 GiB is free. "
        "Of the allocated memory 70.00 GiB is allocated by PyTorch): use a smaller",
        cpu.value: f"you tried to allocate {2**52} bytes. Error code 12 (Cannot",
        numpy.value: "Unable to allocate 8.00 PiB for an array",
    }
    for error, reason in errors.items():
        message = failures.plain_message(error, rank=3, is_usage=False)
        assert message.startswith("rank 3 has too little memory (") and "\n" not in message
        assert reason in message and "use a smaller micro_batch_size" in message
    # Without numbers the place is of more use.
    assert failures.plain_message(python.value, rank=3, is_usage=False) == ""
    assert failures.plain_message(RuntimeError("shapes differ"), rank=3, is_usage=False) == ""


def test_a_file_or_folder_that_a_run_cannot_have_is_refused_at_the_start(workplace, monkeypatch):
    monkeypatch.chdir(workplace.folder)
    config = load_config(workplace.config("refused"))
    start = partial(inputs.read_inputs, config, Launch(0, 0, 2, None))
    Path("runs/refused/metrics.jsonl").mkdir(parents=True)
    message = "=runs/refused/metrics.jsonl cannot be written .Is a directory.: name another file"
    with pytest.raises(ValueError, match=message):
        start()
    message = "checkpoint.save_dir=runs/refused is in use by another run: wait"
    with FileLock("runs/refused/.lock"), pytest.raises(ValueError, match=message):
        start()


def rank_1_has_another_config() -> None:
    shorten_waits()
    in_common = inputs.Inputs.in_common

    def other(self):
        is_rank_0 = self.lock is not None
        return in_common(self) | ({} if is_rank_0 else {"training.seed": 7})

    inputs.Inputs.in_common = other


def test_ranks_with_different_settings_are_refused(workplace):
    config = workplace.config("different")
    outcome = workplace.main(config, rank_1_has_another_config)
    assert outcome.code == 1 and "Traceback" not in outcome.output
    message = "rank 1 was not started as rank 0: it has training.seed=7, not 42."
    assert outcome.output.count(message) == 1, outcome.output
    assert workplace.files("different") == []


def rank_1_sees_another_folder() -> None:
    shorten_waits()
    check_shared = inputs.check_shared

    def on_another_disk(*arguments):
        if dist.get_rank() == 1:
            Path("elsewhere").mkdir()
            os.chdir("elsewhere")
        check_shared(*arguments)

    inputs.check_shared = on_another_disk


def test_a_save_dir_that_nodes_do_not_share_is_reported_before_the_first_step(workplace):
    config = workplace.config("unshared", distributed={"dp_size": 2, "timeout_seconds": 2})
    outcome = workplace.main(config, rank_1_sees_another_folder)
    assert outcome.code == 1 and "Traceback" not in outcome.output
    message = "checkpoint.save_dir=runs/unshared is not the same folder on all nodes: rank 1"
    assert outcome.output.count(message) == 1, outcome.output
    assert outcome.seconds < 20
    assert workplace.files("unshared") == []


def rank_1_does_not_start() -> None:
    shorten_waits()
    start = processes.monitored

    def hangs(launch, *others):
        time.sleep(600 if launch.rank == 1 else 0)
        return start(launch, *others)

    processes.monitored = hangs


def test_ranks_that_do_not_start_are_named(workplace):
    config = workplace.config("absent", distributed={"dp_size": 2, "timeout_seconds": 1})
    outcome = workplace.main(config, rank_1_does_not_start)
    assert outcome.code == 1 and "Traceback" not in outcome.output
    reason = "lost rank 1: not started within 1 s (distributed.timeout_seconds)"
    assert outcome.output.count(reason) == 1, outcome.output


def rank_1_is_slow(seconds: float, raises: Exception | None) -> None:
    """Three times: over its tokens, over its weights and, at the end, over an upload."""
    shorten_waits()
    prepare, initialise, steps = inputs.read_inputs, inputs.initialise, train.train_steps

    def slow_prepare(config, launch):
        if launch.rank == 1:
            time.sleep(seconds)
            if raises:
                raise raises
        return prepare(config, launch)

    def slow_initialise(*arguments):
        time.sleep(seconds if dist.get_rank() == 1 else 0)
        initialise(*arguments)

    def slow_steps(*arguments):
        steps(*arguments)
        time.sleep(seconds if dist.get_rank() == 1 else 0)

    inputs.read_inputs, inputs.initialise = slow_prepare, slow_initialise
    train.train_steps = slow_steps


def test_a_rank_may_prepare_and_finish_for_longer_than_the_timeout(workplace, whole):
    config = workplace.config("slow", distributed={"timeout_seconds": 1})
    outcome = workplace.main(config, partial(rank_1_is_slow, 1.3, raises=None))
    assert outcome.code == 0, outcome.output
    assert numbers(workplace.steps("slow")) == whole


def rank_0_is_slow(seconds: float) -> None:
    """Over an earlier run's folders, and over old checkpoints beside the first new one."""
    shorten_waits()
    make_room, delete_older, waits = reporter.make_room, saver.delete_older, [seconds]
    reporter.make_room = lambda *args: time.sleep(seconds) or make_room(*args)
    saver.delete_older = lambda *args: (
        time.sleep(waits.pop() if waits else 0) or delete_older(*args)
    )


def test_rank_0_may_delete_for_longer_than_the_timeout(workplace, whole):
    checkpoint = {"keep": 1, "save_frequency": 4}
    config = workplace.config(
        "full disk", distributed={"timeout_seconds": 1}, checkpoint=checkpoint
    )
    outcome = workplace.main(config, partial(rank_0_is_slow, 1.3))
    assert outcome.code == 0, outcome.output
    assert numbers(workplace.steps("full disk")) == whole


def test_a_mistake_that_one_rank_finds_late_ends_all_at_once_with_exit_code_2(workplace):
    config = workplace.config("late", distributed={"dp_size": 3, "timeout_seconds": 60})
    mistake = ValueError("the tokens do not fit the model")
    outcome = workplace.main(config, partial(rank_1_is_slow, 1.0, raises=mistake))
    assert outcome.code == 2 and outcome.seconds < 10, outcome.output
    assert outcome.output.count("the tokens do not fit the model\n") == 1, outcome.output
    assert "Traceback" not in outcome.output and "step" not in outcome.output


def rank_1_hangs_over_its_weights() -> None:
    shorten_waits()
    failures.LONG_WAIT /= 3600
    initialise = inputs.initialise

    def hangs(*arguments):
        time.sleep(600 if dist.get_rank() == 1 else 0)
        initialise(*arguments)

    inputs.initialise = hangs


def test_a_rank_that_hangs_before_the_first_step_is_named(workplace):
    config = workplace.config("early", distributed={"dp_size": 2, "timeout_seconds": 1})
    outcome = workplace.main(config, rank_1_hangs_over_its_weights)
    message = "timed out waiting for rank 1\nThis was before the first step\n"
    assert outcome.code == 1 and message in outcome.output, outcome.output


def test_a_store_that_cannot_be_reached_is_reported_with_the_reason(monkeypatch):
    def problem(rank: int, host: str, port: int) -> str:
        variables = {"RANK": rank, "LOCAL_RANK": 0, "WORLD_SIZE": 2}
        variables |= {"MASTER_ADDR": host, "MASTER_PORT": port}
        for name, value in variables.items():
            monkeypatch.setenv(name, str(value))
        with pytest.raises(ConnectionError) as raised:
            torchrun_launch().open_store(0.3)
        reason = f"rank {rank} finds no store of all ranks at {host}:{port} within 0.3 s"
        assert reason in str(raised.value) and "check MASTER_ADDR" in str(raised.value)
        return str(raised.value)

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert "EADDRINUSE" in problem(0, "127.0.0.1", port)
    problem(1, "127.0.0.1", port)
    problem(0, "no-such-machine.invalid", port)  # of no machine, by RFC 6761


def test_a_mistake_that_one_rank_finds_before_the_store_is_open_is_reported_soon(
    monkeypatch, capfd
):
    waits = []
    monkeypatch.setattr(time, "sleep", waits.append)
    for rank in (0, 1):
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        with pytest.raises(SystemExit) as raised, exit_on_usage_error():
            raise OSError("there is no config.json")
        assert raised.value.code == 2 and "no config.json" in capfd.readouterr().err
    first, second = waits  # the launcher needs some time to end rank 1 if rank 0 finds it, too
    assert first == 0 and 1 <= second <= 5


def test_a_backend_that_cannot_work_on_the_device_is_refused_with_the_remedy():
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 0)
    assert [choose_backend(d, "auto") for d in (cpu, gpu)] == ["gloo", "nccl"]
    assert [choose_backend(d, "gloo") for d in (cpu, gpu)] == ["gloo", "gloo"]
    assert choose_backend(gpu, "nccl") == "nccl"
    message = "backend=nccl does not work on the device in use, cpu: set it to auto or gloo"
    with pytest.raises(ValueError, match=message):
        choose_backend(cpu, "nccl")


def test_processes_share_gpus_with_gloo_alone(monkeypatch, tmp_path):
    for name, value in (("is_available", True), ("device_count", 2), ("set_device", None)):
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setattr(torch, "empty", mock.Mock())
    monitored, path = mock.MagicMock(), tmp_path / "config.json"
    monkeypatch.setattr(processes, "monitored", monitored)
    launches = {}
    for backend in ("auto", "gloo"):
        path.write_text(json.dumps({"distributed": {"backend": backend}}))
        launch = Launch(5, 3, 8, open_store=lambda timeout: dist.HashStore())
        processes._run_rank(lambda *_: None, load_config(str(path)), launch)
        launches[backend] = monitored.call_args.args[0]
    assert choose_device(launches["gloo"], use_cpu=False) == torch.device("cuda", 1)
    with pytest.raises(ValueError, match=r"process 3 .* there are 2; .*backend gloo, or"):
        choose_device(launches["auto"], use_cpu=False)


def test_memory_in_segments_that_grow_is_tried_once(monkeypatch, capsys):
    settings, allowed = [], "expandable_segments:False"

    def empty(size: int, device: torch.device) -> None:
        if settings[-1:] != [allowed]:
            raise RuntimeError("CUDA driver error: operation not supported\nand a stack")

    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", settings.append)
    for name, value in (("is_available", True), ("device_count", 2), ("set_device", None)):
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    assert choose_device(Launch(0, 0, 2, None), use_cpu=False) == torch.device("cuda", 0)
    assert settings == ["expandable_segments:False"]
    assert "fixed segments: the driver has no other (CUDA driver error" in capsys.readouterr().out
    allowed = "nothing"
    with pytest.raises(RuntimeError):
        choose_device(Launch(0, 0, 2, None), use_cpu=False)
    assert not capsys.readouterr().out


def test_nccl_is_not_connected_eagerly(monkeypatch):
    """tests/extensions/test_nccl.py shows what would hold up what."""
    seen = {}
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **options: seen.update(options))
    open_process_group(Launch(1, 1, 2, None), "nccl", dist.HashStore(), failures.LONG_WAIT)
    assert seen and "device_id" not in seen


def test_nccl_ends_a_process_that_waits_longer_than_the_timeout(monkeypatch):
    names = [f"TORCH_NCCL_{name}" for name in ("ASYNC_ERROR_HANDLING", "HEARTBEAT_TIMEOUT_SEC")]
    for name in names:
        monkeypatch.setenv(name, "")  # to be restored
        monkeypatch.delenv(name)
    when_opened, store = [], dist.HashStore()
    monkeypatch.setattr(
        dist,
        "init_process_group",
        lambda *_, timeout, **__: when_opened.append((timeout, *map(os.environ.get, names))),
    )
    open_process_group(Launch(1, 1, 2, None), "nccl", store, timedelta(seconds=7))
    assert when_opened == [(timedelta(seconds=7), "3", "7")]


@pytest.mark.parametrize("rank,missing", [("0", "KeyError('LOCAL_RANK')"), ("x", "ValueError")])
def test_a_launchers_variables_are_checked(monkeypatch, rank, missing):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setenv("RANK", rank)
    with pytest.raises(ValueError, match=r"RANK is set, but .*start with torchrun, or") as raised:
        torchrun_launch()
    assert missing in str(raised.value)


@pytest.mark.parametrize("variable,launcher", OTHER_LAUNCHERS.items())
def test_a_launcher_that_is_not_torchrun_is_told_of_it(monkeypatch, variable, launcher):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv(variable, "1")
    assert torchrun_launch() is None
    monkeypatch.setenv(variable, "2")
    with pytest.raises(ValueError, match=rf"^{launcher} has .* 2 times .*let it run  torchrun "):
        torchrun_launch()


def test_a_network_interface_of_another_machine_is_refused(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,ib0")
    with pytest.raises(ValueError, match=r"^GLOO_SOCKET_IFNAME=lo,ib0: .* ib0"):
        set_environment()


def test_a_name_that_the_locale_cannot_write_is_refused_with_the_remedy():
    with pytest.raises(UnicodeEncodeError) as error:
        "größe".encode("ascii")
    assert in_words(error.value).endswith("'größe' cannot be written: set PYTHONUTF8=1")


def communicators_opened() -> list[tuple]:
    """Which groups and pairs this rank makes a communicator for, in order."""
    axes, opened = build_axes(torch.device("cpu"), Layout(pp=4, tp=2)), []

    def recorded(function):
        def call(tensor, **options):
            members = dist.get_process_group_ranks(options["group"])
            peer = options.get("group_dst", options.get("group_src"))
            pair = None if peer is None else frozenset({dist.get_rank(), members[peer]})
            opened.append((tuple(members), pair))
            return function(tensor, **options)

        return call

    names = ("all_reduce", "isend", "irecv")
    with mock.patch.multiple(dist, **{name: recorded(getattr(dist, name)) for name in names}):
        open_communicators(axes)
    assert all(axis.ledger.take_bytes() == 0 for axis in axes)
    groups = {tuple(dist.get_process_group_ranks(axis.group)) for axis in axes if axis.size > 1}
    assert {members for members, pair in opened if pair is None} == groups
    return opened


def test_all_communicators_are_opened_in_an_order_that_cannot_deadlock(pool):
    left = dict(enumerate(pool.run(8, communicators_opened)))
    pairs = {
        pair for opened in left.values() for members, pair in opened if members == (0, 2, 4, 6)
    }
    assert pairs == {None, *map(frozenset, [(0, 2), (2, 4), (4, 6), (6, 0)])}
    # A communicator is made when all its members have come to it, and blocks them until then.
    while any(left.values()):
        ready = [
            (members, pair)
            for members, pair in {opened[0] for opened in left.values() if opened}
            if all(left[r] and left[r][0] == (members, pair) for r in pair or members)
        ]
        assert ready, f"these wait for each other: {left}"
        for members, pair in ready:
            for rank in pair or members:
                left[rank].pop(0)


def waits(store: str) -> None:
    shorten_waits()
    with monitored(Launch(1, 1, 2, lambda timeout: dist.FileStore(store, 2)), 60):
        time.sleep(60)


def fails(store: str, rank: int, error: Exception, when=lambda ranks: True) -> None:
    """A rank that raises an error when a condition on its RankMonitor is fulfilled."""
    shorten_waits()
    with monitored(Launch(rank, rank, 2, lambda timeout: dist.FileStore(store, 2)), 60) as ranks:
        ranks.connecting = True  # it is not the user's mistake any more
        while not when(ranks):
            time.sleep(0.02)
        raise error


def trains_deterministically(path: Path) -> None:
    path.write_text(json.dumps({"training": {"deterministic": True}}))
    del os.environ["CUBLAS_WORKSPACE_CONFIG"]  # of conftest.py; this is a forked process

    def check(config, monitor) -> None:
        monitor.connect("gloo")
        assert torch.are_deterministic_algorithms_enabled()
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"

    alone = Launch(0, 0, 1, open_store=lambda timeout: dist.HashStore())
    processes._run_rank(check, load_config(str(path)), alone)


def test_a_deterministic_run_is_one_before_its_first_product(tmp_path):
    assert exit_codes(fork(trains_deterministically, tmp_path / "config.json")) == [0]


def test_a_waiting_rank_exits_when_another_has_reported_why_it_failed(tmp_path):
    store = str(tmp_path / "store")
    waiting = fork(waits, store)
    time.sleep(0.3)
    assert waiting.is_alive()
    assert exit_codes(fork(fails, store, 0, OSError("for a reason")), waiting) == [1, 1]


FAILED_WAIT = RuntimeError("gloo: connection closed")


def test_an_error_is_reported_alone_even_if_a_wait_has_failed_before(tmp_path, capfd):
    store = str(tmp_path / "store")
    gone = fork(fails, store, 0, FAILED_WAIT)
    # Rank 1 fails while rank 0 looks for missing ranks.
    error = KeyError("a fault")
    faulty = fork(fails, store, 1, error, lambda ranks: ranks.store.check(["failed 0"]))
    assert exit_codes(gone, faulty) == [1, 1]
    output = capfd.readouterr().err
    assert output.count("This was") == output.count("rank 1 failed") == 1, output
    assert output.count("Traceback") == 1


def test_a_wait_that_fails_after_the_report_of_another_rank_adds_nothing(tmp_path, capfd):
    store = str(tmp_path / "store")
    dist.FileStore(store, 2).set("reported", "")
    assert exit_codes(fork(fails, store, 1, FAILED_WAIT, lambda ranks: ranks.got_report)) == [1]
    assert capfd.readouterr().err == ""


def sigterm_to_the_parent() -> None:
    at_the_third_step(1, lambda: os.kill(os.getppid(), signal.SIGTERM))


def sigterm_to_one_rank() -> None:
    at_the_third_step(1, lambda: os.kill(os.getpid(), signal.SIGTERM))


@pytest.mark.parametrize(
    "sabotage,background", [(sigterm_to_the_parent, True), (sigterm_to_one_rank, False)]
)
def test_after_sigterm_a_run_saves_and_a_resumed_run_equals_the_unbroken_one(
    workplace, whole, sabotage, background
):
    name = sabotage.__name__
    stopped = workplace.main(workplace.config(name, checkpoint={"async": background}), sabotage)
    assert stopped.code == 0
    done = len(workplace.steps(name))
    # The signal makes its way through the parent process.
    assert done == 3 if sabotage is sigterm_to_one_rank else 3 <= done < 6
    saved = f"runs/{name}/step-0000000{done}"
    step, warning = f"step {done}/6", f"stopped by SIGTERM after step {done}: resume from {saved}"
    assert stopped.output.index(step) < stopped.output.index(warning)
    assert "hf" not in workplace.files(name)
    config = workplace.config(name, checkpoint={"load_path": "latest"})
    assert workplace.main(config).code == 0
    assert numbers(workplace.steps(name)) == whole


def sigterm_while_rank_1_builds_its_model() -> None:
    def waits(*_):
        os.kill(os.getppid(), signal.SIGTERM)
        time.sleep(30)

    train.build_model = waits


def test_sigterm_before_the_first_step_ends_well(workplace):
    config = workplace.config("early", distributed={"timeout_seconds": 20})
    stopped = workplace.main(config, sigterm_while_rank_1_builds_its_model)
    assert stopped.code == 0 and "Traceback" not in stopped.output
    assert stopped.output.count("stopped by SIGTERM before the first step: nothing was") == 1
    assert {*workplace.files("early")} <= {"metrics.jsonl", "run.jsonl"}  # of rank 0, if it began
    # Under torchrun each rank gets it, and rank 0 prints; so does a parent that still imports.
    for rank in ("0", "1"):
        code = "from picotron_min.runtime.launch import *; begin_process(); print(1, flush=True);"
        waiting = subprocess.Popen(
            [sys.executable, "-c", f"{code} time.sleep(30)"],
            env=os.environ | {"RANK": rank},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        waiting.stdout.readline()
        waiting.terminate()
        words = waiting.communicate(timeout=20)[1].decode()
        assert waiting.returncode == 0 and words.count("before the first step") == (rank == "0")


def start(workplace: Workplace, name: str, interrupts) -> multiprocessing.Process:
    """A long run in a process group of its own, in its first steps."""
    config = workplace.config(name, training={"total_train_steps": 10_000, "eval_frequency": 0})
    output = workplace.folder / f"{name}.txt"
    arguments = (workplace.folder, config, output, partial(lead_a_group, interrupts))
    process = workplace.pool.context.Process(target=run_main, args=arguments)
    process.start()
    metrics = workplace.folder / "runs" / name / "metrics.jsonl"
    for _ in range(1200):
        if metrics.exists() and metrics.read_text():
            return process
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    pytest.fail(f"no step in a minute:\n{output.read_text()}")


def lead_a_group(interrupts) -> None:
    os.setsid()
    signal.signal(signal.SIGINT, interrupts)


def wait_until_all_are_gone(group: int) -> None:
    for _ in range(200):
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    os.killpg(group, signal.SIGKILL)
    pytest.fail("processes are left after ten seconds")


def test_when_the_parent_dies_the_ranks_die(workplace):
    process = start(workplace, "orphans", interrupts=signal.SIG_IGN)  # as in a script, with "&"
    process.kill()
    process.join()
    wait_until_all_are_gone(process.pid)


def test_ctrl_c_ends_all_with_one_message(workplace):
    process = start(workplace, "interrupted", interrupts=signal.default_int_handler)  # a terminal's
    os.killpg(process.pid, signal.SIGINT)
    process.join(20)
    assert process.exitcode == 130
    wait_until_all_are_gone(process.pid)
    output = (workplace.folder / "interrupted.txt").read_text()
    assert output.count("stopped by Ctrl-C\nThis was in step") == 1 and "Traceback" not in output


def ends_late(folder: Path, code: int, launch: Launch) -> None:
    time.sleep(0.3 * launch.rank)
    (folder / str(launch.rank)).touch()
    sys.exit(code * launch.rank)


def test_the_last_rank_is_waited_for_and_the_exit_code_of_one_that_fails_is_the_runs(tmp_path):
    start_processes(partial(ends_late, tmp_path, 0), 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]
    with pytest.raises(SystemExit) as ended:
        start_processes(partial(ends_late, tmp_path, 3), 2)
    assert ended.value.code == 3


def listens(folder: Path, launch: Launch) -> None:
    open_process_group(launch, "gloo", launch.open_store(20), failures.LONG_WAIT)
    sockets = [
        os.readlink(path) for path in list(Path("/proc/self/fd").iterdir()) if path.is_symlink()
    ]
    found = []
    for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]:
        _, address, _, state, *_, inode = line.split()[:10]
        if state == "0A" and f"socket:[{inode}]" in sockets:  # 0A: listens
            found.append(address.split(":")[0])
    (folder / str(launch.rank)).write_text(" ".join([os.environ["GLOO_SOCKET_IFNAME"], *found]))


def test_ranks_that_we_start_ourselves_listen_on_loopback_alone(tmp_path):
    start_processes(partial(listens, tmp_path), 2)
    for rank in range(2):
        assert set((tmp_path / str(rank)).read_text().split()) == {"lo", "0100007F"}  # 127.0.0.1


def test_ctrl_c_in_a_fork_is_heeded_when_all_ranks_have_started(capfd):
    armed = [True]

    def interrupt() -> None:  # between two forks; Python swallows what this hook raises
        if armed:
            signal.raise_signal(signal.SIGINT)

    os.register_at_fork(after_in_parent=interrupt)
    # A shell without job control lets what it starts with & ignore Ctrl-C, and so this test.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    others = multiprocessing.active_children()  # the pool of other tests
    with pytest.raises(SystemExit) as ended:
        start_processes(lambda launch: time.sleep(10), 3)
    signal.signal(signal.SIGINT, before)
    armed.clear()
    assert ended.value.code == 130
    assert set(multiprocessing.active_children()) <= set(others)
    assert capfd.readouterr().err.count("stopped by Ctrl-C\nThis was before the first step") == 1


def test_ctrl_c_during_the_imports_prints_no_traceback(tmp_path):
    (tmp_path / "torch.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    command = [sys.executable, train.__file__, "--config", "config.json"]
    env = os.environ | {"PYTHONPATH": str(tmp_path)}
    # A shell without job control lets what it starts with & ignore Ctrl-C, and so this test.
    heed = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    done = subprocess.run(command, env=env, capture_output=True, timeout=60, preexec_fn=heed)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, b"", b"")
    (tmp_path / "torch.py").write_text("raise KeyError('a fault in the program')")
    done = subprocess.run(command, env=env, capture_output=True, timeout=60)
    assert done.returncode == 1 and b"KeyError: 'a fault in the program'" in done.stderr


def torchrun_that_restarts() -> None:
    shorten_waits()
    torchrun(*STANDALONE, "--nproc_per_node", "2", "--max-restarts", "2", main=main_that_dies_once)
    sys.exit(0)


def main_that_dies_once() -> None:
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        rank_1_dies()
    train.main()


def test_torchrun_restarts_a_run_that_resumes_from_the_latest_checkpoint(workplace, whole):
    config = workplace.config("restarted", checkpoint={"load_path": "latest"})
    outcome = workplace.main(config, torchrun_that_restarts)
    assert outcome.code == 0, outcome.output
    message = "lost rank 1: killed, or hanging" + RESUME.format("restarted")
    assert f"{message}\n(What follows is torchrun's own report." in outcome.output, outcome.output
    assert outcome.output.count("Done\n") == 1
    assert numbers(workplace.steps("restarted")) == whole


def test_kills_at_random_moments_change_nothing(workplace):
    from tests.kills import survive

    assert "survived 2 kills" in survive(workplace, kills=2, first=1, steps=24)
