"""A short run of train.py, with keys of the config that differ from a plain one:

    python benchmarks/short_run.py fp8 '{"model": {"fp8": true}}'

"resumed" continues the run "plain". Files go to the folder $OUT; with DEVICE=cpu in the environment
the model is tiny.
"""

import json
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[1]
ON_CPU = os.environ.get("DEVICE") == "cpu"
OUT = Path(os.environ.get("OUT", tempfile.gettempdir()))


def main(name: str, keys: str) -> None:
    """20 steps of SmolLM-360M's shape on the bytes of Python's own library; medians at the end."""
    text = OUT / "text.npy"
    if not text.exists():  # ready token ids need no package beside numpy
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        documents = [np.frombuffer(f.read_bytes(), np.uint8).astype("u2") for f in files]
        np.save(text, np.concatenate([np.append(ids, np.uint16(256)) for ids in documents]))
    changes, resumes, steps = json.loads(keys), name == "resumed", 6 if ON_CPU else 20
    folder = OUT / ("run-plain" if resumes else f"run-{name}")
    in_16_bits = not ON_CPU or "fp8" in keys  # CPUs without instructions for it take minutes
    sizes = {"seq_length": 64, "micro_batch_size": 2} if ON_CPU else {"seq_length": 2048}
    config = {
        "distributed": {"use_cpu": ON_CPU},
        "model": {
            "name": "tiny" if ON_CPU else "SmolLM-360M",
            "vocab_size": 512,
            "dtype": "bfloat16" if in_16_bits else "float32",
        },
        "training": {"total_train_steps": steps + resumes * 10, "eval_batches": 1, **sizes},
        "dataset": {"name": str(text), "tokenizer": "bytes"},
        "checkpoint": {"save_dir": str(folder), "save_frequency": 10, "async": True},
    }
    if resumes:  # its checkpoint was written in the background
        config["checkpoint"]["load_path"] = "latest"
    for section, changed in changes.items():
        config[section] |= changed
    path = OUT / f"{name}.json"
    path.write_text(json.dumps(config))
    code = subprocess.run([sys.executable, "train.py", "--config", path], cwd=ROOT).returncode
    log = folder / "metrics.jsonl"
    rows = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    rows = [row for row in rows if "step_seconds" in row]  # not evaluations
    if code or not rows:
        raise SystemExit(f"trained {len(rows)} steps, then exit code {code}")
    medians = {
        key: statistics.median(row[key] or 0 for row in rows[5:])  # after the warm-up
        for key in ("tokens_per_second", "mfu", "memory_gb")
    }
    losses = f"loss {rows[0]['loss']:.3f} to {rows[-1]['loss']:.3f}"
    print(f"trained to step {rows[-1]['step']}, {losses}; medians {medians}")


if __name__ == "__main__":
    main(*sys.argv[1:])
