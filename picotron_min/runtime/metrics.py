"""What a run records: one line a step in the metrics file, and the same in wandb.

A step is measured once, as a StepRecord. Everything that is shown, plotted or compared comes from
these records. One rank writes; on the others the same object does nothing.
"""

import inspect
import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path


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
    hfu: float | None  # the same, with what recomputation runs again
    step_seconds: float
    memory_gb: float  # the writing rank's peak so far
    comm_bytes: dict[str, int]  # axis -> bytes this rank sent in the step


@dataclass(frozen=True)
class EvalRecord:
    """One evaluation; bits_per_byte compares models of different tokenizers."""

    step: int
    val_loss: float
    bits_per_byte: float | None = None


@dataclass(frozen=True)
class SaveRecord:
    """One checkpoint; the step loop stood still for so long."""

    step: int
    save_seconds: float


class MetricsLog:
    """Appends every record to a file of JSON lines and, if asked, to wandb.

    A resumed run appends to the same file: where a step is there twice, the later line counts.
    `wandb_options` are `wandb.init`'s (project, name, config, dir), None for no wandb.
    """

    def __init__(self, path: Path, *, writes: bool, wandb_options: dict | None = None) -> None:
        self._file = self._run = None
        if writes:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a", encoding="utf-8")
            if wandb_options is not None:
                self._run = start_wandb(**wandb_options)

    def write(self, record: StepRecord | EvalRecord | SaveRecord) -> None:
        values = {name: finite_or_none(value) for name, value in asdict(record).items()}
        if self._file:
            try:
                self._file.write(json.dumps(values, allow_nan=False) + "\n")
                self._file.flush()  # so that a killed run leaves every step it finished
            except OSError as error:  # which does not say where
                raise OSError(error.errno, error.strerror, self._file.name) from None
        if self._run:
            known = {name: value for name, value in values.items() if value is not None}
            self._run.log(known, step=known.pop("step"))

    def close(self) -> None:
        if self._file:
            self._file.close()
        if self._run:
            self._run.finish()


def finite_or_none(value: object) -> object:
    """JSON has no NaN and no infinity; null is what every reader takes for a missing number."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def start_wandb(**options):
    """A wandb run that never asks: online where the user is logged in, else offline.

    WANDB_MODE and the other settings of wandb are read by wandb itself and win.
    """
    import wandb

    mode = wandb.setup().settings.mode
    if mode == "online" and not _is_logged_in(wandb):
        mode = "offline"
    return wandb.init(mode=mode, **options)


def _is_logged_in(wandb) -> bool:
    if "prompt" in inspect.signature(wandb.login).parameters:
        return wandb.login(prompt=False, verify=False)
    return bool(wandb.api.api_key)  # releases before `prompt` existed
