"""Folders as runs leave them, written by what runs write with, for tests of the report."""

import json
from collections.abc import Iterable
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path

from picotron_min.extensions.schedules.registry import build_plans
from picotron_min.extensions.schedules.simulator import simulate
from picotron_min.planner.traffic import planned_ledger, planned_traffic
from picotron_min.runtime.config import Config
from picotron_min.runtime.config_checks import resolve_model
from picotron_min.runtime.config_file import parse_config
from picotron_min.runtime.metrics import (
    RUN_LOG,
    EvalRecord,
    MetricsLog,
    Rank,
    Ranks,
    SaveRecord,
    Sent,
    Start,
    StepRecord,
    append_event,
)
from tests.runtime.test_metrics import RECORD

PIPELINE = {"distributed": {"pp_size": 2, "tp_size": 2, "dp_size": 2}}


STARTED = datetime(2026, 11, 22, 6, 30, tzinfo=timezone.utc)


def config_of(folder: Path, sections: dict) -> Config:
    """Of a run that saves to the folder."""
    raw = {"training": {"gradient_accumulation_steps": 4}, **sections}
    raw["checkpoint"] = {"save_dir": str(folder)}
    raw["logging"] = {"trace_file": str(folder / "trace.json")} | raw.get("logging", {})
    return parse_config(raw)


def record(step: int, config: Config, **values) -> StepRecord:
    model = resolve_model(config)
    measured = {
        "loss": 5.0 / step,
        "tokens": step * config.tokens_per_step,
        "tokens_per_second": 1000.0 + step,
        "mfu": 0.3 + step / 1000,
        "mfu_common": 0.4 + step / 1000,
        "step_seconds": 0.5,
        "memory_gb": 0.3,
        "comm_bytes": planned_traffic(model, config.layout, config.workload),
    }
    return replace(RECORD, step=step, **(measured | values))


def write_records(folder: Path, config: Config, steps: Iterable[int], **values) -> None:
    log = MetricsLog(folder / "metrics.jsonl")
    for step in steps:
        log.write(record(step, config, **values))
        if step % 5 == 0:
            log.write(EvalRecord(step, 4.0 / step, 1.5))
            log.write(SaveRecord(step, 0.25))
    log.close()


def write_start(folder: Path, config: Config, after_step: int = 0) -> None:
    start = Start(
        at=STARTED,
        after_step=after_step,
        header={"model": "tiny <b>& co</b>", "MFU": "left out: the table has it"},
        device="Some CPU",
        backend="gloo",
        versions={"torch": "2.13.0"},
        peak_flops=1e11,
        model=resolve_model(config),
        config=config,
    )
    append_event(folder / RUN_LOG, start)


def write_ranks(folder: Path, config: Config) -> None:
    model, ranks = resolve_model(config), []
    for rank in range(config.world_size):
        ledger, sent = planned_ledger(model, config.layout, config.workload, rank), {}
        for (axis, name), number in ledger.items():
            sent.setdefault(axis, {})[name] = Sent(calls=1, bytes=round(number))
        ranks.append(Rank(memory_gb=0.3 + rank / 100, sent=sent))
    append_event(folder / RUN_LOG, Ranks(step=2, ranks=ranks))


def write_trace(folder: Path, config: Config, began: datetime = STARTED) -> None:
    """Every forward takes 10 ms and every backward 20, but of rank 1, which is half as fast."""
    origin = (STARTED.timestamp() + 60) * 1e6
    layout, m = config.layout, config.workload.num_micro_batches
    plans = build_plans(layout.pp_engine, layout.pp, m, layout.pp_chunks)
    times = {"F": 10_000.0, "B": 20_000.0}
    spans = simulate(plans, lambda rank, a: times[a.kind.value] * (1 + (rank == 1))).spans
    events = [
        {"name": str(a), "ph": "X", "ts": origin + start, "dur": end - start, "pid": rank, "tid": 0}
        | {"args": {"step": 3, "micro_batch": a.micro_batch, "chunk": a.chunk}}
        for rank, a, start, end in spans
    ]
    about = {"pp_engine": layout.pp_engine, "run_began": began.isoformat()}
    trace = {"traceEvents": events, "otherData": about}
    (folder / "trace.json").write_text(json.dumps(trace))


def write_run(folder: Path, steps: Iterable[int] = range(1, 21), **sections) -> Config:
    """A whole run, with everything that there can be."""
    folder.mkdir(parents=True, exist_ok=True)
    config = config_of(folder, PIPELINE | sections)
    write_start(folder, config)
    write_records(folder, config, steps)
    write_ranks(folder, config)
    write_trace(folder, config)
    return config
