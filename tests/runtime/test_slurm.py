"""docs/train.sbatch on two "nodes" of this machine, with stand-ins for Slurm and torchrun."""

import contextlib
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

import train
from tests.workplace import ROOT, Workplace

SCRIPT = ROOT / "docs" / "train.sbatch"

# Runs its command once for each node. Like Slurm's, it kills its tasks if it gets SIGTERM itself.
SRUN = """#!/usr/bin/env bash
[ "$1" = --cpus-per-task=2 ] || exit 9
shift
for node in 0 1; do
    SLURM_NODEID=$node "$@" & tasks[$node]=$!
done
echo ${tasks[*]} > tasks
trap 'kill -KILL ${tasks[*]} $(cat pid.*)' TERM
code=0
for task in ${tasks[*]}; do
    wait $task || code=$?
    while kill -0 $task 2>/dev/null; do wait $task || code=$?; done
done
exit $code
"""

# Like Slurm's, it signals every process of the tasks, and neither the script nor srun.
SCANCEL = """#!/usr/bin/env bash
[ "$*" = "--signal=TERM $SLURM_JOB_ID" ] && kill -TERM $(cat tasks pid.*)
"""

SCONTROL = """#!/usr/bin/env bash
case "$1" in
    show) printf '127.0.0.1\\n127.0.0.2\\n' ;;
    requeue) echo "$2" >> requeued ;;
esac
"""

# Asks the test to fork its one rank from a process that has imported torch already, which saves
# seconds, and passes SIGTERM on; like torchrun it exits with 1 then.
TORCHRUN = """#!/usr/bin/env bash
node=$SLURM_NODEID
printf '%q ' "$@" > new.$node && mv new.$node call.$node
until [ -e pid.$node ] || [ -e exit.$node ]; do sleep 0.05; done
trap 'code=1; kill -TERM $(cat pid.$node)' TERM
until [ -e exit.$node ]; do sleep 0.05; done
exit ${code:-$(cat exit.$node)}
"""


def run_rank(folder: Path, torchrun: list[str]) -> None:
    """What torchrun starts, given its arguments."""
    arguments = get_args_parser().parse_args(torchrun)  # torchrun's own
    os.chdir(folder)
    output = os.open("output.txt", os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ |= {
        "RANK": str(arguments.node_rank),
        "LOCAL_RANK": "0",
        "WORLD_SIZE": arguments.nnodes,
        "MASTER_ADDR": arguments.master_addr,
        "MASTER_PORT": str(arguments.master_port),
    }
    assert arguments.nproc_per_node == "1"
    sys.argv = [arguments.training_script, *arguments.training_script_args]
    train.main()


def free_job_id() -> str:
    """A job whose port, which the script derives from its id, is free."""
    for port in range(20_000 + os.getpid() % 10_000, 30_000):
        with socket.socket() as attempt, contextlib.suppress(OSError):
            attempt.bind(("", port))
            return str(470_000 + port - 20_000)
    raise OSError("no free port")


class Cluster:
    """A workplace with the stand-ins, and a config that trains until it is stopped."""

    def __init__(self, workplace: Workplace) -> None:
        self.workplace, self.folder, self.pool = workplace, workplace.folder, workplace.pool
        self.job_id, self.jobs, self.ranks = free_job_id(), [], {}
        stand_ins = {"srun": SRUN, "scancel": SCANCEL, "scontrol": SCONTROL, "torchrun": TORCHRUN}
        for name, text in stand_ins.items():
            (self.folder / name).write_text(text)
            (self.folder / name).chmod(0o755)
        self.configure(total_train_steps=100_000)

    def configure(self, **training) -> None:
        frequencies = {"eval_frequency": 0, "eval_batches": 0}
        checkpoint = {"save_dir": "run", "save_frequency": 0, "load_path": "latest"}
        self.workplace.config("config", training=frequencies | training, checkpoint=checkpoint)

    def start_job(self) -> subprocess.Popen:
        """What Slurm does when the job's turn comes, on its first node."""
        environment = os.environ | {
            "PATH": f"{self.folder}:{os.environ['PATH']}",
            "PROCESSES_PER_NODE": "1",
            "SLURM_JOB_ID": self.job_id,
            "SLURM_JOB_NODELIST": "node[0-1]",
            "SLURM_NNODES": "2",
            "SLURM_CPUS_PER_TASK": "2",
            "SLURM_RESTART_COUNT": str(len(self.jobs)),
        }
        for old in self.folder.glob("exit.*"):
            old.unlink()
        with (self.folder / "output.txt").open("a") as output:
            job = subprocess.Popen(
                [SCRIPT, "config.json"],
                cwd=self.folder,
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.jobs.append(job)
        return job

    def output(self) -> str:
        return (self.folder / "output.txt").read_text()

    def fork_ranks(self) -> None:
        """Answer what the stand-ins for torchrun ask for."""
        for call in self.folder.glob("call.*"):
            arguments = shlex.split(call.read_text())
            rank = self.pool.context.Process(target=run_rank, args=(self.folder, arguments))
            rank.start()
            call.unlink()
            self.ranks[node := call.suffix] = rank
            (self.folder / f"pid{node}").write_text(str(rank.pid))
        for node, rank in list(self.ranks.items()):
            if rank.exitcode is not None:
                (self.folder / f"pid{node}").unlink()
                (self.folder / f"exit{node}").write_text(str(rank.exitcode))
                del self.ranks[node]

    def wait(self, job: subprocess.Popen, for_steps: bool = False) -> int | None:
        """Until the job has made three steps, or has ended; returns its exit code."""
        metrics = self.folder / "run" / "metrics.jsonl"
        for _ in range(1200):
            self.fork_ranks()
            if for_steps and metrics.exists() and metrics.read_text().count("\n") > 2:
                return None
            if (code := job.poll()) is not None:
                assert not for_steps, self.output()
                return code
            time.sleep(0.05)
        pytest.fail(f"still waiting after a minute:\n{self.output()}")

    def end(self) -> None:
        """Leave nothing running, whatever has failed."""
        for rank in self.ranks.values():
            rank.kill()
        for job in self.jobs:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(job.pid, signal.SIGKILL)
            job.wait()

    def checkpoints(self) -> list[int]:
        return sorted(int(p.name.removeprefix("step-")) for p in self.folder.glob("run/step-*"))


@pytest.fixture
def cluster(pool, shared_text, tmp_path):
    cluster = Cluster(Workplace(tmp_path, shared_text, pool))
    yield cluster
    cluster.end()


@pytest.mark.slow
def test_a_job_at_its_time_limit_saves_and_is_requeued_and_resumes(cluster):
    job = cluster.start_job()
    cluster.wait(job, for_steps=True)
    job.send_signal(signal.SIGUSR1)
    cluster.wait(job)
    assert (cluster.folder / "requeued").read_text() == f"{cluster.job_id}\n", cluster.output()
    (saved,) = cluster.checkpoints()
    assert not (cluster.folder / "run" / "hf").exists()

    cluster.configure(total_train_steps=saved + 2)
    assert cluster.wait(cluster.start_job()) == 0, cluster.output()
    assert f"resumed from run/step-{saved:08}" in cluster.output()
    assert cluster.checkpoints() == [saved, saved + 2]
    assert (cluster.folder / "requeued").read_text() == f"{cluster.job_id}\n"  # not again


def test_a_cancelled_or_preempted_job_saves_and_leaves_requeueing_to_slurm(cluster):
    job = cluster.start_job()
    cluster.wait(job, for_steps=True)
    job.send_signal(signal.SIGTERM)
    subprocess.run(["bash", "-c", "kill -TERM $(cat tasks pid.*)"], cwd=cluster.folder, check=True)
    cluster.wait(job)
    assert len(cluster.checkpoints()) == 1, cluster.output()
    assert not (cluster.folder / "requeued").exists()


def test_a_job_that_fails_exits_with_an_error_and_is_not_requeued(cluster):
    cluster.configure(learning_rate="fast")
    assert cluster.wait(cluster.start_job()) != 0
    assert "learning_rate" in cluster.output()
    assert not (cluster.folder / "requeued").exists()
