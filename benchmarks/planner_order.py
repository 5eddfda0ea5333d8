"""Does the planner put layouts of this machine in their true order?

    python benchmarks/planner_order.py                 fourteen layouts, twice in turn: 20 minutes
    python benchmarks/planner_order.py --rounds 1 --steps 8    a quick look

Every layout trains the same number of tokens a step, float32, on processes with one thread each.
Three runs calibrate the planner (one process, tensor parallel, context parallel). Then all steps
are predicted, and compared with the measured ones: medians of the steps after the first five. Where
there are more processes than cores, they share them. Run it on a machine that does nothing else.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from statistics import median

from picotron_min.planner.calibrate import Observation, calibrate
from picotron_min.planner.config_files import model_of, predicted
from picotron_min.planner.machine import machine
from picotron_min.planner.measured import read_metrics
from picotron_min.planner.validate import spearman
from picotron_min.runtime.config import Config
from picotron_min.runtime.config_file import parse_config
from picotron_min.runtime.hardware import Gpu

ROOT = Path(__file__).parent.parent
MODEL = {
    "name": "tiny",
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
TOKENS = 16 * 256  # a step
CALIBRATES = ("one process", "tp 2", "cp 2 ring")
# The layout; the length of sequences, and how many are in a micro-batch.
LAYOUTS = {
    "one process": ({}, 256, 4),
    "dp 2": ({"dp_size": 2}, 256, 4),
    "tp 2": ({"tp_size": 2}, 256, 4),
    "tp 2 sequence": ({"tp_size": 2, "sequence_parallel": True}, 256, 4),
    "pp 2, 4 micro-batches": ({"pp_size": 2}, 256, 4),
    "pp 2, 8 micro-batches": ({"pp_size": 2}, 256, 2),
    "pp 2 afab": ({"pp_size": 2, "pp_engine": "afab"}, 256, 4),
    "pp 2 interleaved": ({"pp_size": 2, "pp_engine": "interleaved", "pp_chunks": 2}, 256, 4),
    "one process, 2048": ({}, 2048, 1),
    "cp 2 ring": ({"cp_size": 2}, 2048, 1),
    "cp 2 ulysses": ({"cp_size": 2, "cp_engine": "ulysses"}, 2048, 1),
    "dp 2 tp 2": ({"dp_size": 2, "tp_size": 2}, 256, 4),
    "pp 4": ({"pp_size": 4}, 256, 4),
    "tp 4": ({"tp_size": 4}, 256, 4),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=15, help="of each run; five warm up")
    parser.add_argument("--cores", type=int, default=2)
    flags = parser.parse_args()
    seconds = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(flags.rounds):
            for name in LAYOUTS:
                seconds[name].append(measure(name, Path(folder, str(turn), name), flags.steps))
                print(f"round {turn + 1}  {name:24}{seconds[name][-1]:8.3f} s", flush=True)
    compare({name: median(times) for name, times in seconds.items()}, flags.cores)


def config_of(name: str, folder: Path, steps: int) -> dict:
    distributed, seq_length, size = LAYOUTS[name]
    sequences = TOKENS // seq_length // distributed.get("dp_size", 1)
    training = {"seq_length": seq_length, "micro_batch_size": size, "total_train_steps": steps}
    training |= {"gradient_accumulation_steps": sequences // size, "eval_batches": 0}
    return {
        "distributed": distributed | {"use_cpu": True},
        "model": MODEL,
        "training": training,
        "dataset": {"tokenizer": "bytes"},
        "checkpoint": {"save_dir": str(folder)},
        "environment": {"OMP_NUM_THREADS": 1},
    }


def measure(name: str, folder: Path, steps: int) -> float:
    """Train, and return the median step."""
    folder.mkdir(parents=True)
    path = folder.with_suffix(".json")
    path.write_text(json.dumps(config_of(name, folder, steps)))
    command = [sys.executable, ROOT / "train.py", "--config", path]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return read_metrics(folder / "metrics.jsonl").step_seconds


def compare(seconds: dict[str, float], cores: int) -> None:
    """Print what is predicted beside what was measured, and how well the orders agree."""
    configs = {name: parse_config(config_of(name, Path("unused"), 10)) for name in seconds}
    runs = [observation(configs[name], seconds[name], cores) for name in CALIBRATES]
    found = calibrate(runs).found
    print("\ncalibrated: " + ", ".join(f"{name} {value:.3g}" for name, value in found.items()))
    steps = {name: step_of(config, cores, found) for name, config in configs.items()}
    print(f"\n{'':24}{'measured s':>12}{'predicted s':>13}{'error':>9}")
    for name in sorted(seconds, key=seconds.get):
        error = steps[name] / seconds[name] - 1
        print(f"{name:24}{seconds[name]:>12.3f}{steps[name]:>13.3f}{error:>+9.1%}")
    order = spearman([seconds[name] for name in seconds], [steps[name] for name in seconds])
    best, chosen = min(seconds, key=seconds.get), min(steps, key=steps.get)
    print(f"\nSpearman {order:.2f}; the predicted best, {chosen}, takes", end=" ")
    print(f"{seconds[chosen] / seconds[best]:.3f} times the measured best, {best}")


def observation(config: Config, seconds: float, cores: int) -> Observation:
    request, candidate = predicted(config, model_of(config), cpu(config, cores))
    return Observation(request.setting(candidate.layout, candidate.workload), seconds)


def step_of(config: Config, cores: int, found: dict[str, float]) -> float:
    gpu = replace(cpu(config, cores), **found)
    return predicted(config, model_of(config), gpu)[1].prediction.step


def cpu(config: Config, cores: int) -> Gpu:
    return machine("cpu", Path("no hardware.json"), config.world_size, cores)


if __name__ == "__main__":
    main()
