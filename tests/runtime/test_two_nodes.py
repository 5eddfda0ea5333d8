"""Two nodes: two network namespaces with a wire between them, and a torchrun in each."""

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from tests.runtime.test_processes import rank_0_finds_the_disk_full, shorten_waits
from tests.workplace import Workplace, run_main, torchrun

pytestmark = pytest.mark.slow

# Prints the process that holds each node's namespace. Everything is gone when this script ends.
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
echo ${place[0]} ${place[1]}
wait
"""
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000


def missing_namespaces() -> str | None:
    if not all(map(shutil.which, ("unshare", "nsenter", "ip"))):
        return "unshare, nsenter and ip are needed"
    attempt = "unshare -n sleep 1 & sleep 0.1; ip link add wire0 netns $! type veth peer name wire1"
    command = ["unshare", "-Urn", "bash", "-ec", attempt]
    tried = subprocess.run(command, capture_output=True, text=True)
    return f"no namespaces here: {tried.stderr.strip()}" if tried.returncode else None


@pytest.fixture(scope="module")
def places() -> Iterator[list[int]]:
    """A process in the network namespace of each node."""
    if reason := missing_namespaces():
        pytest.skip(reason)
    command = ["unshare", "-Urn", "bash", "-c", TWO_NODES]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as script:
        yield [int(pid) for pid in script.stdout.readline().split()]
        script.terminate()


@contextlib.contextmanager
def two_nodes(
    workplace: Workplace, places: list[int], config: str, port: int, sabotage: Callable
) -> Iterator[list[BaseProcess]]:
    """Both nodes, running one config."""
    nodes = []
    for node, place in enumerate(places):
        arguments = (workplace.folder, config, node, place, port, sabotage)
        nodes.append(workplace.pool.context.Process(target=start_node, args=arguments))
        nodes[-1].start()
    try:
        yield nodes
    finally:
        for node, process in enumerate(nodes):
            process.join(30)
            if process.is_alive():
                kill(workplace.folder, node)


def kill(folder: Path, node: int) -> None:
    os.kill(int((folder / f"node{node}.pid").read_text()), signal.SIGKILL)


def start_node(
    folder: Path, config: str, node: int, place: int, port: int, sabotage: Callable
) -> None:
    """Enter a node's network, and a process namespace so that the node can be killed as a whole."""
    libc = ctypes.CDLL(None, use_errno=True)
    spaces = [os.open(f"/proc/{place}/ns/{kind}", os.O_RDONLY) for kind in ("user", "net")]
    for space, kind in zip(spaces, (CLONE_NEWUSER, CLONE_NEWNET), strict=True):
        assert libc.setns(space, kind) == 0, os.strerror(ctypes.get_errno())
    assert libc.unshare(CLONE_NEWPID) == 0, os.strerror(ctypes.get_errno())
    if first := os.fork():
        (folder / f"node{node}.pid").write_text(str(first))
        _, status = os.waitpid(first, 0)
        os._exit(os.waitstatus_to_exitcode(status) % 256)
    run_main(folder, config, folder / f"node{node}.txt", partial(run_node, node, port, sabotage))


def run_node(node: int, port: int, sabotage: Callable) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = f"wire{node}"
    sabotage()
    rendezvous = ("--master-addr", "10.99.0.10", "--master-port", str(port))
    torchrun("--nnodes", "2", "--node-rank", str(node), "--nproc_per_node", "2", *rendezvous)
    sys.exit(0)


def test_when_a_node_dies_the_other_ends_and_names_its_ranks(workplace, places):
    layout, steps = {"dp_size": 4, "timeout_seconds": 20}, {"total_train_steps": 100_000}
    config = workplace.config("dies", distributed=layout, training=steps | {"eval_frequency": 0})
    metrics = workplace.folder / "runs/dies/metrics.jsonl"
    with two_nodes(workplace, places, config, 29512, shorten_waits) as nodes:
        deadline = time.monotonic() + 60
        while not metrics.exists() or metrics.read_text().count("loss") < 3:
            assert time.monotonic() < deadline, (workplace.folder / "node0.txt").read_text()
            time.sleep(0.1)
        kill(workplace.folder, 1)
        nodes[0].join(18)  # sooner than any wait would take too long
        assert nodes[0].exitcode == 1
    output = (workplace.folder / "node0.txt").read_text()
    message = "lost ranks 2, 3: killed, or hanging\nThis was in step"
    assert output.count(message) == output.count("resume from runs/dies/step-") == 1, output


def test_an_error_on_the_node_of_the_store_is_reported_there(workplace, places):
    config = workplace.config("full", distributed={"dp_size": 4})
    with two_nodes(workplace, places, config, 29513, rank_0_finds_the_disk_full) as nodes:
        pass
    assert [node.exitcode for node in nodes] == [1, 1]
    first, second = ((workplace.folder / f"node{node}.txt").read_text() for node in (0, 1))
    message = "No space left on device: 'runs/somewhere'\nThis was in step 3: resume from"
    assert first.count(message) == 1 and "This was" not in second, first + second
