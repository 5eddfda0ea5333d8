"""Kill a run at random moments, resume it, and compare with an undisturbed run:

    python -m tests.kills --kills 30

The run saves every second step, in the background or not, in turn. Each kill is a SIGKILL: to all
processes at once, to one rank, or to all while a checkpoint is being written. After each kill the
run is resumed from "latest". In the end weights and losses must equal the undisturbed run's bit for
bit.
"""

import argparse
import json
import os
import random
import signal
import tempfile
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

from safetensors.torch import load_file

from tests.pool import Pool
from tests.workplace import Workplace, run_main, write_text

MOMENTS = ("all ranks", "one rank", "in the middle of a save")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as text:
        workplace = Workplace(Path(folder), write_text(Path(text)), Pool(("transformers",)))
        print(survive(workplace, options.kills, options.seed, log=print))
        workplace.pool.close()


def survive(
    workplace: Workplace,
    kills: int,
    seed: int = 0,
    first: int = 0,
    steps: int = 60,
    log=lambda line: None,
) -> str:
    """Raise AssertionError if anything differs; returns what happened."""
    assert ended_with(start(workplace, "undisturbed", steps), 120) == 0, "see undisturbed.txt"
    rng, counts, done = random.Random(seed), dict.fromkeys(MOMENTS, 0), 0
    killed = workplace.folder / "runs/killed"
    while done < kills:
        run = start(workplace, "killed", steps, in_background=(first + done) % 2 == 1)
        moment = MOMENTS[(first + done) % 3]
        if kill_at(killed, run, moment, rng, steps):
            done += 1
            counts[moment] += 1
            log(f"kill {done}: {moment}, at step {latest_step(killed)}")
        elif latest_step(killed) == steps:  # the run is complete: start another one
            compare(killed, steps)
            killed.rename(f"{killed}-{done}")
    assert ended_with(start(workplace, "killed", steps), 120) == 0, "see killed.txt"
    compare(killed, steps)
    return f"survived {kills} kills {counts}: losses and weights are equal to the last bit"


def start(workplace: Workplace, name: str, steps: int, in_background: bool = False) -> BaseProcess:
    """A run in a process group of its own, resumed from its latest checkpoint if it has one."""
    training = {"total_train_steps": steps, "eval_frequency": 0, "eval_batches": 0}
    checkpoint = {"load_path": "latest", "keep": 2, "async": in_background}
    config = workplace.config(name, training=training, checkpoint=checkpoint)
    arguments = (workplace.folder, config, workplace.folder / f"{name}.txt", os.setsid)
    run = workplace.pool.context.Process(target=run_main, args=arguments)
    run.start()
    return run


def ended_with(run: BaseProcess, seconds: float) -> int | None:
    run.join(seconds)
    return run.exitcode


def kill_at(killed: Path, run: BaseProcess, moment: str, rng: random.Random, steps: int) -> bool:
    """Kill a run after some random steps of its own; False if the moment did not come."""
    goal, saving = min(latest_step(killed) + rng.randint(1, 8), steps - 1), []
    while latest_step(killed) < goal:
        if not run.is_alive():
            assert run.exitcode == 0, "see killed.txt"
            return False
        time.sleep(0.005)
    if moment == "in the middle of a save":
        deadline = time.monotonic() + 1
        while not (saving := list(killed.glob(".*.partial"))):
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


def compare(killed: Path, steps: int) -> None:
    undisturbed = killed.with_name("undisturbed")
    assert losses(killed) == losses(undisturbed), "losses differ"
    for name in (f"step-{steps:08d}", "hf"):
        one, other = (tensors(run / name) for run in (undisturbed, killed))
        assert one.keys() == other.keys() and len(one) > 20
        assert all(one[key].equal(other[key]) for key in one), f"weights in {name} differ"


def latest_step(run: Path) -> int:
    """The last step that the metrics have."""
    return max((record["step"] for record in records(run)[-3:]), default=0)


def losses(run: Path) -> set[tuple[int, float]]:
    """Of each step; one that was done again must give the same loss again."""
    return {(record["step"], record["loss"]) for record in records(run) if "loss" in record}


def records(run: Path) -> list[dict]:
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]  # a kill may tear one


def tensors(folder: Path) -> dict:
    files = folder.glob("*.safetensors")
    return {key: tensor for path in files for key, tensor in load_file(path).items()}


if __name__ == "__main__":
    main()
