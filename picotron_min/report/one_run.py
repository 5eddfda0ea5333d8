"""One run's page: what it was, how it went, and what its ranks held, sent and computed."""

from collections import Counter

from picotron_min.costs import model_flops_per_token
from picotron_min.extensions.schedules.registry import plan_on_paper
from picotron_min.planner.links import ranks_of_axis
from picotron_min.planner.memory import RankMemory, memory_of_ranks, shares_of_ranks
from picotron_min.planner.traffic import planned_ledger, planned_traffic
from picotron_min.report.curves import curves
from picotron_min.report.page import Section, Table, render
from picotron_min.report.reading import Run, tokens_of
from picotron_min.report.timelines import timelines
from picotron_min.runtime.draw import MeasuredStep, plan_of_trace
from picotron_min.runtime.hardware import common_flops_per_token
from picotron_min.runtime.metrics import Ranks, Sent
from picotron_min.runtime.wording import counted, duration, shown


def report(run: Run) -> str:
    """The page about one folder."""
    sections = [header(run), course(run)]
    if run.config:
        sections.append(memory(run))
        if run.config.world_size > 1:
            sections.append(traffic(run))
        if run.config.layout.pp > 1:
            sections.append(pipeline(run))
    return render(f"Run in {run.folder}", run.notes, sections)


def header(run: Run) -> Section:
    """What was trained, on what, and what it cost; MFU by both definitions."""
    facts, tokens = {}, tokens_of(run.all_steps)
    if run.starts:
        start, resumes = run.starts[-1], [str(start.after_step) for start in run.starts[1:]]
        facts = {name: text for name, text in start.header.items() if "mfu" not in name.lower()}
        facts["device"] = f"{start.device}, {start.backend}"
        facts["versions"] = ", ".join(f"{name} {number}" for name, number in start.versions.items())
        facts["started"] = f"{run.starts[0].at:%Y-%m-%d %H:%M} UTC"
        if resumes:
            facts["resumed"] = f"after step {', '.join(resumes)}"
    facts["steps"] = f"{len(run.steps):,}, from {run.steps[0].step:,} to {run.steps[-1].step:,}"
    saving = sum(save.save_seconds for save in run.saves)
    facts["took"] = f"{duration(run.seconds)} in steps, {duration(saving)} in saves"
    facts["tokens"] = f"{tokens:,.0f}"
    # These cost as much, but the weights do not come from them.
    if repeated := len(run.all_steps) - len(run.steps):
        facts["steps"] += f"; {counted(repeated, 'step')} more, after which it resumed from before"
        facts["tokens"] += f", {tokens - tokens_of(run.steps):,.0f} of them in repeated steps"
    if run.joules is not None:
        each = f"{run.joules / 1e3:,.2f} kJ, {run.joules / tokens:.3g} J a token"
        facts["energy"] = f"{each}, {facts.get('energy', 'in all steps')}"
    if run.config:
        flops = tokens * model_flops_per_token(run.model, run.config.training.seq_length)
        facts["FLOPs"] = f"{flops:.3g}, of the model's own arithmetic"
    return Section("The run", facts, tables=[mfu_table(run)])


def mfu_table(run: Run) -> Table:
    """The whole run's MFU: the mean over its time, as speeds are shares of one peak."""
    definitions, rows = {"mfu": model_flops_per_token, "mfu_common": common_flops_per_token}, []
    for name, flops_per_token in definitions.items():
        flops = run.config and flops_per_token(run.model, run.config.training.seq_length)
        rows.append((name, run.mean_over_time(name), flops))
    peak = run.starts[-1].peak_flops if run.starts else None
    caption = f"Peak of a device: {peak / 1e12:.4g} TFLOP/s. " if peak else ""
    caption += "mfu counts matmuls and the causal half of attention; mfu_common, as most tools do, "
    caption += "6 N + 12 L H Q T: the embedding and all of attention, too."
    return Table(("", "mean", "FLOPs a token"), rows, caption)


COLUMNS = [
    "loss",
    "grad_norm",
    "learning_rate",
    "tokens",
    "tokens_per_second",
    "mfu",
    "mfu_common",
    "step_seconds",
    "memory_gb",
]
MOST_ROWS = 12


def course(run: Run) -> Section:
    """Curves over the steps, and a table of some of them."""
    last, count, rows = len(run.steps) - 1, min(MOST_ROWS, len(run.steps)), []
    losses = {record.step: record.val_loss for record in run.evaluations}
    columns = COLUMNS if run.joules is None else [*COLUMNS, "joules"]
    for i in range(count):
        record = run.steps[round(i * last / max(1, count - 1))]
        values = vars(record) | record.measures
        rows.append((record.step, *map(values.get, columns), losses.get(record.step, "")))
    caption = f"{count} of {last + 1:,} steps, evenly spaced, from metrics.jsonl."
    table = Table(("step", *columns, "val_loss"), rows, caption)
    text = "Faint: each step. Strong: smoothed, with half the weight every 2% of the steps."
    return Section("How it went", text=text, pictures=curves(run), tables=[table])


def traffic(run: Run) -> Section:
    """What rank 0 sends, planned beside measured."""
    sizes = run.model, run.config.layout, run.config.workload
    tables = [by_axis(run, planned_traffic(*sizes))]
    if run.ranks:
        tables.append(by_collective(run.ranks, planned_ledger(*sizes)))
    return Section("What ranks send", tables=tables)


def by_axis(run: Run, planned: dict[str, int]) -> Table:
    last, rows = run.steps[-1], []
    for axis in sorted(last.comm_bytes.keys() | planned.keys()):
        peers = shown(ranks_of_axis(run.config.layout, axis, 0)).strip("[]")
        rows.append((axis, planned.get(axis, 0), last.comm_bytes.get(axis, 0), peers))
    columns = "axis", "planned bytes", "measured bytes", "among ranks"
    caption = f"What rank 0 sent in step {last.step}, by axis (comm_bytes in metrics.jsonl)."
    return Table(columns, rows, caption)


def by_collective(measured: Ranks, planned: Counter) -> Table:
    ledgers = [
        {(axis, name): sent for axis in rank.sent for name, sent in rank.sent[axis].items()}
        for rank in measured.ranks
    ]
    rows, nothing = [], Sent(calls=0, bytes=0)
    for kind in sorted(planned.keys() | set().union(*ledgers)):
        sent = [ledger.get(kind, nothing) for ledger in ledgers]
        amounts = [each.bytes for each in sent]
        numbers = round(planned[kind]), amounts[0], min(amounts), max(amounts)
        rows.append((*kind, sent[0].calls, *numbers))
    columns = "axis", "collective", "calls", "planned bytes", "bytes"
    caption = f"What rank 0 sent in step {measured.step}, by collective, and the extremes."
    return Table((*columns, "least of any rank", "most of any rank"), rows, caption)


def memory(run: Run) -> Section:
    """What was planned for each pipeline rank, beside what its fullest rank needed."""
    layout, workload, rows = run.config.layout, run.config.workload, []
    device = "cpu" if run.starts[-1].backend == "gloo" else "cuda"
    planned = memory_of_ranks(run.model, layout, workload, device)
    shares = shares_of_ranks(run.model, layout, workload.seq_length)
    size = layout.world_size // layout.pp  # ranks of a stage, which stand together
    for pp, peak in enumerate(measured_peaks(run, size)):
        layers = ", ".join(f"{stage[0]} to {stage[-1]}" for stage in shares[pp].stages if stage)
        sizes = [number and number / 1e6 for number in (*planned[pp], planned[pp].total, peak)]
        rows.append((pp, f"{pp * size} to {pp * size + size - 1}", layers, *sizes))
    parts = [name.replace("_", " ") for name in RankMemory._fields]
    columns = "pipeline rank", "ranks", "layers", *parts, "planned", "measured"
    caption = (
        "MB a rank: planned by part, and the measured peak: on a CPU of the whole process, with "
    )
    caption += "Python and torch."
    return Section("Memory", tables=[Table(columns, rows, caption)])


def measured_peaks(run: Run, size: int) -> list[float | None]:
    """Bytes of the fullest rank of each stage, of `size` ranks; None where it is not known."""
    # Before the latest start the layout may have been another.
    since = [step for step in run.steps if step.step > run.starts[-1].after_step] or run.steps
    latest = max(step.memory_gb for step in since) * 1e9  # of rank 0, measured at each step
    if not run.ranks:
        return [latest] + [None] * (run.config.layout.pp - 1)
    peaks = [rank.memory_gb * 1e9 for rank in run.ranks.ranks]  # measured once
    peaks[0] = max(peaks[0], latest)
    return [max(peaks[start : start + size]) for start in range(0, len(peaks), size)]


MOST_BOXES = 3000  # of a plan: more take long to draw, and show little


def pipeline(run: Run) -> Section:
    """The schedule, planned above measured; without a trace the plan alone, in forwards."""
    layout, m = run.config.layout, run.config.training.gradient_accumulation_steps
    if run.trace:
        return planned_and_measured(run.trace)
    plots = []
    if layout.num_stages * m <= MOST_BOXES:
        *_, planned = plan_on_paper(layout.pp_engine, layout.pp, m, layout.pp_chunks)
        plots.append(timelines({"planned": planned}, "forwards", 1.0))
    text = "Set logging.trace_file in the config to measure when ranks compute what."
    return Section("The pipeline", text=text, pictures=plots)


def planned_and_measured(trace: MeasuredStep) -> Section:
    measured, rows = trace.measured, []
    planned = plan_of_trace(measured, trace.engine)
    for rank in range(measured.num_ranks):
        bubbles = planned.bubble(rank), measured.bubble(rank)
        rows.append((rank, *bubbles, (1 - bubbles[1]) * measured.makespan / 1e3))
    columns = "rank", "planned bubble", "measured bubble", "computes (ms)"
    caption = f"{trace.engine}, step {trace.step + 1}. Planned: every action takes its kind's mean."
    plot = timelines({"planned": planned, "measured": measured}, "ms", 1e3)
    table = Table(columns, rows, caption)
    return Section("The pipeline", pictures=[plot], tables=[table])
