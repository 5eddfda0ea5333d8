"""Reading a run: what it has left in its folder, as plain data.

    metrics.jsonl    a line a step; written again after a resume       -> Run.steps, .evaluations
    run.jsonl        settings, devices, what each rank sent            -> Run.starts, .ranks
    a trace          named by logging.trace_file                       -> Run.trace

What is missing or damaged is left out, and `Run.notes` say so.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import NamedTuple

from pydantic import TypeAdapter

from picotron_min.extensions.settings import ModelConfig
from picotron_min.runtime import metrics
from picotron_min.runtime.config import Config
from picotron_min.runtime.draw import MeasuredStep, read_trace
from picotron_min.runtime.metrics import EvalRecord, SaveRecord, Start, StepRecord
from picotron_min.runtime.wording import counted


class Run(NamedTuple):
    """One folder. Steps are the ones that led to the model that the run ended with."""

    folder: Path
    steps: list[StepRecord]
    evaluations: list[EvalRecord]
    saves: list[SaveRecord]  # these, and all_steps, with what a resume has repeated
    all_steps: list[StepRecord]
    starts: list[Start]  # one more for each resume
    config: Config | None  # of the latest start
    model: ModelConfig | None
    ranks: metrics.Ranks | None
    trace: MeasuredStep | None
    notes: list[str]

    @property
    def seconds(self) -> float:
        """Of all steps, also of those that a resume has repeated: they cost as much."""
        return sum(step.step_seconds for step in self.all_steps)

    def mean_over_time(self, name: str) -> float | None:
        known = [step for step in self.all_steps if getattr(step, name) is not None]
        seconds = sum(s.step_seconds for s in known)
        return sum(getattr(s, name) * s.step_seconds for s in known) / seconds if seconds else None


def tokens_of(steps: Sequence[StepRecord]) -> float:
    return sum(step.tokens_per_second * step.step_seconds for step in steps)


def read_run(folder: Path) -> Run:
    """ValueError if the folder has no step of a run."""
    notes, log = [], folder / metrics.RUN_LOG
    events = [*_parse_lines(log, _event, notes)] if log.is_file() else []
    starts = [event for event in events if isinstance(event, Start)]
    if not starts:
        notes.append(f"{log} has no settings: only metrics.jsonl is shown")
    config, model = (starts[-1].config, starts[-1].model) if starts else (None, None)
    named = config and config.logging.metrics_file
    path = _find(Path(named or folder / "metrics.jsonl"), folder)
    if not path.is_file():
        raise ValueError(f"{path} does not exist: name the checkpoint.save_dir of a run")
    records = _read_records(path, notes)
    if not records[0]:
        why = "; ".join(notes) or "the run ended before its first one"
        raise ValueError(f"{folder} has no record of a step: {why}")
    # What ranks measured before the latest start may be of another layout.
    ranks = events[-1] if events and isinstance(events[-1], metrics.Ranks) else None
    trace = config and _read_trace(config.logging.trace_file, folder, starts[-1], notes)
    return Run(folder, *records, starts, config, model, ranks, trace, notes)


def _find(named: Path, folder: Path) -> Path:
    """A file that the config names: where the run wrote it, or in the folder, if that was moved."""
    return named if named.is_file() else folder / named.name


OBJECT = TypeAdapter(dict[str, object])


def _parse_lines(path: Path, parse: Callable[[dict], object], notes: list[str]) -> Iterator:
    """What `parse` makes of each line; a note counts those that it refuses with ValueError."""
    num_damaged = 0
    with path.open("rb") as lines:
        for line in lines:
            try:
                yield parse(OBJECT.validate_json(line))
            except ValueError:  # such as a line that a kill has cut off
                num_damaged += 1
    if num_damaged:
        notes.append(f"{path} has {counted(num_damaged, 'damaged line')}: left out")


def _event(values: dict) -> Start | metrics.Ranks:
    (key,) = values.keys() & metrics.EVENTS.keys()  # ValueError unless there is exactly one
    return metrics.EVENTS[key].model_validate(values[key])


def _read_records(path: Path, notes: list[str]) -> tuple[list, ...]:
    """The steps that led to the last one and their validations; then all saves and all steps."""
    steps, all_steps, evaluations, saves = [], [], [], []
    for record in _parse_lines(path, _record, notes):
        if isinstance(record, SaveRecord):
            saves.append(record)
        elif isinstance(record, EvalRecord):
            evaluations.append(record)
        else:
            # A step that is not after the one before begins where a run resumed. From there on
            # nothing of the abandoned branch counts, also where the new one is shorter.
            if steps and record.step <= steps[-1].step:
                steps = [earlier for earlier in steps if earlier.step < record.step]
                evaluations = [e for e in evaluations if e.step < record.step]
                if not steps:  # it did not resume: another run has begun in the same file
                    all_steps, saves = [], []
            steps.append(record)
            all_steps.append(record)
    return steps, evaluations, saves, all_steps


KNOWN = {field.name for field in fields(StepRecord)}
RECORDS = TypeAdapter(EvalRecord | SaveRecord | StepRecord)


def _record(values: dict) -> StepRecord | EvalRecord | SaveRecord:
    measures = {name: values[name] for name in values.keys() - KNOWN}  # of extensions and others
    return RECORDS.validate_python(values | {"measures": measures})


def _read_trace(
    name: str | None, folder: Path, start: Start, notes: list[str]
) -> MeasuredStep | None:
    """The trace that the config names; None, with a note, if it is not of this start."""
    if not name:
        return None
    path = _find(Path(name), folder)
    try:
        if not path.is_file():
            raise ValueError("it does not exist, and is written at the end")
        trace = read_trace(str(path))
        # A file of this name may be left from an earlier run, or be replaced by a later one.
        if trace.run_began != start.at.isoformat():
            raise ValueError(f"it is of another run, that began {trace.run_began}")
        return trace
    except ValueError as error:
        notes.append(f"{name} is left out: {error}")
