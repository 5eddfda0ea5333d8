"""Design 3: layouts for three jobs, measured by the planner."""

from dataclasses import replace
from pathlib import Path
from pprint import pformat
from typing import Any, NamedTuple

from exercises.exercise import Dice
from exercises.marks import Marks, constant, student_of
from picotron_min.extensions.settings import Workload
from picotron_min.planner.choices import Request
from picotron_min.planner.search import search
from picotron_min.runtime.hardware import GPUS
from picotron_min.runtime.public_models import PRESETS


class Job(NamedTuple):
    gpus: int
    seq_length: int
    global_batch: int
    network: float  # Gb/s of a GPU to other nodes


JOBS = {
    "one node": Job(8, 8192, 64, 400),
    "slow network": Job(64, 8192, 256, 25),
    "long sequences": Job(16, 32768, 32, 400),
}
SHARES = (0.80, 0.90, 0.97)  # of the best tokens/s, in all three jobs: one mark, two, three
CHOICES = {"tp": 1, "cp": 1, "pp": 1, "dp": 1, "sequence_parallel": False, "pp_engine": "1f1b"}
CHOICES |= {"pp_chunks": 1, "cp_engine": "ring", "sharding": "none", "recompute": "none"}
CHOICES |= {"micro_batch_size": 1, "ep": 1, "etp": 1, "ep_engine": "alltoall"}
TASK = '''\
"""Design 3: layouts of Llama-3.1-8B on H100s, in bfloat16 with AdamW, that fit and are fast.

{jobs}

Marks by the planner's tokens/s: at least 80%, 90%, 97% of its best, in all three. What you leave
out is 1, or as in config.json. Keys: tp cp pp dp sequence_parallel pp_engine pp_chunks cp_engine
sharding recompute micro_batch_size.
"""

LAYOUTS = {
    "one node": {"tp": 8, "dp": 1},
    "slow network": {"tp": 8, "dp": 8},
    "long sequences": {"tp": 8, "cp": 2},
}

# One sentence for each, for your teacher: why this layout?
REASONS = {
    "one node": "",
    "slow network": "",
    "long sequences": "",
}
'''


def jobs_of(student: str | None) -> dict[str, Job]:
    """The jobs of the course, or a student's own."""
    dice = Dice(f"design 3 {student}")
    own = {
        "one node": {"seq_length": dice.choice((4096, 8192, 16384))},
        "long sequences": {"seq_length": dice.choice((16384, 32768, 65536))},
        "slow network": {"network": dice.choice((20, 25, 40))},
    }
    return {name: job._replace(**own[name]) for name, job in JOBS.items()} if student else JOBS


def task_of(student: str | None) -> str:
    lines = [
        f"{name:15} {job.gpus} GPUs in nodes of 8, {job.network:g} Gb/s between nodes for each, "
        f"{job.global_batch} sequences\n{'':16}of {job.seq_length} tokens a step"
        for name, job in jobs_of(student).items()
    ]
    return TASK.replace("{jobs}", "\n".join(lines))


def measure(path: Path, _: Any) -> Marks:
    found = measure_layouts(constant(path, "LAYOUTS"), jobs_of(student_of(path)))
    reasons = pformat(constant(path, "REASONS"), width=100, sort_dicts=False)
    return found._replace(text=f"{found.text}\n{reasons}")


def measure_layouts(layouts: Any, jobs: dict[str, Job] = JOBS) -> Marks:
    if not isinstance(layouts, dict) or not all(isinstance(layouts.get(j), dict) for j in jobs):
        return Marks(0, f"LAYOUTS must have a dict for each of: {', '.join(jobs)}")
    found = {name: _share_of_best(job, layouts[name]) for name, job in jobs.items()}
    worst, texts = min(found.values())[0], (f"{name}: {text}" for name, (_, text) in found.items())
    return Marks(sum(worst >= limit for limit in SHARES), "\n".join(texts))


def _share_of_best(job: Job, given: dict) -> tuple[float, str]:
    """What share of the best tokens/s a layout reaches, and a line about it."""
    if unknown := sorted(given.keys() - CHOICES.keys()):
        return 0.0, f"{unknown[0]} is not a choice: use {', '.join(CHOICES)}"
    name, gpu = "meta-llama/Llama-3.1-8B", replace(GPUS["H100"], network=1e9 / 8 * job.network)
    work = Workload(job.seq_length, dtype="bfloat16")
    request = Request(PRESETS[name], gpu, job.gpus, work, job.global_batch, name)
    found = search(replace(request, fixed=CHOICES | given), top=1)
    if not found:
        return 0.0, f"does not fit: {job.gpus} GPUs of {gpu.memory / 1e9:.0f} GB, {given}"
    (mine, *_), (best, *_) = found[0], search(request, top=1)[0]
    share = best.prediction.step / mine.prediction.step
    memory = f"{mine.memory.total / 1e9:.1f} GB of {request.budget / 1e9:.1f}"
    return share, f"{share:.1%} of the best tokens/s, {memory}"
