"""The report of one run, section by section: what it was, how it went, where its ranks were."""

from picotron_min.costs import common_flops_per_token, model_flops_per_token
from picotron_min.extensions.schedules.registry import SCHEDULES, build_plans
from picotron_min.extensions.schedules.simulator import Timeline, simulate
from picotron_min.extensions.settings import Layout
from picotron_min.pipeline_messages import insert_messages
from picotron_min.planner.memory import RankMemory, memory_of_ranks, shares_of_ranks
from picotron_min.planner.sent import Sent as Ledger
from picotron_min.planner.traffic import planned_ledger, planned_traffic
from picotron_min.report.curves import curve_pictures
from picotron_min.report.page import Cell, notes, page, paragraph, pictures, section, table
from picotron_min.report.pictures import (
    MOST_SPANS,
    memory_picture,
    pipeline_picture,
    rank_grid,
    traffic_picture,
    unit_for,
)
from picotron_min.report.rank_traffic import ranks_of_axis, traffic_between
from picotron_min.report.reading import Run
from picotron_min.runtime.draw import mean_times
from picotron_min.runtime.metrics import StepRecord
from picotron_min.runtime.run_log import Rank, Sent
from picotron_min.runtime.wording import counted, duration


def report(run: Run) -> str:
    """The page about one folder."""
    sections = [notes(run.notes), header(run), course(run)]
    if run.config:
        sections += [ranks(run), memory(run), pipeline(run)]
    return page(f"Run in {run.folder}", *sections)


def header(run: Run) -> str:
    """What was trained, on what, and what it cost; MFU by both definitions."""
    rows = {}
    if run.config and not run.starts:
        sizes = run.config.layout.sizes._asdict()
        rows["model"] = f"{run.config.model.name} in {run.config.model.dtype}"
        rows["layout"] = " x ".join(f"{axis} {size}" for axis, size in sizes.items())
        rows |= {"data": run.config.dataset.name, "tokenizer": run.config.tokenizer}
    if run.starts:
        start = run.starts[-1]
        rows = {name: text for name, text in start.header.items() if "mfu" not in name.lower()}
        rows["device"] = f"{start.device}, {start.backend}"
        rows["versions"] = ", ".join(f"{name} {number}" for name, number in start.versions.items())
        rows["started"] = f"{run.starts[0].at:%Y-%m-%d %H:%M} UTC"
        if resumes := run.starts[1:]:
            rows["resumed"] = f"after step {', '.join(str(start.after_step) for start in resumes)}"
    rows["steps"] = f"{len(run.steps):,}, from {run.steps[0].step:,} to {run.steps[-1].step:,}"
    if repeated := len(run.all_steps) - len(run.steps):
        rows["steps"] += f"; {counted(repeated, 'step')} more, after which it resumed from before"
    seconds, saving = total_seconds(run), sum(save.save_seconds for save in run.saves)
    rows["took"] = f"{duration(seconds)} in steps, {duration(saving)} in saves"
    rows["tokens"] = f"{total_tokens(run):,.0f}"
    if run.config:
        flops = total_tokens(run) * flops_per_token(run)[0]
        rows["FLOPs"] = f"{flops:.3g}, of the model's own arithmetic"
    return section("The run", table((), rows.items()), mfu_table(run))


def total_seconds(run: Run) -> float:
    """Of all steps, also of those that a resume has repeated: they cost as much."""
    return sum(record.step_seconds or 0.0 for record in run.all_steps)


def total_tokens(run: Run) -> float:
    steps = run.all_steps
    return sum((s.tokens_per_second or 0.0) * (s.step_seconds or 0.0) for s in steps)


def flops_per_token(run: Run) -> tuple[int, int]:
    """By both definitions of MFU."""
    sizes = run.model, run.config.training.seq_length
    return model_flops_per_token(*sizes), common_flops_per_token(*sizes)


DEFINITIONS = {
    "mfu": "matmuls, and the causal half of attention",
    "mfu_common": "6 N + 12 L H Q T: with the embedding, and all of attention",
}


def mfu_table(run: Run) -> str:
    """The whole run's MFU: the mean over its time, as speeds are shares of one peak."""
    rows, flops = [], flops_per_token(run) if run.config else (None, None)
    for (name, definition), per_token in zip(DEFINITIONS.items(), flops, strict=True):
        mean = mean_over_time(run.all_steps, name)
        numbers = Cell.of(mean, ".2%"), Cell.of(per_token, ",")
        rows.append((name, *numbers, definition))
    peak = run.starts[-1].peak_flops if run.starts else None
    caption = f"Peak of a device: {peak / 1e12:.4g} TFLOP/s. " if peak else ""
    caption += "Other tools' MFU is mostly mfu_common: compare numbers of one definition only."
    return table(("", "mean", "FLOPs a token", "what counts"), rows, caption)


def mean_over_time(steps: list[StepRecord], name: str) -> float | None:
    known = [s for s in steps if getattr(s, name) is not None and s.step_seconds]
    seconds = sum(s.step_seconds for s in known)
    return sum(getattr(s, name) * s.step_seconds for s in known) / seconds if known else None


COLUMNS = {
    "loss": ".4f",
    "grad_norm": ".4g",
    "learning_rate": ".3e",
    "tokens": ",",
    "tokens_per_second": ",.0f",
    "mfu": ".2%",
    "mfu_common": ".2%",
    "step_seconds": ".3f",
    "memory_gb": ".3f",
}
MOST_ROWS = 12


def course(run: Run) -> str:
    """Curves over the steps, and a table of some of them."""
    last, count = len(run.steps) - 1, min(MOST_ROWS, len(run.steps))
    shown = [run.steps[round(i * last / max(1, count - 1))] for i in range(count)]
    losses = {record.step: record.val_loss for record in run.evaluations}
    rows = [
        (
            str(record.step),
            *(Cell.of(getattr(record, name), form) for name, form in COLUMNS.items()),
            Cell.of(losses[record.step], ".4f") if record.step in losses else Cell(""),
        )
        for record in shown
    ]
    which = "All steps" if count > last else f"{count} of {last + 1:,} steps, evenly spaced"
    numbers = table(("step", *COLUMNS, "val_loss"), rows, f"{which}, from metrics.jsonl.")
    return section("How it went", pictures(*curve_pictures([run])), numbers)


def ranks(run: Run) -> str:
    """Where ranks are in the grid, and what they send to each other."""
    layout, work = run.config.layout, run.config.workload
    shares = shares_of_ranks(run.model, layout, work.seq_length)
    figures = [rank_grid(layout, [share.layers for share in shares])]
    if run.ranks and (traffic := traffic_between(layout, run.ranks)):
        figures.append(traffic_picture(traffic, layout.world_size, run.ranks.step))
    return section("Ranks and what they send", pictures(*figures), traffic_tables(run, layout))


def traffic_tables(run: Run, layout: Layout) -> str:
    """Bytes of rank 0 by axis, planned beside measured; and by collective, beside other ranks'."""
    last, sizes = run.steps[-1], (run.model, layout, run.config.workload)
    if not last.comm_bytes:
        return paragraph("Nothing is sent: there is a single rank.")
    rows, planned = [], planned_traffic(*sizes)
    for axis in last.comm_bytes.keys() | planned.keys():
        row = ranks_of_axis(layout, axis, 0)
        with_ranks = ", ".join(map(str, row[:8])) + ", ..." * (len(row) > 8)
        numbers = planned.get(axis, 0), last.comm_bytes.get(axis, 0)
        rows.append((axis, *(Cell.of(number, ",") for number in numbers), with_ranks))
    head = "axis", "planned bytes", "measured bytes", "among ranks"
    caption = f"What rank 0 sent in step {last.step}, by axis (comm_bytes in metrics.jsonl)."
    tables = table(head, sorted(rows), caption)
    if run.ranks:
        head = "axis", "collective", "calls", "planned bytes", "bytes"
        head += "least of any rank", "most of any rank"
        caption = f"What rank 0 sent in step {run.ranks.step}, by collective, and the extremes."
        rows = _by_collective(run.ranks.ranks, planned_ledger(*sizes))
        tables += table(head, rows, caption)
    return tables


def _by_collective(ranks: list[Rank], planned: Ledger) -> list[tuple[str, ...]]:
    measured = {(axis, name) for rank in ranks for axis in rank.sent for name in rank.sent[axis]}
    rows, nothing = [], Sent(calls=0, bytes=0)
    for axis, name in sorted(measured | planned.keys()):
        sent = [rank.sent.get(axis, {}).get(name, nothing) for rank in ranks]
        amounts = [each.bytes for each in sent]
        numbers = [sent[0].calls, round(planned[axis, name])]
        numbers += [amounts[0], min(amounts), max(amounts)]
        rows.append((axis, name, *(Cell.of(number, ",") for number in numbers)))
    return rows


def memory(run: Run) -> str:
    """What was planned for each pipeline rank, beside what its fullest rank needed."""
    config, layout = run.config, run.config.layout
    is_cpu = run.starts[-1].backend == "gloo" if run.starts else True
    planned = memory_of_ranks(run.model, layout, config.workload, "cpu" if is_cpu else "cuda")
    measured = measured_peaks(run, layout)
    unit, unit_name = unit_for(max(memory.total for memory in planned))
    picture = memory_picture(planned, measured)
    parts = [name.replace("_", " ") for name in RankMemory._fields]
    rows = []
    for rank, memory in enumerate(planned):
        peak = measured[rank] if rank < len(measured) else None
        sizes = [*memory, memory.total, peak]
        rows.append((str(rank), *(Cell.of(s and s / unit, ",.2f") for s in sizes)))
    head = "pipeline rank", *parts, "planned", "measured"
    caption = f"{unit_name} a rank: planned by part, and the measured peak."
    caption += " On a CPU that is of the whole process, with Python and torch." if is_cpu else ""
    return section("Memory", pictures(picture), table(head, rows, caption))


def measured_peaks(run: Run, layout: Layout) -> list[float]:
    """Bytes of the fullest rank of each stage; rank 0 is measured at each step, others at one."""
    # Before the latest start the layout may have been another.
    begin = run.starts[-1].after_step if run.starts else 0
    since = [record for record in run.steps if record.step > begin] or run.steps
    latest = max(record.memory_gb or 0.0 for record in since) * 1e9
    if not run.ranks:
        return [latest]
    peaks = [rank.memory_gb * 1e9 for rank in run.ranks.ranks]
    size = layout.world_size // layout.pp  # ranks of a stage, which stand together
    peaks = [max(peaks[start : start + size]) for start in range(0, len(peaks), size)]
    return [max(latest, peaks[0]), *peaks[1:]]


def pipeline(run: Run) -> str:
    """The schedule, planned above measured."""
    layout, m = run.config.layout, run.config.training.gradient_accumulation_steps
    how = "Set logging.trace_file in the config to measure when each rank computes what."
    if run.trace:
        planned, measured = plan_of_trace(run.trace.measured, layout.pp_engine), run.trace.measured
        both = {"planned": planned, "measured": measured}
        figure = pipeline_picture(both)
        head = "rank", "planned bubble", "measured bubble", "computes (ms)"
        rows = [
            (
                str(rank),
                Cell.of(planned.bubble(rank), ".1%"),
                Cell.of(measured.bubble(rank), ".1%"),
                Cell.of((1 - measured.bubble(rank)) * measured.makespan / 1e3, ".2f"),
            )
            for rank in range(measured.num_ranks)
        ]
        step = run.trace.step + 1  # a trace counts from 0
        caption = f"{layout.pp_engine}, step {step}. Planned: every action takes its kind's mean."
        return section("The pipeline", pictures(figure), table(head, rows, caption))
    if layout.pp == 1:
        return ""
    if layout.num_stages * m > MOST_SPANS:  # it would take long, and show little
        return section("The pipeline", paragraph(how))
    schedule = SCHEDULES[layout.pp_engine]
    plans = build_plans(layout.pp_engine, layout.pp, m, layout.pp_chunks)
    planned = simulate(plans, place=schedule.place)
    figure = pipeline_picture({"planned": planned}, "forwards", 1.0)
    return section("The pipeline", pictures(figure), paragraph(how))


def plan_of_trace(measured: Timeline, engine: str) -> Timeline:
    """The same actions where each takes its kind's mean time, and messages take none."""
    place, ranks = SCHEDULES[engine].place, range(measured.num_ranks)
    plans = [[span.action for span in measured.spans if span.rank == rank] for rank in ranks]
    plans = insert_messages(plans, place)
    return simulate(plans, mean_times(measured, same=1), place=place)
