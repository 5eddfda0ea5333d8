"""What a run recorded: its metrics file, read for plans."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from statistics import median

from pydantic import BaseModel, Field, NonNegativeInt

from picotron_min.planner.choices import Candidate, Request
from picotron_min.planner.traffic import planned_traffic

WARM_UP = 5  # steps that are slower than those to come


class Measured(BaseModel, allow_inf_nan=False, strict=True):
    """Of a step; of a run the median after the warm-up, and the rest of its last step."""

    step: NonNegativeInt
    step_seconds: float = Field(gt=0)
    comm_bytes: dict[str, NonNegativeInt]  # by axis
    memory_gb: float = Field(ge=0)


class Start(BaseModel):
    after_step: NonNegativeInt = 0


def read_metrics(path: Path, request: Request, candidate: Candidate) -> Measured:
    """What a run of this config measured; ValueError if it was of another, or too short."""
    log = path.parent / "run.jsonl"  # a start for each time that the run resumed
    starts = [*_records(log, Event)] if log.is_file() else []
    begin = starts[-1].start.after_step if starts else 0
    # Of a step that was repeated, the later record counts.
    steps = {record.step: record for record in _records(path, Measured)}
    after = [record for step, record in steps.items() if step > begin]
    if len(after) <= WARM_UP:
        since = f" after step {begin}, where the run resumed" if begin else ""
        why = f"{path} has {len(after)} steps{since}"
        raise ValueError(f"{why}, and the first {WARM_UP} warm up: train at least {WARM_UP + 1}")
    last, sizes = after[-1], (request.model_config, candidate.layout, candidate.workload)
    theirs, ours = (
        {axis for axis, n in sent.items() if n}
        for sent in (last.comm_bytes, planned_traffic(*sizes))
    )
    if theirs != ours:
        used, plan = (" ".join(sorted(axes)) or "none" for axes in (theirs, ours))
        why = f"{path} is of a run that sent over the axes {used}; the config's are {plan}"
        raise ValueError(f"{why}: name the metrics of a run of this config")
    seconds = median(record.step_seconds for record in after[WARM_UP:])
    return last.model_copy(update={"step_seconds": seconds})


class Event(BaseModel):
    """A line of run.jsonl that is about a start."""

    start: Start


def _records(path: Path, kind: type[BaseModel]) -> Iterator:
    """The lines of a file that are of this kind; a kill may leave a part of one."""
    for line in path.read_bytes().splitlines():
        with suppress(ValueError):
            yield kind.model_validate_json(line)
