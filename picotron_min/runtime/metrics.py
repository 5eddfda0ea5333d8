"""Metrics: all that a run records, as lines of JSON in two files.

    metrics.jsonl  StepRecord, EvalRecord, SaveRecord: shown, plotted, compared, sent to wandb
    run.jsonl      Start, Ranks: read by the report

Where a step occurs twice, after a resume, the later line counts. The report reads both files, so
there is no torch here, which takes seconds to import.
"""

import json
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TextIO

from pydantic import BaseModel, NonNegativeInt

from picotron_min.extensions.settings import ModelConfig
from picotron_min.runtime.config import Config

RUN_LOG = "run.jsonl"  # in checkpoint.save_dir


@dataclass(frozen=True)
class StepRecord:
    """One training step; None where a number is not known."""

    step: int
    loss: float  # mean over the target tokens of the global batch
    grad_norm: float  # before clipping
    learning_rate: float
    tokens: int  # trained on so far
    tokens_per_second: float
    tokens_per_second_per_device: float
    mfu: float | None  # share of the devices' peak FLOPs, 0 to 1
    mfu_common: float | None  # MFU as others count it, 6 N + 12 L H Q T: for comparisons
    hfu: float | None  # MFU with what recomputation repeats
    step_seconds: float
    memory_gb: float  # the writing rank's peak so far
    comm_bytes: dict[str, int]  # axis -> bytes this rank sent in the step
    num_zeros_in_grad: int | None = None  # on request: elements of the gradient that are 0
    cp_imbalance: float | None = None  # with documents apart: of a ring's busiest rank to the mean
    joules: float | None = None  # on request: see energy.py
    joules_per_token: float | None = None
    watts: float | None = None  # mean of a GPU or, on CPUs, of a machine
    balance: dict[str, object] = field(default_factory=dict)  # of extensions, by name


@dataclass(frozen=True)
class EvalRecord:
    step: int
    val_loss: float
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
    sent: dict[str, dict[str, Sent]]  # axis -> collective


class Ranks(BaseModel, frozen=True):
    """What each rank measured in a step. The records of steps are those of one rank."""

    step: NonNegativeInt
    ranks: list[Rank]


EVENTS = {"start": Start, "ranks": Ranks}  # the only key of a line -> what it holds


def append_event(path: Path, event: Start | Ranks) -> None:
    key = type(event).__name__.lower()
    with open_lines(path) as file:
        file.write(json.dumps({key: event.model_dump(mode="json", by_alias=True)}) + "\n")


def open_lines(path: Path) -> TextIO:
    """A file to add lines to; a last one that a kill has torn does not swallow the next."""
    is_torn = False
    if path.is_file() and (size := path.stat().st_size):
        with path.open("rb") as file:
            file.seek(size - 1)
            is_torn = file.read() != b"\n"
    file = path.open("a", encoding="utf-8", buffering=1)  # by line: a kill loses none
    file.write("\n" * is_torn)
    return file


class MetricsLog:
    """Appends records to a file of JSON lines, if given one, and, with options for it, to wandb."""

    def __init__(self, path: Path | None, wandb_options: dict | None = None) -> None:
        self._file = path and open_lines(path)
        self._run = path and wandb_options and start_wandb(**wandb_options)

    def write(self, record: StepRecord | EvalRecord | SaveRecord) -> None:
        # JSON has no NaN and no infinity: every reader takes null for a missing number.
        values = json.loads(json.dumps(asdict(record)), parse_constant=lambda name: None)
        values |= values.pop("balance", {})  # its metrics are those of a step as any other
        if self._file:
            try:
                self._file.write(json.dumps(values) + "\n")
            except OSError as error:  # without a name; and closing the file would fail again
                error.filename, self._file = self._file.name, None
                raise
        if self._run:
            known = {name: value for name, value in values.items() if value is not None}
            self._run.log(known, step=known.pop("step"))

    def close(self) -> None:
        if self._file:
            self._file.close()
        if self._run:
            self._run.finish()  # prints a summary of its own
        self._file = self._run = None


def check_writable(**files: str | None) -> None:
    """Make the folders of these files; ValueError, with its key, for one that cannot be written."""
    for key, path in ((key, Path(path)) for key, path in files.items() if path):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            is_new = not path.exists()
            path.open("a").close()
            if is_new:
                path.unlink()
        except OSError as error:
            problem = f"logging.{key}={path} cannot be written ({error.strerror})"
            raise ValueError(f"{problem}: name another file") from None


def start_wandb(**options):
    """A wandb run that never prompts: online where the user is logged in, else offline."""
    import wandb

    mode = wandb.setup().settings.mode  # from WANDB_MODE, for example
    if mode == "online":
        try:
            is_logged_in = wandb.login(prompt=False, verify=False)
        except TypeError:  # an older release, without `prompt`
            is_logged_in = wandb.api.api_key
        mode = "online" if is_logged_in else "offline"
    return wandb.init(mode=mode, **options)
