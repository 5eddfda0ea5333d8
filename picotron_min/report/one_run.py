"""One run as data: what it was, how it went, and what its ranks held, sent and computed.

The words between the numbers are in one_run.html, which has the same order.
"""

from collections.abc import Iterator
from itertools import accumulate

from picotron_min.costs import model_flops_per_token
from picotron_min.extensions.schedules.registry import plan_on_paper
from picotron_min.planner.links import ranks_of_axis
from picotron_min.planner.memory import RankMemory, memory_of_ranks, shares_of_ranks
from picotron_min.planner.traffic import planned_traffic
from picotron_min.report.curves import HALVED_IN, curves
from picotron_min.report.page import Picture, Row, render
from picotron_min.report.reading import Run, tokens_of
from picotron_min.report.timelines import timelines
from picotron_min.runtime.draw import plan_of_trace
from picotron_min.runtime.hardware import common_flops_per_token
from picotron_min.runtime.wording import counted, duration, shown


def report(run: Run) -> str:
    """The page about one folder."""
    parts = header, mfu, curves, drafted, sample, memory, sent_by_axis, schedule, bubbles
    named = {part.__name__: part for part in parts}
    columns_of_memory = [name.replace("_", " ") for name in RankMemory._fields]
    values = {"run": run, "notes": run.notes, "columns_of_memory": columns_of_memory}
    values |= {"halved_in": HALVED_IN, "columns": COLUMNS}
    return render("one_run.html", **values, **named)


def header(run: Run) -> dict[str, str]:
    """What was trained, on what, and what it cost."""
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
    if run.config:
        flops = tokens * model_flops_per_token(run.model, run.config.training.seq_length)
        facts["FLOPs"] = f"{flops:.3g}, of the model's own arithmetic"
    return facts


def mfu(run: Run) -> Iterator[Row]:
    """The whole run's MFU by both definitions: the mean over its time, as a speed is a share."""
    definitions = {"mfu": model_flops_per_token, "mfu_common": common_flops_per_token}
    for name, flops_per_token in definitions.items():
        flops = run.config and flops_per_token(run.model, run.config.training.seq_length)
        yield name, run.mean_over_time(name), flops


def drafted(run: Run) -> tuple[float, float]:
    """Tokens that a step of speculative decoding writes, at least and at most.

    These are the next token, and drafts up to the first wrong one: 1 + the sum over k of
    P(the first k are right). The run records the share p_j of right drafts of each depth, so that
    1 - the sum of (1 - p_j) <= P(the first k are right) <= the smallest p_j, with j from 1 to k.
    """
    measures = sorted(run.steps[-1].measures.items())
    shares = [p or 0.0 for name, p in measures if name.endswith("_acceptance")]
    least = (max(0.0, 1 + lost) for lost in accumulate(p - 1 for p in shares))
    return 1 + sum(least), 1 + sum(accumulate(shares, min))


# What the table of steps shows of each.
COLUMNS = ["loss", "grad_norm", "learning_rate", "tokens", "tokens_per_second"]
COLUMNS += ["mfu", "mfu_common", "step_seconds", "memory_gb"]
MOST_ROWS = 12


def sample(run: Run) -> list[Row]:
    """Some of the steps, evenly spaced, the first and the last among them."""
    last, count, rows = len(run.steps) - 1, min(MOST_ROWS, len(run.steps)), []
    losses = {record.step: record.val_loss for record in run.evaluations}
    for i in range(count):
        record = run.steps[round(i * last / max(1, count - 1))]
        values = vars(record) | record.measures
        rows.append((record.step, *map(values.get, COLUMNS), losses.get(record.step, "")))
    return rows


def sent_by_axis(run: Run) -> Iterator[Row]:
    """What rank 0 sent in the last step, planned beside measured, and the extremes of all ranks."""
    planned = planned_traffic(run.model, run.config.layout, run.config.workload)
    sent, ranks = run.steps[-1].comm_bytes, run.ranks.ranks if run.ranks else []
    for axis in sorted(sent.keys() | planned.keys()):
        peers = shown(ranks_of_axis(run.config.layout, axis, 0)).strip("[]")
        amounts = [sum(kind.bytes for kind in rank.sent.get(axis, {}).values()) for rank in ranks]
        extremes = min(amounts, default=None), max(amounts, default=None)
        yield axis, planned.get(axis, 0), sent.get(axis, 0), peers, *extremes


def memory(run: Run) -> Iterator[Row]:
    """MB that were planned for each pipeline rank, beside what its fullest rank needed."""
    layout, workload = run.config.layout, run.config.workload
    device = "cpu" if run.starts[-1].backend == "gloo" else "cuda"
    planned = memory_of_ranks(run.model, layout, workload, device)
    shares = shares_of_ranks(run.model, layout, workload.seq_length)
    size = layout.world_size // layout.pp  # ranks of a stage, which stand together
    for pp, peak in enumerate(measured_peaks(run, size)):
        layers = ", ".join(f"{stage[0]} to {stage[-1]}" for stage in shares[pp].stages if stage)
        sizes = [number and number / 1e6 for number in (*planned[pp], planned[pp].total, peak)]
        yield pp, f"{pp * size} to {pp * size + size - 1}", layers, *sizes


def measured_peaks(run: Run, size: int) -> list[float | None]:
    """Bytes of the fullest rank of each stage, of `size` ranks; None where it is not known."""
    latest = run.steps[-1].memory_gb * 1e9  # of rank 0, so far in this start
    if not run.ranks:
        return [latest] + [None] * (run.config.layout.pp - 1)
    peaks = [rank.memory_gb * 1e9 for rank in run.ranks.ranks]  # measured once
    peaks[0] = max(peaks[0], latest)
    return [max(peaks[start : start + size]) for start in range(0, len(peaks), size)]


MOST_BOXES = 3000  # of a plan: more take long to draw, and show little


def schedule(run: Run) -> Iterator[Picture]:
    """Planned above measured, in ms; without a trace the plan alone, in forwards."""
    layout, m = run.config.layout, run.config.training.gradient_accumulation_steps
    if run.trace:
        measured = run.trace.measured
        plan = plan_of_trace(measured, run.trace.engine)
        yield timelines({"planned": plan, "measured": measured}, "ms", 1e3)
    elif layout.num_stages * m <= MOST_BOXES:
        *_, plan = plan_on_paper(layout.pp_engine, layout.pp, m, layout.pp_chunks)
        yield timelines({"planned": plan}, "forwards", 1.0)


def bubbles(run: Run) -> Iterator[Row]:
    """Shares of a rank's time in which it waits."""
    measured = run.trace.measured
    planned = plan_of_trace(measured, run.trace.engine)
    for rank in range(measured.num_ranks):
        yield rank, planned.bubble(rank), measured.bubble(rank)
