"""Draw pipeline schedules, planned and measured, as text and as a PNG; the command line for it.

    python -m picotron_min.pipeline_schedule --engine interleaved --stages 4 --microbatches 8
    python -m picotron_min.pipeline_schedule --trace FILE    what a run measured, under its plan

Standard library only, so that it answers at once.
"""

import argparse
import json
import shutil
import struct
import zlib
from pathlib import Path
from statistics import fmean

from picotron_min.pipeline_schedule import (
    ENGINES,
    Action,
    Kind,
    Span,
    Timeline,
    bubble,
    build_plans,
    group_sizes,
    insert_communication,
    live_activations,
    simulate,
)

FORMULAS = {
    "afab": "bubble (p-1) / (mv + p-1), live activations mv",
    "1f1b": "bubble (p-1) / (m + p-1), live activations min(m, p - rank)",
    "interleaved": "bubble (p-1) / (mv + p-1), live activations (v-1) p + 2 (p - rank) - 1",
}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m picotron_min.pipeline_schedule",
        description="Draw a pipeline schedule, with its bubble and its live activations.",
    )
    parser.add_argument("--engine", choices=ENGINES, help="default: 1f1b")
    size = {"type": _at_least_one}
    parser.add_argument("--stages", **size, metavar="P", help="ranks; default: 4")
    parser.add_argument("--microbatches", **size, metavar="M", help="default: 8")
    parser.add_argument(
        "--chunks", **size, metavar="V", help="a rank; default: 2 if interleaved, else 1"
    )
    parser.add_argument("--trace", metavar="FILE", help="draw what a run measured, and its plan")
    parser.add_argument("--png", metavar="FILE", help="write a picture, too")
    parser.add_argument("--width", **size, metavar="COLUMNS", help="default: the terminal's")
    options = parser.parse_args(arguments)
    width = options.width or shutil.get_terminal_size((100, 24)).columns
    try:
        if options.trace is None:
            engine = options.engine or "1f1b"
            chunks = options.chunks or (2 if engine == "interleaved" else 1)
            sizes = (options.stages or 4, options.microbatches or 8, chunks)
            timelines = show_plan(engine, *sizes, width)
        elif options.engine or options.stages or options.microbatches or options.chunks:
            raise ValueError("--trace brings its own plan: give no engine, stages, ... with it")
        else:
            timelines = show_trace(options.trace, width)
        if options.png:
            write_png(timelines, options.png)
    except (ValueError, OSError) as error:
        parser.error(str(error))  # exit code 2


def _at_least_one(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least 1")
    return int(text)


def show_plan(
    engine: str, ranks: int, num_micro_batches: int, chunks: int, width: int
) -> list[Timeline]:
    """Print a schedule's timeline and its figures beside the textbook's; returns the timeline."""
    sizes = (ranks, num_micro_batches, chunks)
    timeline = simulate(build_plans(engine, *sizes))
    print(
        f"{engine}: p={ranks} ranks, m={num_micro_batches} micro-batches, v={chunks} chunks a rank"
    )
    print("F0 is the forward of micro-batch 0, B0 its backward, which takes twice as long")
    if chunks > 1:
        print("f0, b0: of odd chunks. A chunk is 1/v of a rank's layers, and so is an activation")
    print(f"\n{draw(timeline, width)}\n\n        bubble  formula  peak live  formula")
    for rank in range(ranks):
        print(
            f"rank {rank:<2}{timeline.bubble(rank):7.1%}  {bubble(*sizes):7.1%}"
            f"  {timeline.peak_live(rank):9}  {live_activations(engine, rank, *sizes):7}"
        )
    print(f"\nformula: {FORMULAS[engine]}")
    if num_micro_batches < ranks and chunks > 1:
        print("m < p: every way round the ranks is waited for, and the bubble is larger than that")
    elif num_micro_batches % ranks and engine == "interleaved":
        group = max(group_sizes(ranks, num_micro_batches))
        print(
            f"p does not divide m: micro-batches go in groups of up to {group}, not p; more is live"
        )
    return [timeline]


def draw(timeline: Timeline, width: int = 100, makespan: float = 0.0) -> str:
    """One line of text a rank; give a makespan to draw several timelines to one scale."""
    scale = max(1, width - len("rank 0  ")) / (makespan or timeline.makespan)
    if scale > 1:  # in whole columns, so that equal times look equal
        scale = int(scale)
    lines = []
    for rank in range(timeline.num_ranks):
        line = ["·"] * round(timeline.makespan * scale)
        for span, left, right in _boxes(timeline, rank, scale):
            line[left:right] = _label(span.action, right - left)
        lines.append(f"rank {rank:<2} " + "".join(line))
    return "\n".join(lines)


def _boxes(timeline: Timeline, rank: int, scale: float) -> list[tuple[Span, int, int]]:
    """The computing of a rank, each with where it begins and ends when drawn."""
    origin = min(span.start for span in timeline.spans)
    return [
        (span, round((span.start - origin) * scale), round((span.end - origin) * scale))
        for span in timeline.spans
        if span.rank == rank and span.action.peer is None
    ]


def _label(action: Action, columns: int) -> str:
    """The most telling of the action's names that fits, in exactly so many columns."""
    letter = action.kind.value.lower() if action.chunk % 2 else action.kind.value
    number = str(action.micro_batch)
    names = [letter + number, number, number[-1], ""]
    fill = "═" if action.kind is Kind.BACKWARD else "─"
    return next(name for name in names if len(name) <= columns).ljust(columns, fill)


def show_trace(path: str, width: int) -> list[Timeline]:
    """Draw a measured step under its plan: the same order of work, all ranks equally fast."""
    step, measured = read_trace(path)
    plans = [
        [span.action for span in measured.spans if span.rank == rank]
        for rank in range(measured.num_ranks)
    ]
    means = []
    for kind in (Kind.FORWARD, Kind.BACKWARD):
        times = [span.end - span.start for span in measured.spans if span.action.kind is kind]
        means.append(fmean(times) if times else 0.0)
    planned = simulate(insert_communication(plans), *means)
    makespan = max(planned.makespan, measured.makespan)
    for name, timeline in (("planned", planned), ("measured", measured)):
        print(f"{name}, step {step}: {timeline.makespan / 1000:.2f} ms")
        print(draw(timeline, width, makespan), "\n")
    print(f"mean forward {means[0] / 1000:.2f} ms, backward {means[1] / 1000:.2f} ms\n")
    print("        planned bubble  measured bubble")
    for rank in range(measured.num_ranks):
        print(f"rank {rank:<2}{planned.bubble(rank):15.1%}  {measured.bubble(rank):15.1%}")
    return [planned, measured]


def read_trace(path: str) -> tuple[int, Timeline]:
    """The last step in a Chrome trace: its number, and its timeline in microseconds.

    Forwards and backwards are the events whose `args` have step, micro_batch and chunk and whose
    name begins with F or B; `pid` is the rank within the pipeline. Others are passed over.
    Raises ValueError where there is no such step.
    """
    try:
        events = json.loads(Path(path).read_text())["traceEvents"]
        events = [e for e in events if e["name"][:1] in ("F", "B") and "step" in e.get("args", {})]
        step = max((e["args"]["step"] for e in events), default=None)
        spans = []
        for e in sorted(events, key=lambda e: e["ts"]):
            if e["args"]["step"] == step:
                kind, args = Kind(e["name"][0]), e["args"]
                action = Action(kind, args["micro_batch"], args["chunk"])
                spans.append(Span(e["pid"], action, e["ts"], e["ts"] + e["dur"]))
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a trace of ours: {error!r}") from None
    ranks = sorted({span.rank for span in spans})
    if not ranks or ranks != list(range(len(ranks))):
        raise ValueError(
            f"{path} has forwards and backwards of ranks {ranks}: it must have those of all the"
            " ranks of one pipeline, counted from 0"
        )
    return step, Timeline(len(ranks), spans)


# Indexed colours of the picture; a chunk has its own shade.
PALETTE = ["ffffff", "eeeeee", "000000"]  # paper, bubble, digits
PALETTE += ["8ab4f8", "c6dafc", "5e8ee6", "a9c8fa", "81c995", "ceead6", "5bb974", "a8dab5"]
PAPER, BUBBLE, INK, FORWARD, BACKWARD, SHADES = 0, 1, 2, 3, 7, 4
# Each digit is five rows of three pixels, a row written as an octal number.
FONT = ["75557", "26227", "71747", "71717", "55711", "74717", "74757", "71111", "75757", "75717"]
ZOOM, ROW_HEIGHT, MARGIN = 2, 24, 28


def write_png(timelines: list[Timeline], path: str) -> None:
    """A picture of timelines, one below the other, to one scale."""
    makespan = max(timeline.makespan for timeline in timelines)
    scale = min(24.0, 1600 / makespan)  # a forward is 24 pixels, or all fits into 1600
    width = round(makespan * scale) + 2 * MARGIN
    rows: list[bytearray] = []
    for timeline in timelines:
        rows += _paper(width, MARGIN // 2)
        for rank in range(timeline.num_ranks):
            row = _paper(width, ROW_HEIGHT)
            _digits(row, rank, 0, MARGIN)
            _fill(row, MARGIN, MARGIN + round(timeline.makespan * scale), BUBBLE)
            for span, left, right in _boxes(timeline, rank, scale):
                colour = BACKWARD if span.action.kind is Kind.BACKWARD else FORWARD
                _fill(row, MARGIN + left, MARGIN + right, colour + span.action.chunk % SHADES)
                _digits(row, span.action.micro_batch, MARGIN + left, MARGIN + right)
            rows += row
    rows += _paper(width, MARGIN // 2)
    header = struct.pack(">IIBBBBB", width, len(rows), 8, 3, 0, 0, 0)  # 8 bits, a palette
    pixels = zlib.compress(b"".join(b"\0" + row for row in rows))  # 0: the row is not filtered
    with open(path, "wb") as file:
        file.write(b"\x89PNG\r\n\x1a\n")
        for name, data in (
            (b"IHDR", header),
            (b"PLTE", bytes.fromhex("".join(PALETTE))),
            (b"IDAT", pixels),
            (b"IEND", b""),
        ):
            checksum = zlib.crc32(name + data)
            file.write(struct.pack(">I", len(data)) + name + data + struct.pack(">I", checksum))


def _paper(width: int, height: int) -> list[bytearray]:
    return [bytearray([PAPER]) * width for _ in range(height)]


def _fill(rows: list[bytearray], left: int, right: int, colour: int) -> None:
    """A box with a pixel of paper around it, if there is room."""
    for row in rows[1:-1]:
        row[left : right - 1] = bytes([colour]) * max(0, right - 1 - left)


def _digits(rows: list[bytearray], number: int, left: int, right: int) -> None:
    """A number in the middle of a box, or nothing if it does not fit."""
    text = str(number)
    advance = 4 * ZOOM  # three pixels and a gap
    x = (left + right - advance * len(text) + ZOOM) // 2
    if x <= left:
        return
    top = (len(rows) - 5 * ZOOM) // 2
    for digit in text:
        for y in range(5 * ZOOM):
            bits = int(FONT[int(digit)][y // ZOOM])
            for dx in range(3 * ZOOM):
                if bits & (4 >> dx // ZOOM):
                    rows[top + y][x + dx] = INK
        x += advance


if __name__ == "__main__":
    main()
