"""Draw pipeline schedules as text; the command line for it.

    python -m picotron_min.runtime.draw --engine interleaved --stages 4 --microbatches 8

Standard library only, so that it starts at once. What a run has measured is read here, too, and
drawn under its plan by the report.
"""

import argparse
import json
import shutil
from collections import defaultdict
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from picotron_min.extensions.schedules.registry import SCHEDULES, plan_on_paper
from picotron_min.extensions.schedules.simulator import Span, Timeline, peak_live, simulate
from picotron_min.pipeline_schedule import Action, Kind
from picotron_min.runtime.wording import explained

MARGIN = len("rank 0  ")
FILLS = {Kind.FORWARD: "─", Kind.BACKWARD: "═", Kind.WEIGHT: "░"}  # behind a name


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m picotron_min.runtime.draw",
        description="Draw a pipeline schedule, with its bubble and its live activations.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--engine", choices=SCHEDULES, default="1f1b", help="the schedule")
    parser.add_argument("--stages", type=int, metavar="P", default=4, help="ranks")
    parser.add_argument("--microbatches", type=int, metavar="M", default=8, help="of a step")
    parser.add_argument("--chunks", type=int, metavar="V", default=0, help="a rank; 0: as usual")
    o = parser.parse_args(arguments)
    width = shutil.get_terminal_size((100, 24)).columns  # COLUMNS=300 ... | less -S for more
    try:
        show_plan(o.engine, o.stages, o.microbatches, o.chunks, width)
    except ValueError as error:
        parser.error(str(error))  # exit code 2


def show_plan(engine: str, stages: int, microbatches: int, chunks: int, width: int) -> None:
    """Print a schedule's timeline and its figures beside the textbook's; 0: its usual chunks."""
    sizes, plans, timeline = plan_on_paper(engine, stages, microbatches, chunks)
    schedule, (p, m, v) = SCHEDULES[engine], sizes
    print(f"{engine}: ranks p = {p}, micro-batches m = {m}, chunks v = {v}")
    takes = "its backward, which takes twice as long"
    if schedule.splits_backward:
        takes = "the gradient of its input, W0 the weights' gradients; all take as long"
    print(f"F0 is the forward of micro-batch 0, B0 {takes}")
    if v > 1:
        print("f0, b0: of odd chunks. A chunk is 1/v of a rank's layers, and so is an activation")
    print(f"\n{draw(timeline, width)}\n")
    print("        bubble  formula  peak live  formula")
    for rank, plan in enumerate(plans):
        bubbles = f"{timeline.bubble(rank):7.1%}  {schedule.bubble(*sizes):7.1%}"
        live = f"{peak_live(plan):9}  {schedule.live_activations(rank, *sizes):7}"
        print(f"rank {rank:<2}{bubbles}  {live}")
    print(f"\n{schedule.about}")


def draw(timeline: Timeline, width: int = 100) -> str:
    """One line of text a rank."""
    scale = max(1, width - MARGIN) / timeline.makespan
    scale = int(scale) if scale > 1 else scale  # in whole columns, so that equal times look equal
    origin = min(span.start for span in timeline.spans)
    lines = [["·"] * round(timeline.makespan * scale) for _ in range(timeline.num_ranks)]
    for rank, action, start, end in timeline.spans:
        left, right = (int((time - origin) * scale + 1e-6) for time in (start, end))
        lines[rank][left:right] = _label(action, right - left)
    return "\n".join(f"rank {rank:<2} " + "".join(line) for rank, line in enumerate(lines))


def _label(action: Action, columns: int) -> str:
    """The end of the action's name, as much as fits, filled up to `columns`."""
    name = f"{action.kind.value}{action.micro_batch}"
    name = name.lower() if action.chunk % 2 else name
    return name[max(0, len(name) - columns) :].ljust(columns, FILLS[action.kind])


class MeasuredStep(NamedTuple):
    """One step of a trace by runtime/trace.py."""

    engine: str
    step: int
    measured: Timeline  # in microseconds
    run_began: str | None  # what the report recognises its run by


def read_trace(path: str) -> MeasuredStep:
    """The last step in a trace; ValueError if the file is not one."""
    spans = []
    with explained(f"{path} is not a trace of a pipeline"):
        trace = json.loads(Path(path).read_text())
        engine, run_began = trace["otherData"]["pp_engine"], trace["otherData"]["run_began"]
        step = max(event["args"]["step"] for event in trace["traceEvents"])
        for event in sorted(trace["traceEvents"], key=lambda event: event["ts"]):
            args, start = event["args"], event["ts"]
            if args["step"] == step:
                action = Action(Kind(event["name"][0]), args["micro_batch"], args["chunk"])
                duration = max(event["dur"], 1e-3)  # a clock may be too coarse for a tiny model
                spans.append(Span(event["pid"], action, start, start + duration))
        measured = Timeline(1 + max(span.rank for span in spans), spans)
        plan_of_trace(measured, engine)  # an error names an action that is missing
    return MeasuredStep(engine, step, measured, run_began)


def plan_of_trace(measured: Timeline, engine: str) -> Timeline:
    """The measured actions, each with the mean time of its kind; messages take no time."""
    times, plans = defaultdict(list), [[] for _ in range(measured.num_ranks)]
    for rank, action, start, end in measured.spans:
        times[action.kind].append(end - start)
        plans[rank].append(action)
    means = {kind: fmean(values) for kind, values in times.items()}
    return simulate(plans, lambda _, action: means[action.kind], place=SCHEDULES[engine].place)


if __name__ == "__main__":
    main()
