"""Kill a run at random moments, resume it, and compare with an undisturbed run:

    python -m tests.kills --kills 30

The run saves every second step, in the background or not, in turn. Each kill is a SIGKILL: to all
processes at once, to one rank, or to all while a checkpoint is being written. After each kill the
run is resumed from "latest". In the end weights and losses must equal the undisturbed run's bit for
bit.
"""

import argparse
import json
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

from safetensors.torch import load_file

import train

MOMENTS = ("all ranks", "one rank", "in the middle of a save")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(survive(Path(folder), options.kills, options.seed, log=print))


def survive(
    folder: Path, kills: int, seed: int = 0, first: int = 0, steps: int = 60, log=lambda line: None
) -> str:
    """Raise AssertionError if anything differs; returns what happened."""
    (folder / "text.txt").write_text("the cat sat on a mat, and then it went to sleep; " * 400)
    undisturbed = start(folder, "undisturbed", steps)
    assert ended_with(undisturbed, 120) == 0, (folder / "undisturbed.txt").read_text()
    rng, counts = random.Random(seed), dict.fromkeys(MOMENTS, 0)
    done = 0
    while done < kills:
        run = start(folder, "killed", steps, in_background=(first + done) % 2 == 1)
        moment = MOMENTS[(first + done) % 3]
        if kill_at(folder, run, moment, rng, steps):
            done += 1
            counts[moment] += 1
            log(f"kill {done}: {moment}, at step {latest_step(folder)}")
        elif latest_step(folder) == steps:  # the run is complete: start another one
            compare(folder, steps)
            (folder / "killed").rename(folder / f"killed-{done}")
    last = start(folder, "killed", steps)
    assert ended_with(last, 120) == 0, (folder / "killed.txt").read_text()
    compare(folder, steps)
    return f"survived {kills} kills {counts}: losses and weights are equal to the last bit"


def ended_with(run: BaseProcess, seconds: float) -> int | None:
    run.join(seconds)
    return run.exitcode


def compare(folder: Path, steps: int) -> None:
    expected, survived = (losses(folder / run) for run in ("undisturbed", "killed"))
    assert survived == expected, "losses differ"
    for name in (f"step-{steps:08d}", "hf"):
        one, other = (tensors(folder / run / name) for run in ("undisturbed", "killed"))
        assert one.keys() == other.keys() and len(one) > 20
        assert all(one[key].equal(other[key]) for key in one), f"weights in {name} differ"


def start(folder: Path, name: str, steps: int, in_background: bool = False) -> BaseProcess:
    """A run in a process group of its own, resumed from its latest checkpoint if it has one."""
    config = {
        "distributed": {"dp_size": 2, "use_cpu": True},
        "model": {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
        "training": {
            "total_train_steps": steps,
            "seq_length": 32,
            "micro_batch_size": 2,
            "eval_batches": 0,
        },
        "dataset": {"name": "text.txt", "cache_dir": "cache"},
        "checkpoint": {
            "save_dir": name,
            "save_frequency": 2,
            "load_path": "latest",
            "async": in_background,
        },
        "environment": {"OMP_NUM_THREADS": 1},
    }
    (folder / f"{name}.json").write_text(json.dumps(config))
    # A fork of a process that has imported torch: starting is most of what this takes.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch._dynamo", "train"])
    run = context.Process(target=train_in, args=(folder, name))
    run.start()
    return run


def train_in(folder: Path, name: str) -> None:
    os.setsid()
    os.chdir(folder)
    with open(f"{name}.txt", "w") as output:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(output.fileno(), stream.fileno())
    sys.argv = ["train.py", "--config", f"{name}.json"]
    train.main()


def kill_at(folder: Path, run: BaseProcess, moment: str, rng: random.Random, steps: int) -> bool:
    """Kill a run after some random steps of its own; False if the moment did not come."""
    goal = min(latest_step(folder) + rng.randint(1, 8), steps - 1)
    while latest_step(folder) < goal:
        if not run.is_alive():
            assert run.exitcode == 0, (folder / "killed.txt").read_text()
            return False
        time.sleep(0.005)
    if moment == "in the middle of a save":
        deadline = time.monotonic() + 1
        while not (saving := list(folder.glob("killed/.*.partial"))):
            if time.monotonic() > deadline or not run.is_alive():
                break
    else:
        time.sleep(rng.random() * 0.05)
    if moment == "one rank":
        ranks = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
        if ranks:
            os.kill(int(rng.choice(ranks)), signal.SIGKILL)
    else:
        os.killpg(run.pid, signal.SIGKILL)
    return ended_with(run, 30) != 0 and (moment != "in the middle of a save" or bool(saving))


def latest_step(folder: Path) -> int:
    """The last step that the metrics have."""
    path = folder / "killed/metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return max((json.loads(line)["step"] for line in lines[-3:] if line.endswith("}")), default=0)


def losses(run: Path) -> dict[int, float]:
    """By step; a step that was done again must give the same loss again."""
    found: dict[int, float] = {}
    for line in (run / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line) if line.endswith("}") else {}
        if "loss" in record:
            assert found.setdefault(record["step"], record["loss"]) == record["loss"]
    return found


def tensors(folder: Path) -> dict:
    return {
        key: tensor
        for path in folder.glob("*.safetensors")
        for key, tensor in load_file(path).items()
    }


if __name__ == "__main__":
    main()
