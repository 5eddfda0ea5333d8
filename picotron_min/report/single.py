"""One run's page, section by section: what it was, how it went, where its ranks were."""

from collections import Counter
from itertools import zip_longest

from picotron_min.costs import model_flops_per_token
from picotron_min.extensions.schedules.registry import plan_on_paper
from picotron_min.extensions.settings import Layout
from picotron_min.planner.links import ranks_of_axis
from picotron_min.planner.memory import RankMemory, memory_of_ranks, shares_of_ranks
from picotron_min.planner.traffic import planned_ledger, planned_traffic
from picotron_min.report import pictures
from picotron_min.report.charts import curve_pictures
from picotron_min.report.page import Cell, cells, gallery, page, paragraph, section, table
from picotron_min.report.rank_traffic import traffic_between
from picotron_min.report.reading import Run, tokens_of
from picotron_min.runtime.draw import MeasuredStep, plan_of_trace
from picotron_min.runtime.hardware import common_flops_per_token
from picotron_min.runtime.metrics import Rank, Sent
from picotron_min.runtime.wording import counted, duration


def report(run: Run) -> str:
    """The page about one folder."""
    sections = [header(run), course(run)]
    if run.config:
        sections += [ranks(run), memory(run), pipeline(run)]
    return page(f"Run in {run.folder}", run.notes, *sections)


def header(run: Run) -> str:
    """What was trained, on what, and what it cost; MFU by both definitions."""
    rows = {}
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
    saving = sum(save.save_seconds for save in run.saves)
    rows["took"] = f"{duration(run.seconds)} in steps, {duration(saving)} in saves"
    rows["took"] += "; starting, validating and waiting for data are not recorded"
    tokens = tokens_of(run.all_steps)
    rows["tokens"] = f"{tokens:,.0f}"
    if repeated:
        rows["tokens"] += f", {tokens - tokens_of(run.steps):,.0f} of them in repeated steps"
    if run.joules is not None:
        each = f"{run.joules / 1e3:,.2f} kJ, {run.joules / tokens:.3g} J a token"
        rows["energy"] = f"{each}, {rows.get('energy', 'in all steps')}"
    if run.ranks:
        rows |= run.ranks.share_of_bound([step.step_seconds for step in run.steps])
    if run.config:
        flops = tokens * model_flops_per_token(run.model, run.config.training.seq_length)
        rows["FLOPs"] = f"{flops:.3g}, of the model's own arithmetic"
    return section("The run", table((), rows.items()), mfu_table(run))


DEFINITIONS = {"mfu": (model_flops_per_token, "matmuls, and the causal half of attention")}
COMMON = "6 N + 12 L H Q T: with the embedding, and all of attention"
DEFINITIONS["mfu_common"] = common_flops_per_token, COMMON


def mfu_table(run: Run) -> str:
    """The whole run's MFU: the mean over its time, as speeds are shares of one peak."""
    rows, sizes = [], run.config and (run.model, run.config.training.seq_length)
    for name, (flops_per_token, definition) in DEFINITIONS.items():
        flops = Cell.of(sizes and flops_per_token(*sizes), ",")
        rows.append((name, Cell.of(run.mean_over_time(name), ".2%"), flops, definition))
    peak = run.starts[-1].peak_flops if run.starts else None
    caption = f"Peak of a device: {peak / 1e12:.4g} TFLOP/s. " if peak else ""
    caption += "Other tools' MFU is mostly mfu_common: compare numbers of one definition only."
    return table(("", "mean", "FLOPs a token", "what counts"), rows, caption)


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
    last, count, rows = len(run.steps) - 1, min(MOST_ROWS, len(run.steps)), []
    losses = {record.step: Cell.of(record.val_loss, ".4f") for record in run.evaluations}
    columns = COLUMNS if run.joules is None else COLUMNS | {"joules": ",.4g"}
    for i in range(count):
        record = run.steps[round(i * last / max(1, count - 1))]
        values = vars(record) | record.measures
        numbers = [Cell.of(values[name], form) for name, form in columns.items()]
        rows.append((str(record.step), *numbers, losses.get(record.step, Cell(""))))
    which = "All steps" if count > last else f"{count} of {last + 1:,} steps, evenly spaced"
    numbers = table(("step", *columns, "val_loss"), rows, f"{which}, from metrics.jsonl.")
    return section("How it went", gallery(*curve_pictures([run])), numbers)


def ranks(run: Run) -> str:
    """Where ranks are in the grid, and what they send to each other."""
    layout = run.config.layout
    shares = shares_of_ranks(run.model, layout, run.config.workload.seq_length)
    figures = [pictures.rank_grid(layout, [share.layers for share in shares])]
    if run.ranks and (traffic := traffic_between(layout, run.ranks)):
        figures.append(pictures.traffic_picture(traffic, layout.world_size, run.ranks.step))
    return section("Ranks and what they send", gallery(*figures), traffic_tables(run, layout))


def traffic_tables(run: Run, layout: Layout) -> str:
    """Bytes of rank 0 by axis, planned beside measured; and by collective, beside other ranks'."""
    last, sizes, rows = run.steps[-1], (run.model, layout, run.config.workload), []
    if not last.comm_bytes:
        return paragraph("Nothing is sent: there is a single rank.")
    planned = planned_traffic(*sizes)
    for axis in sorted(last.comm_bytes.keys() | planned.keys()):
        row = ranks_of_axis(layout, axis, 0)
        with_ranks = ", ".join(map(str, row[:8])) + ", ..." * (len(row) > 8)
        numbers = planned.get(axis, 0), last.comm_bytes.get(axis, 0)
        rows.append((axis, *cells(",", *numbers), with_ranks))
    head = "axis", "planned bytes", "measured bytes", "among ranks"
    caption = f"What rank 0 sent in step {last.step}, by axis (comm_bytes in metrics.jsonl)."
    tables = table(head, rows, caption)
    if run.ranks:
        head = "axis", "collective", "calls", "planned bytes", "bytes"
        head += "least of any rank", "most of any rank"
        caption = f"What rank 0 sent in step {run.ranks.step}, by collective, and the extremes."
        tables += table(head, _by_collective(run.ranks.ranks, planned_ledger(*sizes)), caption)
    return tables


def _by_collective(ranks: list[Rank], planned: Counter) -> list[tuple[str, ...]]:
    measured = {(axis, name) for rank in ranks for axis in rank.sent for name in rank.sent[axis]}
    rows, nothing = [], Sent(calls=0, bytes=0)
    for axis, name in sorted(measured | planned.keys()):
        sent = [rank.sent.get(axis, {}).get(name, nothing) for rank in ranks]
        amounts, expected = [each.bytes for each in sent], round(planned[axis, name])
        extremes = min(amounts), max(amounts)
        rows.append((axis, name, *cells(",", sent[0].calls, expected, amounts[0], *extremes)))
    return rows


def memory(run: Run) -> str:
    """What was planned for each pipeline rank, beside what its fullest rank needed."""
    layout, rows = run.config.layout, []
    device = "cpu" if not run.starts or run.starts[-1].backend == "gloo" else "cuda"
    planned = memory_of_ranks(run.model, layout, run.config.workload, device)
    measured = measured_peaks(run, layout)
    unit, unit_name = pictures.unit_for(max(plan.total for plan in planned))
    for rank, (plan, peak) in enumerate(zip_longest(planned, measured)):
        sizes = [size and size / unit for size in (*plan, plan.total, peak)]
        rows.append((str(rank), *cells(",.2f", *sizes)))
    parts = [name.replace("_", " ") for name in RankMemory._fields]
    caption = f"{unit_name} a rank: planned by part, and the measured peak."
    if device == "cpu":
        caption += " On a CPU that is of the whole process, with Python and torch."
    numbers = table(("pipeline rank", *parts, "planned", "measured"), rows, caption)
    return section("Memory", gallery(pictures.memory_picture(planned, measured)), numbers)


def measured_peaks(run: Run, layout: Layout) -> list[float]:
    """Bytes of the fullest rank of each stage; rank 0 is measured at each step, others at one."""
    # Before the latest start the layout may have been another.
    begin = run.starts[-1].after_step if run.starts else 0
    since = [record for record in run.steps if record.step > begin] or run.steps
    latest = max(record.memory_gb for record in since) * 1e9
    peaks = [rank.memory_gb * 1e9 for rank in run.ranks.ranks] if run.ranks else [latest]
    peaks[0] = max(peaks[0], latest)
    size = layout.world_size // layout.pp  # ranks of a stage, which stand together
    return [max(peaks[start : start + size]) for start in range(0, len(peaks), size)]


def pipeline(run: Run) -> str:
    """The schedule, planned above measured."""
    layout, m = run.config.layout, run.config.training.gradient_accumulation_steps
    if layout.pp == 1:
        return ""
    if run.trace:
        return section("The pipeline", _planned_and_measured(run.trace))
    parts = [paragraph("Set logging.trace_file in the config to measure when ranks compute what.")]
    if layout.num_stages * m <= pictures.MOST_SPANS:  # more would take long, and show little
        *_, planned = plan_on_paper(layout.pp_engine, layout.pp, m, layout.pp_chunks)
        parts.insert(0, gallery(pictures.pipeline_picture({"planned": planned}, "forwards", 1.0)))
    return section("The pipeline", *parts)


def _planned_and_measured(trace: MeasuredStep) -> str:
    measured, rows = trace.measured, []
    planned = plan_of_trace(measured, trace.engine)
    for rank in range(measured.num_ranks):
        bubbles = planned.bubble(rank), measured.bubble(rank)
        busy = (1 - bubbles[1]) * measured.makespan / 1e3
        rows.append((str(rank), *cells(".1%", *bubbles), Cell.of(busy, ".2f")))
    head = "rank", "planned bubble", "measured bubble", "computes (ms)"
    caption = f"{trace.engine}, step {trace.step + 1}. Planned: every action takes its kind's mean."
    figure = pictures.pipeline_picture({"planned": planned, "measured": measured})
    return gallery(figure) + table(head, rows, caption)
