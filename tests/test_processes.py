"""How runs end: well, badly, and on request."""

import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch.distributed as dist
from filelock import FileLock

import train
from picotron_min.runtime import processes
from picotron_min.runtime.launch import Launch, torchrun_launch
from picotron_min.runtime.processes import RollCall
from tests.test_train import ROOT, Workplace, numbers
from tests.training import Training


@pytest.fixture(scope="module")
def workplace(pool, tmp_path_factory) -> Workplace:
    return Workplace(tmp_path_factory.mktemp("processes"), pool)


def be_impatient() -> None:
    processes.BEAT, processes.GRACE = 0.1, 1.0


def at_the_third_step(rank: int, happens: Callable[[], None]) -> None:
    """Patch the train step of one rank; forked processes inherit it."""
    be_impatient()
    step = Training.step

    def sabotaged(self, number, *watch):
        if number == 2 and dist.get_rank() == rank:
            happens()
        return step(self, number, *watch)

    Training.step = sabotaged


def rank_1_dies() -> None:
    at_the_third_step(1, lambda: os.kill(os.getpid(), signal.SIGKILL))


def rank_1_raises() -> None:
    def happens():
        raise RuntimeError("the connection to a database timed out")

    at_the_third_step(1, happens)


def rank_1_hangs() -> None:
    at_the_third_step(1, lambda: time.sleep(600))


def rank_0_finds_the_disk_full() -> None:
    def happens():
        raise OSError(28, "No space left on device", "runs/somewhere")

    at_the_third_step(0, happens)


GO_ON = "\nThat was in step 3: go on from runs/{}/step-00000002 with checkpoint.load_path latest"


@pytest.mark.parametrize(
    "sabotage,told,tracebacks",
    [
        (rank_1_dies, "rank 1 was killed by SIGKILL", 0),
        (rank_1_raises, "rank 1 failed", 1),
        (rank_1_hangs, "waited in vain for rank 1", 0),
        (rank_0_finds_the_disk_full, "No space left on device: 'runs/somewhere'", 0),
    ],
)
def test_a_rank_that_fails_ends_the_others_and_is_named_once(workplace, sabotage, told, tracebacks):
    name = sabotage.__name__
    config = workplace.config(name, distributed={"dp_size": 4, "timeout_seconds": 2})
    outcome = workplace.main(config, sabotage)
    assert outcome.code == 1 and outcome.seconds < 30
    assert outcome.output.count(told + GO_ON.format(name)) == 1, outcome.output
    assert outcome.output.count("Traceback") == tracebacks
    assert outcome.output.count("go on from") == 1
    # What was done before is there.
    assert [record["step"] for record in workplace.steps(name)] == [1, 2]
    assert workplace.files(name) == ["metrics.jsonl", "step-00000002"]


def all_ranks_raise() -> None:
    step = Training.step

    def sabotaged(self, number, *watch):
        if number == 2:
            raise KeyError("a fault in the program")
        return step(self, number, *watch)

    Training.step = sabotaged


def test_a_fault_that_all_ranks_have_is_told_once(workplace):
    config = workplace.config("all raise", distributed={"dp_size": 4})
    outcome = workplace.main(config, all_ranks_raise)
    assert outcome.code == 1
    assert outcome.output.count("Traceback") == outcome.output.count("go on from") == 1


def test_what_fails_before_anything_is_saved_says_so(workplace):
    config = workplace.config("unsaved", checkpoint={"save_frequency": 0})
    outcome = workplace.main(config, rank_1_dies)
    assert (
        "rank 1 was killed by SIGKILL\nThat was in step 3: this run has saved nothing"
        in outcome.output
    )


def rank_1_has_another_config() -> None:
    facts_in_common = train.facts_in_common

    def other(config, run):
        is_rank_0 = run.lock is not None
        return facts_in_common(config, run) | ({} if is_rank_0 else {"training.seed": 7})

    train.facts_in_common = other


def test_ranks_that_were_started_otherwise_are_refused(workplace):
    config = workplace.config("otherwise")
    outcome = workplace.main(config, rank_1_has_another_config)
    assert outcome.code == 1 and "Traceback" not in outcome.output
    told = "rank 1 was started otherwise than rank 0: it has training.seed=7, not 42."
    assert outcome.output.count(told) == 1, outcome.output
    assert workplace.files("otherwise") == []


def rank_1_sees_another_folder() -> None:
    check_shared = train.check_shared
    train.check_shared = lambda folder, *others: check_shared(
        folder if dist.get_rank() != 1 else Path("elsewhere"), *others
    )


def test_nodes_that_do_not_share_save_dir_are_told_before_the_first_step(workplace):
    config = workplace.config("unshared", distributed={"dp_size": 2, "timeout_seconds": 4})
    outcome = workplace.main(config, rank_1_sees_another_folder)
    assert outcome.code == 1 and "Traceback" not in outcome.output
    told = "is not the same folder on all nodes: rank 1 does not see there what rank 0 has written"
    assert outcome.output.count(told) == 1, outcome.output
    assert outcome.seconds < 20
    assert workplace.files("unshared") == []


def rank_1_does_not_come() -> None:
    be_impatient()
    prepare = train.prepare

    def hangs(config, launch):
        if launch.rank == 1:
            time.sleep(600)
        return prepare(config, launch)

    train.prepare = hangs


def test_ranks_that_do_not_come_are_named(workplace):
    config = workplace.config("absent", distributed={"dp_size": 2, "timeout_seconds": 2})
    outcome = workplace.main(config, rank_1_does_not_come)
    assert outcome.code == 1 and "Traceback" not in outcome.output
    told = "rank 1 did not come within 2 s (distributed.timeout_seconds): look at the output there"
    assert outcome.output.count(told) == 1, outcome.output


def rank_1_hangs_over_its_weights() -> None:
    be_impatient()
    initialise = train.initialise

    def hangs(*arguments):
        if dist.get_rank() == 1:
            time.sleep(600)
        initialise(*arguments)

    train.initialise = hangs


def test_a_rank_that_hangs_before_the_first_step_is_named(workplace):
    config = workplace.config("early", distributed={"dp_size": 2, "timeout_seconds": 2})
    outcome = workplace.main(config, rank_1_hangs_over_its_weights)
    told = "waited in vain for rank 1\nThat was before the first step: this run has saved nothing"
    assert outcome.code == 1 and told in outcome.output, outcome.output


def test_a_rank_0_that_is_not_there_or_has_no_port_is_told(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        monkeypatch.setenv("MASTER_PORT", str(port))
        monkeypatch.setenv("RANK", "0")
        with pytest.raises(OSError, match=f"cannot listen on port {port}, which another run may"):
            torchrun_launch().open_store(1)
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(OSError, match=f"rank 0 cannot be reached at 127.0.0.1:{port} within 1 s"):
        torchrun_launch().open_store(1)


def waits(store: str) -> None:
    be_impatient()
    RollCall(dist.FileStore(store, 2), Launch(1, 1, 2, None), timeout_seconds=60)
    time.sleep(60)


def fails(store: str, rank: int, error: Exception, after_seconds: float = 0) -> None:
    be_impatient()
    roll_call = RollCall(dist.FileStore(store, 2), Launch(rank, rank, 2, None), timeout_seconds=60)
    with roll_call.failures_told(plainly=(OSError,), for_good=ValueError):
        time.sleep(after_seconds)
        raise error


def fork(function: Callable, *arguments) -> multiprocessing.Process:
    process = multiprocessing.get_context("fork").Process(target=function, args=arguments)
    process.start()
    return process


def exit_codes(*processes: multiprocessing.Process) -> list[int]:
    for process in processes:
        process.join(10)
        process.kill()
    return [process.exitcode for process in processes]


def test_a_rank_that_waits_leaves_when_another_has_told_why_it_failed(tmp_path):
    store = str(tmp_path / "store")
    waiting = fork(waits, store)
    time.sleep(0.5)
    assert waiting.is_alive()
    assert exit_codes(fork(fails, store, 0, OSError("for a reason")), waiting) == [1, 1]


def test_a_fault_is_told_alone_also_if_a_wait_has_failed_before(tmp_path, capfd):
    store = str(tmp_path / "store")
    gone = fork(fails, store, 0, RuntimeError("gloo: connection closed"))
    faulty = fork(fails, store, 1, KeyError("a fault"), 0.5)
    assert exit_codes(gone, faulty) == [1, 1]
    told = capfd.readouterr().err
    assert told.count("Traceback") == told.count("That was") == 1 and "rank 1 failed" in told


def sigterm_to_the_parent() -> None:
    at_the_third_step(1, lambda: os.kill(os.getppid(), signal.SIGTERM))


def sigterm_to_one_rank() -> None:
    at_the_third_step(1, lambda: os.kill(os.getpid(), signal.SIGTERM))


@pytest.mark.parametrize(
    "sabotage,background", [(sigterm_to_the_parent, True), (sigterm_to_one_rank, False)]
)
def test_sigterm_saves_after_the_step_and_the_run_goes_on_as_if_nothing_had_been(
    workplace, sabotage, background
):
    name = sabotage.__name__
    whole = workplace.main(workplace.config("whole"))
    stopped = workplace.main(workplace.config(name, checkpoint={"async": background}), sabotage)
    assert whole.code == stopped.code == 0
    done = len(workplace.steps(name))
    # The signal takes its way through the parent process.
    assert done == 3 if sabotage is sigterm_to_one_rank else 3 <= done < 6
    saved = f"runs/{name}/step-0000000{done}"
    assert f"stopped by SIGTERM after step {done}: go on from {saved} with" in stopped.output
    assert "hf" not in workplace.files(name)
    config = workplace.config(name, checkpoint={"load_path": "latest"})
    assert workplace.main(config).code == 0
    assert numbers(workplace.steps(name)) == numbers(workplace.steps("whole"))


def start(workplace: Workplace, name: str, **options) -> subprocess.Popen:
    """A long run in a process group of its own, in its first steps."""
    config = workplace.config(name, training={"total_train_steps": 10_000, "eval_frequency": 0})
    output = (workplace.folder / f"{name}.txt").open("w")
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "train.py"), "--config", config],
        cwd=workplace.folder,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        **options,
    )
    metrics = workplace.folder / "runs" / name / "metrics.jsonl"
    for _ in range(600):
        if metrics.exists() and metrics.read_text():
            return process
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGKILL)
    pytest.fail(f"no step in a minute:\n{(workplace.folder / f'{name}.txt').read_text()}")


def wait_until_all_are_gone(group: int) -> None:
    for _ in range(100):
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return
        time.sleep(0.1)
    os.killpg(group, signal.SIGKILL)
    pytest.fail("processes are left after ten seconds")


def test_when_the_parent_dies_the_ranks_die(workplace):
    # As a script's `python train.py &` starts it: with SIGINT ignored.
    ignored = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_IGN)}
    process = start(workplace, "orphans", **ignored)
    process.kill()
    process.wait()
    wait_until_all_are_gone(process.pid)


def test_ctrl_c_ends_all_with_one_line(workplace):
    # As from a terminal, also where these tests were started with SIGINT ignored.
    as_usual = partial(signal.signal, signal.SIGINT, signal.default_int_handler)
    process = start(workplace, "interrupted", preexec_fn=as_usual)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(20) == 130
    wait_until_all_are_gone(process.pid)
    output = (workplace.folder / "interrupted.txt").read_text()
    assert output.count("stopped by Ctrl-C\nThat was in step") == 1 and "Traceback" not in output


def test_a_second_run_in_the_same_folder_is_refused(workplace):
    config = workplace.config("busy")
    (workplace.folder / "runs/busy").mkdir(parents=True)
    with FileLock(workplace.folder / "runs/busy/.lock"):
        outcome = workplace.main(config)
    assert outcome.code == 2
    assert "checkpoint.save_dir=runs/busy is in use by another run" in outcome.output
    assert workplace.files("busy") == []


DIES_ONCE = """
import os, signal, sys
sys.path.insert(0, {root!r})
import train
from tests.test_processes import at_the_third_step

if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    at_the_third_step(1, lambda: os.kill(os.getpid(), signal.SIGKILL))
train.main()
"""


def test_torchrun_restarts_a_run_that_goes_on_from_the_latest_checkpoint(workplace):
    script = workplace.folder / "dies_once.py"
    script.write_text(DIES_ONCE.format(root=str(ROOT)))
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
    config = workplace.config("restarted", checkpoint={"load_path": "latest"})
    outcome = workplace.command(*torchrun, "--max-restarts", "2", str(script), "--config", config)
    assert outcome.code == 0, outcome.output
    assert "lost rank 1: killed, or hanging" + GO_ON.format("restarted") in outcome.output
    assert workplace.main(workplace.config("once")).code == 0
    assert numbers(workplace.steps("restarted")) == numbers(workplace.steps("once"))


def test_kills_at_random_moments_change_nothing(tmp_path):
    from tests.kills import survive

    assert "survived 2 kills" in survive(tmp_path, kills=2, first=1)
