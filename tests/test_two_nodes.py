"""Two nodes: two network namespaces with a wire between them, and a torchrun in each."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from tests.test_processes import ROOT
from tests.test_train import Workplace, numbers

# Everything dies with this script. A node is a network namespace and, so that it can be killed as
# a whole, a process namespace.
TWO_NODES = """
set -e
for node in 0 1; do
    unshare -n sleep 300 & place[$node]=$!
done
trap 'kill -9 $(jobs -p) 2>/dev/null || true' EXIT
sleep 0.2
ip link add wire0 type veth peer name wire1
for node in 0 1; do
    ip link set wire$node netns ${place[$node]}
    in="nsenter -t ${place[$node]} -n"
    $in ip link set lo up
    $in ip addr add 10.99.0.1$node/24 dev wire$node
    $in ip link set wire$node up
done
for node in 0 1; do
    GLOO_SOCKET_IFNAME=wire$node nsenter -t ${place[$node]} -n unshare -pf --kill-child \\
        PYTHON -m torch.distributed.run --nnodes 2 --node-rank $node --nproc_per_node 2 \\
        --master-addr 10.99.0.10 --master-port 29511 ROOT/train.py --config CONFIG \\
        > node$node.txt 2>&1 & run[$node]=$!
    echo ${run[$node]} > node$node.pid
done
wait ${run[1]} || true
wait ${run[0]}
"""


def namespaces_are_missing() -> str | None:
    if not all(map(shutil.which, ("unshare", "nsenter", "ip"))):
        return "unshare, nsenter and ip are needed"
    attempt = "unshare -n sleep 1 & sleep 0.1; ip link add wire0 netns $! type veth peer name wire1"
    command = ["unshare", "-Urn", "bash", "-ec", attempt]
    tried = subprocess.run(command, capture_output=True, text=True)
    return f"no namespaces here: {tried.stderr.strip()}" if tried.returncode else None


@pytest.fixture(scope="module")
def workplace(pool, tmp_path_factory) -> Workplace:
    if reason := namespaces_are_missing():
        pytest.skip(reason)
    return Workplace(tmp_path_factory.mktemp("nodes"), pool)


def two_nodes(workplace: Workplace, config: str) -> subprocess.Popen:
    script = TWO_NODES.replace("PYTHON", sys.executable).replace("ROOT", str(ROOT))
    return subprocess.Popen(
        ["unshare", "-Urn", "bash", "-c", script.replace("CONFIG", config)],
        cwd=workplace.folder,
        start_new_session=True,
    )


def end(process: subprocess.Popen) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def test_two_nodes_train_the_same_as_one(workplace):
    layout = {"dp_size": 2, "tp_size": 2}
    process = two_nodes(workplace, workplace.config("two", distributed=layout))
    try:
        assert process.wait(90) == 0, (workplace.folder / "node0.txt").read_text()
    finally:
        end(process)
    assert workplace.main(workplace.config("one", distributed=layout)).code == 0
    assert numbers(workplace.steps("two")) == numbers(workplace.steps("one"))


def test_when_a_node_dies_the_other_ends_and_names_its_ranks(workplace):
    layout = {"dp_size": 4, "timeout_seconds": 20}
    config = workplace.config(
        "dies", distributed=layout, training={"total_train_steps": 100_000, "eval_frequency": 0}
    )
    process = two_nodes(workplace, config)
    metrics = workplace.folder / "runs/dies/metrics.jsonl"
    try:
        for _ in range(600):
            if metrics.exists() and len(metrics.read_text().splitlines()) > 3:
                break
            time.sleep(0.1)
        os.kill(int((workplace.folder / "node1.pid").read_text()), signal.SIGKILL)
        began = time.monotonic()
        assert process.wait(60) != 0
        seconds = time.monotonic() - began
    finally:
        end(process)
    told = (workplace.folder / "node0.txt").read_text()
    assert seconds < 20, told  # sooner than any wait would take too long
    assert told.count("lost ranks 2, 3: killed, or hanging\nThat was in step") == 1, told
    assert "go on from runs/dies/step-" in told
