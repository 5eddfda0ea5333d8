"""A plan as text: the best layouts, then all about the first of them."""

from collections.abc import Iterator

from picotron_min import costs
from picotron_min.planner.choices import Candidate, Request
from picotron_min.planner.explain import why
from picotron_min.planner.links import link, ranks_of_axis
from picotron_min.planner.memory import LEFT_OUT, RankMemory, gb, gigabytes
from picotron_min.planner.traffic import by_axis, planned_ledger
from picotron_min.planner.uncertainty import interval, is_toss_up, unlike
from picotron_min.runtime.hardware import hardware_flops_per_token

LEGEND = """\
s: sequence parallelism, u: Ulysses, 1 x 4: sequences of a micro-batch x micro-batches;
passes: over memory. By the step in three digits, then by fewest axes, then by memory.
~: a toss-up with the first, whose step differs by less than the 90% interval of the difference."""
OTHERS_RUNS = "No GPU has run this code yet: times rest on 174 published runs of others."
UNCERTAIN = "Nine of ten of these are within the interval that stands beside a speed."
NOT_COUNTED = (
    "Not counted: reading data, ranks that are slower than others, a host that is too slow."
)


def plan_text(request: Request, found: list[Candidate]) -> str:
    """The table of the best layouts, and the details and reasons of the first."""
    best = found[0]
    reasons = [
        "why (one choice changed, with the fastest of what depends on it, and all others kept)"
    ]
    reasons += why(request, best)
    return blocks(request, found, "\n  ".join(reasons))


def blocks(request: Request, found: list[Candidate], *more: str) -> str:
    """The table, and where time, memory and bytes of the first layout go."""
    best = found[0]
    head = f"{table(request, found)}\n{LEGEND}", times(best), memory(request, best.memory)
    return "\n\n".join([*head, traffic(request, best), *more, uncertain(request, best)])


def uncertain(request: Request, best: Candidate) -> str:
    wider = unlike(request.setting(best.layout, best.workload))
    lines = [about_documents(request), OTHERS_RUNS, UNCERTAIN]
    lines += [wider and f"It is twice as wide here: {wider}.", NOT_COUNTED]
    return "\n".join(filter(None, lines))


def about_documents(request: Request) -> str:
    """Which documents a prediction assumes; empty without a mask between them."""
    one = "Planned for one document a row: attention inside shorter ones is faster."
    return one if request.work.document_mask else ""


def measures(request: Request, candidate: Candidate) -> tuple:
    """Speed, its 90% interval, MFU and HFU, as a run reports them."""
    config, work = request.model_config, candidate.workload
    S = work.seq_length
    step, peak = candidate.prediction.step, request.gpu.peaks[work.dtype]
    speed = request.global_batch * work.seq_length / step / request.gpus
    flops = hardware_flops_per_token(config, S, work.recompute)
    setting = request.setting(candidate.layout, work)
    mfu = costs.model_flops_per_token(config, S) * speed / peak
    return speed, interval(speed, candidate.prediction, setting), mfu, flops * speed / peak


def table(request: Request, found: list[Candidate]) -> str:
    """A line a layout."""
    lines = ["  tp  cp  pp schedule            dp sharding      ep recompute  micro-batches"]
    lines[0] += "   step s  tok/s/GPU       90% of runs   MFU   HFU  memory GB  bubble"
    first = found[0].prediction
    for candidate in found:
        layout, work, prediction, needed = candidate
        speed, (low, high), mfu, hfu = measures(request, candidate)
        tp = f"{layout.tp}{'s' * layout.sequence_parallel}"
        cp = f"{layout.cp}{'u' * (layout.cp > 1 and layout.cp_engine == 'ulysses')}"
        engine = layout.pp_engine if layout.pp > 1 else "-"
        engine += f" x {layout.pp_chunks}" if layout.pp_chunks > 1 else ""
        mark = "~" if prediction is not first and is_toss_up(first, prediction) else " "
        range_, engine = f"{low:,.0f}-{high:,.0f}", f"{engine:<17}{layout.dp:>5}"
        lines.append(
            f"{mark}{tp:>3}{cp:>4}{layout.pp:>4} {engine} {layout.sharding:<12}{layout.ep:>4} "
            f"{work.recompute:<11}{work.micro_batch_size:>4} x {work.num_micro_batches:<6}"
            f"{prediction.step:>9.3g}{speed:>11,.0f}  {range_:>16}{mfu:>6.1%}{hfu:>6.1%}"
            f"{gigabytes(needed.total):>11}{prediction.bubble:>8.1%}"
        )
    return "\n".join(lines)


def times(best: Candidate) -> str:
    parts, step = best.prediction.parts, best.prediction.step
    lines = [f"time {step:.4g} s"]
    for name, seconds in sorted(parts.items(), key=lambda item: -item[1]):
        if seconds > 0:
            lines.append(f"  {name:<11}{seconds:>10.4g} s{seconds / step:>7.1%}")
    return "\n".join(lines)


def memory(request: Request, of: RankMemory) -> str:
    head = f"memory {gb(of.total)} of {request.budget_text} a GPU, on the fullest rank"
    return "\n".join([head, *memory_lines(of, "cuda")])


def memory_lines(of: RankMemory, device: str) -> Iterator[str]:
    for name, number in of._asdict().items():
        yield f"  {name.replace('_', ' '):<16}{number / 1e9:>9.4g} GB"
    yield f"  not counted: {LEFT_OUT[device]}"


def traffic(request: Request, best: Candidate) -> str:
    """Bytes that rank 0 sends in a step, and how long they travel, also if that is hidden."""
    lines = ["traffic of rank 0  GB a step   messages  link     seconds"]
    sizes = request.model_config, best.layout, best.workload
    ledger = planned_ledger(*sizes)
    calls = by_axis(ledger.calls)
    for axis, sent in by_axis(ledger).items():
        row = ranks_of_axis(best.layout, axis, 0)
        over = link(request.gpu, len(row), row[1] - row[0])
        seconds = sent / over.bandwidth + calls[axis] * over.latency
        kind = "network" if over.is_network else "NVLink"
        number = f"{sent / 1e9:>12.4g}{calls[axis]:>11,.0f}"
        lines += [f"  {axis:<15}{number}  {kind:<8}{seconds:>8.3g}"] if sent else []
    return "\n".join(lines)
