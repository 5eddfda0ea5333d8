"""The log of a run: run.jsonl in checkpoint.save_dir, beside the records of its steps.

A line for each start and each resume, and one with what every rank sent in a step. The report reads
it, so there is no torch here, which takes seconds to import.
"""

import json
from datetime import datetime
from pathlib import Path

from pydantic import BaseModel, NonNegativeInt

from picotron_min.extensions.settings import ModelConfig
from picotron_min.runtime.config import Config


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
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps({key: event.model_dump(mode="json", by_alias=True)}) + "\n")
