"""Metrics: all that a run records, as lines of JSON in two files.

    metrics.jsonl  StepRecord, EvalRecord, SaveRecord: shown, plotted, compared, sent to wandb
    run.jsonl      Start, Ranks: read by the report

Where a step occurs twice, after a resume, the later line counts. The report reads both files, so
there is no torch here, which takes seconds to import.
"""

import json
import os
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, NonNegativeInt

from picotron_min.extensions.settings import Layout, ModelConfig
from picotron_min.runtime.config import Config

RUN_LOG = "run.jsonl"  # in checkpoint.save_dir
AxisName = Literal[(*Layout().axis_sizes, "ends")]


@dataclass(frozen=True)
class StepRecord:
    """One training step; None where a number is not known."""

    step: int
    loss: float | None  # mean over the target tokens of the global batch
    grad_norm: float | None  # before clipping
    learning_rate: float
    tokens: int  # trained on so far
    tokens_per_second: float
    tokens_per_second_per_device: float
    mfu: float | None  # share of the devices' peak FLOPs, 0 to 1
    mfu_common: float | None  # MFU as others count it, 6 N + 12 L H Q T: for comparisons
    hfu: float | None  # MFU with what recomputation repeats
    step_seconds: float
    memory_gb: float  # the writing rank's peak so far
    comm_bytes: dict[AxisName, int]  # axis -> bytes this rank sent in the step
    measures: dict[str, float | list | None]  # by name: of extensions, and num_zeros_in_grad


@dataclass(frozen=True)
class EvalRecord:
    step: int
    val_loss: float | None
    bits_per_byte: float | None = None  # compares models of different tokenizers


@dataclass(frozen=True)
class SaveRecord:
    step: int
    save_seconds: float  # in which no step ran


class Start(BaseModel, frozen=True):
    """A run began, or resumed, with these settings on these devices."""

    at: datetime
    after_step: NonNegativeInt  # 0, or the step of the checkpoint that it resumes from
    header: dict[str, str]  # what the console shows
    device: str
    backend: str
    versions: dict[str, str]
    peak_flops: float | None  # of one device and a second; what MFU is a share of
    model: ModelConfig
    config: Config


class Sent(BaseModel, frozen=True):
    """What a rank sent over an axis by one collective."""

    calls: NonNegativeInt
    bytes: NonNegativeInt


class Rank(BaseModel, frozen=True):
    memory_gb: float  # peak so far
    sent: dict[AxisName, dict[str, Sent]]  # axis -> collective


class Ranks(BaseModel, frozen=True):
    """What each rank measured in a step. The records of steps are by one rank."""

    step: NonNegativeInt
    ranks: list[Rank]


EVENTS = {"start": Start, "ranks": Ranks}  # the only key of a line -> what it holds


def append_event(path: Path, event: Start | Ranks) -> None:
    key = type(event).__name__.lower()
    append_line(path, {key: event.model_dump(mode="json", by_alias=True)})


def append_line(path: Path, values: dict) -> None:
    """Add a line of JSON; a last one that a kill has torn does not swallow it."""
    with path.open("ab+") as file:
        is_torn = file.tell() and not (file.seek(-1, os.SEEK_END) and file.read() == b"\n")
        file.write(b"\n" * is_torn + json.dumps(values).encode() + b"\n")


class MetricsLog:
    """Appends records to a file of JSON lines, if given one, and, with options for it, to wandb."""

    def __init__(self, path: Path | None, wandb_options: dict | None = None) -> None:
        self.path, self.wandb = path, path and wandb_options and start_wandb(**wandb_options)

    def write(self, record: StepRecord | EvalRecord | SaveRecord) -> None:
        if not self.path:
            return
        # JSON has no NaN and no infinity: every reader takes null for a missing number.
        values = json.loads(json.dumps(asdict(record)), parse_constant=lambda name: None)
        values |= values.pop("measures", {})
        append_line(self.path, values)
        if self.wandb:
            known = {name: value for name, value in values.items() if value is not None}
            self.wandb.log(known, step=known.pop("step"))

    def close(self) -> None:
        if self.wandb:
            self.wandb.finish()  # prints a summary of its own
        self.wandb = None


def start_wandb(**options):
    """A wandb run that never prompts: online where the user is logged in, else offline."""
    import wandb

    mode = wandb.setup().settings.mode  # from WANDB_MODE, for example
    if mode == "online" and not wandb.login(prompt=False, verify=False):
        mode = "offline"
    try:
        return wandb.init(mode=mode, **options)
    except wandb.Error as error:  # of its server
        why = " ".join(str(error).split())[:200]
        print(f"warning: wandb cannot be reached ({why}): recorded as with WANDB_MODE=offline")
        wandb.teardown()  # it still holds the run that failed
        return wandb.init(mode="offline", **options)
