"""Draw pipeline schedules, planned and measured, as text; the command line for it.

    python -m picotron_min.runtime.draw --engine interleaved --stages 4 --microbatches 8
    python -m picotron_min.runtime.draw --trace FILE    what a run measured, under its plan

Standard library only, so that it starts at once.
"""

import argparse
import json
import math
import os
import shutil
import sys
from collections import defaultdict
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from picotron_min.extensions.schedules.registry import SCHEDULES, plan_on_paper
from picotron_min.extensions.schedules.simulator import Span, Timeline, peak_live, simulate
from picotron_min.pipeline_messages import insert_messages
from picotron_min.pipeline_schedule import Action, Kind

MARGIN = len("rank 0  ")
FILLS = {Kind.FORWARD: "─", Kind.BACKWARD: "═", Kind.WEIGHT: "░"}  # behind a name


def main(arguments: list[str] | None = None) -> None:
    abouts = "\n".join(f"{name}: {schedule.about}" for name, schedule in SCHEDULES.items())
    parser = argparse.ArgumentParser(
        prog="python -m picotron_min.runtime.draw",
        description="Draw a pipeline schedule, with its bubble and its live activations.",
        epilog=f"p ranks, m micro-batches, v chunks a rank.\n{abouts}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
    )
    plan = parser.add_argument_group("a plan")
    plan.add_argument("--engine", choices=SCHEDULES, help="default: 1f1b")
    plan.add_argument("--stages", type=int, metavar="P", help="ranks; default: 4")
    plan.add_argument("--microbatches", type=int, metavar="M", help="default: 8")
    plan.add_argument("--chunks", type=int, metavar="V", help="a rank; default: the engine's")
    parser.add_argument("--trace", metavar="FILE", help="draw what a run measured, and its plan")
    parser.add_argument("--width", type=int, metavar="COLUMNS", help="default: the terminal's")
    given = vars(parser.parse_args(arguments))  # only what stands on the command line
    width = given.pop("width", None) or shutil.get_terminal_size((100, 24)).columns
    try:
        if "trace" in given and len(given) > 1:
            raise ValueError("--trace contains its own plan: omit --engine, --stages and the like")
        show = show_trace if "trace" in given else show_plan
        show(width, **given)
        sys.stdout.flush()
    except BrokenPipeError:  # `| head` has read enough; Python would flush once more at its exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        parser.error(f"{error.filename}: {error.strerror}")  # exit code 2
    except ValueError as error:
        parser.error(str(error))


def show_plan(width: int, engine="1f1b", stages=4, microbatches=8, chunks=0) -> None:
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
    print_needed_width(timeline, width)
    print("        bubble  formula  peak live  formula")
    for rank, plan in enumerate(plans):
        bubbles = f"{timeline.bubble(rank):7.1%}  {schedule.bubble(*sizes):7.1%}"
        live = f"{peak_live(plan):9}  {schedule.live_activations(rank, *sizes):7}"
        print(f"rank {rank:<2}{bubbles}  {live}")
    print(f"\n{schedule.about}")


def draw(timeline: Timeline, width: int = 100, makespan: float = 0.0) -> str:
    """One line of text a rank; give a makespan to draw several timelines to one scale."""
    scale = max(1, width - MARGIN) / (makespan or timeline.makespan)
    scale = int(scale) if scale > 1 else scale  # in whole columns, so that equal times look equal
    origin = min(span.start for span in timeline.spans)
    lines = [["·"] * round(timeline.makespan * scale) for _ in range(timeline.num_ranks)]
    for rank, action, start, end in timeline.spans:
        if action.peer is None:
            left, right = (int((time - origin) * scale + 1e-6) for time in (start, end))
            lines[rank][left:right] = _label(action, right - left)
    return "\n".join(f"rank {rank:<2} " + "".join(line) for rank, line in enumerate(lines))


def _label(action: Action, columns: int) -> str:
    """As much of the action's name as fits, filled up to `columns`."""
    name = _name(action)
    short = next(n for n in (name, name[1:], name[-1], "") if len(n) <= columns)
    return short.ljust(columns, FILLS[action.kind])


def _name(action: Action) -> str:
    letter = action.kind.value.lower() if action.chunk % 2 else action.kind.value
    return letter + str(action.micro_batch)


def print_needed_width(timeline: Timeline, width: int, makespan: float = 0.0) -> None:
    """The width that `draw` needs for all names, if that is more than there is."""
    spans = [span for span in timeline.spans if span.action.peer is None]
    scale = max(len(_name(span.action)) / (span.end - span.start) for span in spans)
    needed = MARGIN + math.ceil((makespan or timeline.makespan) * scale)
    if width < needed:
        print(f"{width} columns are too few to name each action: use --width {needed} | less -S\n")


def show_trace(width: int, trace: str) -> None:
    """Draw a measured step under its plan, in which all ranks are equally fast."""
    engine, step, measured, _ = read_trace(trace)
    planned = plan_of_trace(measured, engine)
    makespan = max(planned.makespan, measured.makespan)
    for name, timeline in (("planned", planned), ("measured", measured)):
        print(f"{name}, {engine}, step {step + 1}: {timeline.makespan / 1000:.2f} ms")
        print(draw(timeline, width, makespan), "\n")
    print_needed_width(planned, width, makespan)
    means = {span.action.kind: (span.end - span.start) / 1000 for span in planned.spans}
    parts = [f"{kind.name.lower()} {mean:.2f} ms" for kind, mean in means.items()]
    print(f"mean {', '.join(parts)}\n")
    print("        planned bubble  measured bubble   computes")
    for rank in range(measured.num_ranks):
        bubbles = f"{planned.bubble(rank):15.1%}  {measured.bubble(rank):15.1%}"
        busy = (1 - measured.bubble(rank)) * measured.makespan / 1000
        print(f"rank {rank:<2}{bubbles}  {busy:6.2f} ms")
    print(f"\n{(measured.makespan - planned.makespan) / 1000:+.2f} ms from the plan")
    if measured.num_ranks == 1:
        print("One rank has no bubble: this shows how long each forward and backward takes.")


def plan_of_trace(measured: Timeline, engine: str) -> Timeline:
    """The measured actions, each with the mean time of its kind; messages take no time."""
    times, plans = defaultdict(list), [[] for _ in range(measured.num_ranks)]
    for rank, action, start, end in measured.spans:
        times[action.kind].append(end - start)
        plans[rank].append(action)
    means, place = {kind: fmean(values) for kind, values in times.items()}, SCHEDULES[engine].place
    plans = insert_messages(plans, place)
    return simulate(plans, lambda rank, action: means[action.kind], place=place)


class MeasuredStep(NamedTuple):
    """One step of a trace by runtime/trace.py."""

    engine: str
    step: int
    measured: Timeline  # in microseconds
    run_began: str | None  # what the report recognises its run by


def read_trace(path: str) -> MeasuredStep:
    """The last step in a trace; ValueError if the file is not one."""
    try:
        trace = json.loads(Path(path).read_text())
        about = trace.get("otherData", {})
        engine, run_began = about.get("pp_engine", "1f1b"), about.get("run_began")
        SCHEDULES[engine]  # a KeyError names an unknown engine
        events = [e for e in trace["traceEvents"] if "micro_batch" in e.get("args", {})]
        step, spans = max((e["args"]["step"] for e in events), default=None), []
        for e in sorted(events, key=lambda e: e["ts"]):
            if e["args"]["step"] == step:
                action = Action(Kind(e["name"][0]), e["args"]["micro_batch"], e["args"]["chunk"])
                if not math.isfinite(e["ts"] + e["dur"]):
                    raise ValueError(f"{action} is at no time")
                duration = max(e["dur"], 1e-3)  # a clock may be too coarse for a tiny model
                spans.append(Span(e["pid"], action, e["ts"], e["ts"] + duration))
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not a trace of a pipeline: {error!r}") from None
    ranks = sorted({span.rank for span in spans})
    if ranks != list(range(max(1, len(ranks)))):
        need = "it must have all ranks of one pipeline, counted from 0"
        raise ValueError(f"{path} has forwards and backwards of ranks {ranks}: {need}")
    return MeasuredStep(engine, step, Timeline(len(ranks), spans), run_began)


if __name__ == "__main__":
    main()
