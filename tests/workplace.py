"""Runs of train.py as a user's, most of them without the seconds that imports take.

`Workplace.main` calls `train.main()` in a fork of the pool's server, which has imported torch and
transformers: the same as `python train.py`. `torchrun` forks its ranks, too. The first run makes
the tokens of the text, for all.
"""

import json
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

import train
from picotron_min.runtime import speed
from tests.pool import Pool
from tests.training import SHAPE

ROOT = Path(__file__).parent.parent
STEPS = 6
SENTENCE = "the cat sat on a mat, and then it went to sleep; nobody knows why"


class Outcome(NamedTuple):
    code: int
    output: str  # stdout and stderr
    seconds: float


def write_text(folder: Path) -> Path:
    """Write text.txt, and make room for its tokens."""
    text = " ".join(random.Random(0).choices(SENTENCE.split(), k=3000))
    (folder / "text.txt").write_text(text)
    (folder / "cache").mkdir()
    return folder


class Workplace:
    """A folder with a text in it, in which tests train as a user would."""

    def __init__(self, folder: Path, shared_text: Path, pool: Pool) -> None:
        self.folder, self.pool = folder, pool
        for name in ("text.txt", "cache"):
            (folder / name).symlink_to(shared_text / name)

    def config(self, name: str, **sections) -> str:
        """Write NAME.json, for a run that saves to runs/NAME; return the file's name."""
        raw = {
            "distributed": {"dp_size": 2, "use_cpu": True},
            "model": SHAPE,
            "training": {
                "learning_rate": 0.01,
                "schedule": "cosine",
                "warmup_steps": 2,
                "total_train_steps": STEPS,
                "seq_length": 32,
                "micro_batch_size": 2,
                "gradient_accumulation_steps": 2,
                "eval_frequency": 3,
                "eval_batches": 2,
            },
            "dataset": {"name": "text.txt", "cache_dir": "cache"},
            "checkpoint": {"save_dir": f"runs/{name}", "save_frequency": 2, "keep": 0},
            "environment": {"OMP_NUM_THREADS": "1"},
        }
        for section, keys in sections.items():
            raw[section] = raw.get(section, {}) | keys
        (self.folder / f"{name}.json").write_text(json.dumps(raw))
        return f"{name}.json"

    def main(self, config: str, sabotage: Callable[[], None] | None = None) -> Outcome:
        """Do what `python train.py --config CONFIG` does, after calling sabotage()."""
        output, began = self.folder / "output.txt", time.monotonic()
        arguments = (self.folder, config, output, sabotage)
        process = self.pool.context.Process(target=run_main, args=arguments)
        process.start()
        process.join(60)
        if process.is_alive():
            process.kill()
            pytest.fail(f"still running after a minute:\n{output.read_text()}")
        return Outcome(process.exitcode, output.read_text(), time.monotonic() - began)

    def steps(self, run: str) -> list[dict]:
        return [record for record in self.metrics(run) if "loss" in record]

    def evaluations(self, run: str) -> list[dict]:
        return [record for record in self.metrics(run) if "val_loss" in record]

    def metrics(self, run: str) -> list[dict]:
        lines = (self.folder / "runs" / run / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    def files(self, run: str) -> list[str]:
        names = (path.name for path in (self.folder / "runs" / run).iterdir())
        return sorted(name for name in names if name not in (".lock", ".run"))


def run_main(folder: Path, config: str, output: Path, sabotage: Callable[[], None] | None) -> None:
    os.chdir(folder)
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.environ["COLUMNS"] = "200"
    sys.argv = ["train.py", "--config", config]
    speed.measure_peak_flops = lambda dtype: 1e11  # to measure it takes 0.2 s
    if sabotage:
        sabotage()
    train.main()


# What torchrun makes of --standalone: any free port.
STANDALONE = ("--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0")


def torchrun(*arguments: str, main: Callable[[], None] = train.main) -> None:
    """What torchrun does, but it forks its workers from this process, where torch is imported."""
    from torch.distributed import run

    options = run.parse_args([*arguments, "train.py"])
    config, _, _ = run.config_from_args(options)
    config.start_method, config.monitor_interval = "fork", 0.05
    run.elastic_launch(config, main)()
