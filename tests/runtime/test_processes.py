"""How runs end: well, badly, and on request."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

import train
from picotron_min.runtime import failures, inputs, processes, reporter, saver
from picotron_min.runtime.failures import monitored
from picotron_min.runtime.launch import Launch
from picotron_min.runtime.processes import start_processes
from tests.pool import exit_codes, fork
from tests.workplace import STANDALONE, Workplace, run_main, torchrun


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
    def sabotage(*_):
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


def on_rank_1(module, name: str, action: Callable, rank_of: Callable = lambda *_: dist.get_rank()):
    """Let rank 1 do something else before it calls a function."""
    shorten_waits()
    function = getattr(module, name)

    def sabotaged(*arguments):
        if rank_of(*arguments) == 1:
            action(*arguments)
        return function(*arguments)

    setattr(module, name, sabotaged)


def rank_1_has_another_config() -> None:
    on_rank_1(inputs, "check_same", lambda settings, _: settings.update({"training.seed": 7}))


def rank_1_sees_another_folder() -> None:
    on_rank_1(inputs, "check_shared", lambda *_: os.chdir("/"))


def rank_1_does_not_start() -> None:
    on_rank_1(processes, "monitored", lambda *_: time.sleep(600), lambda launch, *_: launch.rank)


def rank_1_finds_a_mistake() -> None:
    mistake = raises(ValueError("the tokens do not fit the model"))
    on_rank_1(inputs, "read_inputs", lambda *_: time.sleep(1) or mistake(), lambda _, on: on.rank)


def rank_1_hangs_over_its_weights() -> None:
    failures.LONG_WAIT /= 3600
    on_rank_1(inputs, "initialise", lambda *_: time.sleep(600))


@pytest.mark.parametrize(
    "sabotage,reason",
    [
        (rank_1_dies, "rank 1 was killed by SIGKILL (perhaps because memory ran out)"),
        (rank_1_hangs, "timed out waiting for rank 1: hanging, or busy for more than 2 s"),
        (rank_0_finds_the_disk_full, "No space left on device: 'runs/somewhere'"),
        (all_ranks_raise, " failed"),
        (rank_1_has_another_config, "rank 1 was not started as rank 0: it has training.seed=7"),
        (rank_1_sees_another_folder, "is not the same folder on all nodes: rank 1"),
        (rank_1_does_not_start, "lost rank 1: not started within 2 s"),
        (rank_1_finds_a_mistake, "the tokens do not fit the model\n"),
        (rank_1_hangs_over_its_weights, "timed out waiting for rank 1"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_rank_that_fails_ends_the_others_and_is_named_once(workplace, sabotage, reason):
    name = sabotage.__name__
    layout = {"dp_size": 3, "timeout_seconds": 60 if sabotage is rank_1_finds_a_mistake else 2}
    outcome = workplace.main(workplace.config(name, distributed=layout), sabotage)
    output = outcome.output
    assert outcome.code == (2 if sabotage is rank_1_finds_a_mistake else 1) and outcome.seconds < 30
    assert output.count(reason) == 1, output
    assert output.count("Traceback") == (sabotage is all_ranks_raise) and "torchrun" not in output
    if "step 2/6" in output:  # what was done before is on the disk
        resume = f"This was in step 3: resume from runs/{name}/step-00000002 with checkpoint.load_p"
        assert output.count(resume) == output.count("resume from") == 1, output
        assert [record["step"] for record in workplace.steps(name)] == [1, 2]
        assert workplace.files(name) == ["metrics.jsonl", "run.jsonl", "step-00000002"]
    else:
        assert "This was before the first step" in output or outcome.code == 2
        assert {*workplace.files(name)} <= {"metrics.jsonl", "run.jsonl"}


def test_a_run_without_a_checkpoint_reports_that_none_was_saved(tmp_path):
    (tmp_path / "step-00000004").mkdir()  # as a user's own, or without its state
    assert failures.how_to_resume(str(tmp_path)) == "this run has saved no checkpoint"


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


@pytest.mark.parametrize("error", [allocates(bytearray, 2**62), RuntimeError("shapes differ")])
def test_an_error_without_numbers_is_shown_with_its_place(error):
    assert failures.plain_message(error, rank=3, is_usage=False) == ""


def ranks_are_slow(seconds: float) -> None:
    """Rank 1 over its tokens, its weights and its end, rank 0 over folders and old checkpoints."""
    wait = lambda *_: time.sleep(seconds)  # noqa: E731
    on_rank_1(inputs, "read_inputs", wait, lambda _, launch: launch.rank)
    on_rank_1(inputs, "initialise", wait)
    on_rank_1(reporter, "find_start", wait)
    for module, name in ((reporter, "make_room"), (saver, "delete_older")):
        on_rank_1(module, name, wait, lambda *_: 1 - dist.get_rank())


def test_ranks_may_prepare_and_finish_for_longer_than_the_timeout(workplace):
    checkpoint = {"keep": 1, "save_frequency": 4}
    config = workplace.config("slow", distributed={"timeout_seconds": 1}, checkpoint=checkpoint)
    outcome = workplace.main(config, partial(ranks_are_slow, 1.3))
    assert outcome.code == 0, outcome.output


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


FAILED_WAIT = RuntimeError("gloo: connection closed")


def test_a_waiting_rank_exits_when_another_has_reported_and_adds_nothing(tmp_path, capfd):
    store = str(tmp_path / "store")
    others = [fork(waits, store), fork(fails, store, 1, FAILED_WAIT, lambda r: r.got_report)]
    time.sleep(0.3)
    assert others[0].is_alive()
    assert exit_codes(fork(fails, store, 0, OSError("for a reason")), *others) == [1, 1, 1]
    words = capfd.readouterr().err.split()
    assert " ".join(words) == "for a reason This was before the first step"


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


def sigterm_to(process: Callable[[], int]) -> None:
    at_the_third_step(1, lambda: os.kill(process(), signal.SIGTERM))


@pytest.mark.parametrize("process", [os.getpid, os.getppid], ids=["a rank", "the parent"])
def test_after_sigterm_all_ranks_save_after_the_same_step(workplace, process):
    name = process.__name__
    config = workplace.config(name, checkpoint={"async": process is os.getppid})
    stopped = workplace.main(config, partial(sigterm_to, process))
    assert stopped.code == 0
    done = len(workplace.steps(name))
    # The signal makes its way through the parent process.
    assert done == 3 if process is os.getpid else 3 <= done < 6
    warning = f"stopped by SIGTERM after step {done}: resume from runs/{name}/step-0000000{done}"
    assert stopped.output.index(f"step {done}/6") < stopped.output.index(warning)
    assert "hf" not in workplace.files(name)


def sigterm_while_rank_1_builds_its_model() -> None:
    def waits(*_):
        os.kill(os.getppid(), signal.SIGTERM)
        time.sleep(30)

    train.build_model = waits


def test_sigterm_before_the_first_step_ends_well(workplace):
    stopped = workplace.main(workplace.config("early"), sigterm_while_rank_1_builds_its_model)
    assert stopped.code == 0 and "Traceback" not in stopped.output
    assert stopped.output.count("stopped by SIGTERM before the first step: nothing was") == 1
    assert {*workplace.files("early")} <= {"metrics.jsonl", "run.jsonl"}  # of rank 0, if it began


def start(workplace: Workplace, name: str, interrupts) -> multiprocessing.Process:
    """A long run in a process group of its own, in its first steps."""
    config = workplace.config(name, training={"total_train_steps": 10_000, "eval_frequency": 0})
    output = workplace.folder / f"{name}.txt"
    arguments = (workplace.folder, config, output, partial(lead_a_group, interrupts))
    process = workplace.pool.context.Process(target=run_main, args=arguments)
    process.start()
    metrics = workplace.folder / "runs" / name / "metrics.jsonl"
    wait_until(lambda: metrics.exists() and metrics.read_text(), process.pid)
    return process


def lead_a_group(interrupts) -> None:
    os.setsid()
    signal.signal(signal.SIGINT, interrupts)


def wait_until(happens: Callable[[], object], group: int) -> None:
    for _ in range(1200):
        if happens():
            return
        time.sleep(0.05)
    os.killpg(group, signal.SIGKILL)
    pytest.fail("waited for a minute")


def is_gone(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return True
    return False


def test_when_the_parent_dies_the_ranks_die(workplace):
    process = start(workplace, "orphans", interrupts=signal.SIG_IGN)  # as in a script, with "&"
    process.kill()
    process.join()
    wait_until(lambda: is_gone(process.pid), process.pid)


def test_ctrl_c_ends_all_with_one_message(workplace):
    process = start(workplace, "interrupted", interrupts=signal.default_int_handler)  # a terminal's
    os.killpg(process.pid, signal.SIGINT)
    process.join(20)
    assert process.exitcode == 130
    wait_until(lambda: is_gone(process.pid), process.pid)
    output = (workplace.folder / "interrupted.txt").read_text()
    assert output.count("stopped by Ctrl-C\nThis was in step") == 1 and "Traceback" not in output


def ends_late(folder: Path, code: int, launch: Launch) -> None:
    time.sleep(0.3 * launch.rank)
    (folder / str(launch.rank)).write_text(os.environ["GLOO_SOCKET_IFNAME"])
    sys.exit(code * launch.rank)


def test_the_last_rank_is_waited_for_and_the_exit_code_of_one_that_fails_is_the_runs(tmp_path):
    start_processes(partial(ends_late, tmp_path, 0), 2)
    # gloo, which authenticates no one, listens on loopback alone.
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"0": "lo", "1": "lo"}
    with pytest.raises(SystemExit) as ended:
        start_processes(partial(ends_late, tmp_path, 3), 2)
    assert ended.value.code == 3


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
    env = os.environ | {"PYTHONPATH": str(tmp_path)}
    heed = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # as above
    command = [sys.executable, train.__file__, "--config", "config.json"]
    done = subprocess.run(command, env=env, capture_output=True, timeout=60, preexec_fn=heed)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, b"", b"")


def torchrun_that_restarts() -> None:
    shorten_waits()
    torchrun(*STANDALONE, "--nproc_per_node", "2", "--max-restarts", "2", main=main_that_dies_once)
    sys.exit(0)


def main_that_dies_once() -> None:
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        rank_1_dies()
    train.main()


def test_torchrun_restarts_a_run_that_resumes_from_the_latest_checkpoint(workplace):
    config = workplace.config("restarted", checkpoint={"load_path": "latest"})
    outcome = workplace.main(config, torchrun_that_restarts)
    assert outcome.code == 0 and outcome.output.count("Done\n") == 1, outcome.output
    assert "lost rank 1: killed, or hanging\nThis was in step 3: resume from" in outcome.output
    assert "load_path latest\n(What follows is torchrun's own report." in outcome.output
    assert [record["step"] for record in workplace.steps("restarted")] == [1, 2, 3, 4, 5, 6]
