"""A plan as text: the best layouts, then all about the first of them."""

from picotron_min import costs
from picotron_min.extensions.schedules.registry import plan_on_paper
from picotron_min.planner.calibrate import Measured
from picotron_min.planner.choices import CHOICES, Candidate, Request
from picotron_min.planner.explain import EXPLAINED, lines_of, shown, why
from picotron_min.planner.links import link, ranks_of_axis
from picotron_min.planner.memory import RankMemory, gb, gigabytes
from picotron_min.planner.traffic import by_axis, planned_ledger, planned_traffic
from picotron_min.planner.uncertainty import interval, is_toss_up, unlike
from picotron_min.runtime.draw import draw
from picotron_min.runtime.hardware import hardware_flops_per_token

MOST_EQUAL = 3  # of a line of the table
MOST_DRAWN = 4000  # actions of a drawing
WIDTH = 100  # of lines
LEGEND = """\
s: sequence parallelism, u: Ulysses, 1 x 4: sequences of a micro-batch x micro-batches, =: as fast;
passes: over memory. First is the one with fewest axes within 0.5% of the fastest, then by step.
~: a toss-up with the first, whose step differs by less than the 90% interval of the difference."""
OTHERS_RUNS = "No GPU has run this code yet: times rest on 174 published runs of others."
UNCERTAIN = "Nine of ten of these are within the interval that stands beside a speed."
NOT_COUNTED = (
    "Not counted: reading data, ranks that are slower than others, a host that is too slow."
)


def plan_text(request: Request, found: list[list[Candidate]]) -> str:
    """The table of the best layouts, and the details and reasons of the first."""
    best = found[0][0]
    reasons = ["why (one choice changed, and all others kept, also the micro-batch)"]
    reasons += lines_of(why(request, best))
    blocks = [f"{table(request, found)}\n{LEGEND}", details(request, best)]
    return "\n\n".join([*blocks, "\n  ".join(reasons), uncertain(request, best)])


def as_numbers(request: Request, candidate: Candidate) -> dict:
    """A candidate for other programs."""
    work, prediction = candidate.workload, candidate.prediction
    return {
        "choices": {name: candidate.chosen[name] for name in CHOICES},
        "num_micro_batches": work.num_micro_batches,
        "step_seconds": prediction.step,
        "parts": prediction.parts,
        "bubble": prediction.bubble,
        "memory": candidate.memory._asdict(),
        "traffic": planned_traffic(request.model_config, candidate.layout, work),
        **measures(request, candidate),
    }


def uncertain(request: Request, best: Candidate) -> str:
    gpu, lines = request.gpu, [about_documents(request)]
    if request.device == "cpu":
        how = "calibrated with runs on it" if gpu.is_calibrated else "rough: see calibrate"
        return "\n".join(filter(None, [*lines, f"Times of this CPU are {how}. {NOT_COUNTED}"]))
    wider = unlike(request.setting(best.layout, best.workload))
    lines += [OTHERS_RUNS, UNCERTAIN, wider and f"It is twice as wide here: {wider}.", NOT_COUNTED]
    return "\n".join(filter(None, lines))


def about_documents(request: Request) -> str:
    """Which documents a prediction assumes; empty without a mask between them."""
    one = "Planned for one document a row: attention inside shorter ones is faster."
    return one if request.work.document_mask else ""


def measures(request: Request, candidate: Candidate) -> dict:
    """Speed, its 90% interval, MFU and HFU, as a run reports them."""
    config, work = request.model_config, candidate.workload
    S = work.seq_length
    step, peak = candidate.prediction.step, request.gpu.peaks[work.dtype]
    speed = request.global_batch * work.seq_length / step / request.gpus
    flops = hardware_flops_per_token(config, S, work.recompute)
    setting = request.setting(candidate.layout, work)
    return {
        "tokens_per_second_per_device": speed,
        "interval": interval(speed, candidate.prediction, setting),
        "mfu": costs.model_flops_per_token(config, S) * speed / peak,
        "hfu": flops * speed / peak,
    }


def table(request: Request, found: list[list[Candidate]]) -> str:
    """A line a layout, and one with those that are equal to it."""
    experts = "  ep " if request.model_config.num_local_experts else ""
    lines = [f"  tp  cp  pp schedule            dp sharding    {experts}recompute  micro-batches"]
    lines[0] += "   step s  tok/s/GPU       90% of runs   MFU   HFU  memory GB  bubble"
    first = found[0][0].prediction
    for candidate, *equal in found:
        layout, work, prediction, needed = candidate
        speed, (low, high), mfu, hfu = measures(request, candidate).values()
        tp = f"{layout.tp}{'s' * layout.sequence_parallel}"
        cp = f"{layout.cp}{'u' * (layout.cp > 1 and layout.cp_engine == 'ulysses')}"
        engine = layout.pp_engine if layout.pp > 1 else "-"
        engine += f" x {layout.pp_chunks}" if layout.pp_chunks > 1 else ""
        ep = f"{layout.ep:>4} " if experts else ""
        mark = "~" if prediction is not first and is_toss_up(first, prediction) else " "
        range_, engine = f"{low:,.0f}-{high:,.0f}", f"{engine:<17}{layout.dp:>5}"
        lines.append(
            f"{mark}{tp:>3}{cp:>4}{layout.pp:>4} {engine} {layout.sharding:<12}{ep}"
            f"{work.recompute:<11}{work.micro_batch_size:>4} x {work.num_micro_batches:<6}"
            f"{prediction.step:>9.4g}{speed:>11,.0f}{range_:>18}{mfu:>6.1%}{hfu:>6.1%}"
            f"{gigabytes(needed.total):>11}{prediction.bubble:>8.1%}"
        )
        if equal:
            others = [_difference(candidate, other) for other in equal[:MOST_EQUAL]]
            lines.append(f"     = {'; '.join(others)}{'; ...' * (len(equal) > MOST_EQUAL)}")
    return "\n".join(lines)


def _difference(candidate: Candidate, other: Candidate) -> str:
    """cp 2 dp 32 micro-batch 2"""
    changed = (n for n in CHOICES if other.chosen[n] != candidate.chosen[n])
    return " ".join(f"{EXPLAINED.get(n) or n} {shown(other.chosen[n])}" for n in changed)


def details(request: Request, best: Candidate) -> str:
    """Where time, memory and bytes of a layout go, and its schedule."""
    blocks = [times(best), memory(request, best.memory), traffic(request, best)]
    m, layout, step = best.workload.num_micro_batches, best.layout, best.prediction.step
    if watts := request.gpu.watts:  # a bound: no published run gives the share that was used
        joules = request.gpus * watts * step
        each = 1e3 * joules / (request.global_batch * best.workload.seq_length)
        made = f"{request.gpus} GPUs x {watts} W x {step:.3g} s"
        most = f"at most {joules / 1e3:.3g} kJ a step ({made})"
        blocks.append(f"energy: {most}, {each:.3g} mJ a token")
    if layout.pp > 1 and layout.num_stages * m <= MOST_DRAWN:
        *_, timeline = plan_on_paper(layout.pp_engine, layout.pp, m, layout.pp_chunks)
        blocks.append(f"schedule {layout.pp_engine}\n{draw(timeline, WIDTH)}")
    return "\n\n".join(blocks)


def times(best: Candidate) -> str:
    parts, step = best.prediction.parts, best.prediction.step
    lines = [f"time {step:.4g} s"]
    for name, seconds in sorted(parts.items(), key=lambda item: -item[1]):
        if seconds > 0:
            bar = "█" * round(seconds / step * (WIDTH - 40))
            lines.append(f"  {name:<11}{seconds:>10.4g} s{seconds / step:>7.1%}  {bar}")
    return "\n".join(lines)


def memory(request: Request, of: RankMemory) -> str:
    what = "process, without torch itself" if request.device == "cpu" else "GPU"
    lines = [f"memory {gb(of.total)} of {gb(request.budget)} a {what}, on the fullest rank"]
    for name, number in of._asdict().items():
        lines.append(f"  {name.replace('_', ' '):<16}{number / 1e9:>9.4g} GB")
    return "\n".join(lines)


def traffic(request: Request, best: Candidate) -> str:
    """Bytes that rank 0 sends in a step; how long they travel, and what of that is hidden."""
    lines = ["traffic of rank 0  GB a step   messages  link     seconds  hidden"]
    sizes = request.model_config, best.layout, best.workload
    ledger = planned_ledger(*sizes, device=request.device)
    calls = by_axis(ledger.calls)
    for axis, sent in by_axis(ledger).items():
        row = ranks_of_axis(best.layout, axis, 0)
        over = link(request.gpu, len(row), row[1] - row[0])
        seconds = sent / over.bandwidth + calls[axis] * over.latency
        exposed = best.prediction.parts.get(PARTS.get(axis))
        hidden = "" if exposed is None else f"{max(0.0, 1 - exposed / seconds):>8.0%}"
        kind = "memory" if request.device == "cpu" else "network" if over.is_network else "NVLink"
        number = f"{sent / 1e9:>12.4g}{calls[axis]:>11,.0f}"
        lines += [f"  {axis:<15}{number}  {kind:<8}{seconds:>8.3g}{hidden}"] if sent else []
    return "\n".join(lines)


PARTS = {"tp": "tp", "cp": "cp", "ep_etp": "ep", "dp_cp": "dp"}  # of a step's time, by axis


def beside(request: Request, candidate: Candidate, measured: Measured) -> str:
    """What was predicted, and what a run measured."""
    planned = planned_traffic(request.model_config, candidate.layout, candidate.workload)
    rows = [("step, s", candidate.prediction.step, measured.step_seconds)]
    rows.append(("memory, GB", candidate.memory.total / 1e9, measured.memory_gb))
    for axis in sorted({*planned, *measured.comm_bytes}):
        sent = planned.get(axis, 0), measured.comm_bytes.get(axis, 0)
        rows.append((f"bytes over {axis}", *sent))
    lines = [f"{'':18}{'planned':>16}{'measured':>16}{'ratio':>8}"]
    for name, plan, real in rows:
        ratio = f"{real / plan:8.3f}" if plan else ""
        lines.append(f"{name:18}{plan:>16,.6g}{real:>16,.6g}{ratio}")
    return "\n".join(lines)
