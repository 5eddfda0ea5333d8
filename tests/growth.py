"""Growth: the exponents of time, memory and start-up over each size, beside those they should have.

    python -m tests.growth                                     all sweeps
    python -m tests.growth --only layers ranks                 some of them
    python -m tests.growth --picture docs/growth.svg           and a plot

An exponent is the slope of log y over log x at the largest sizes. The one that it should have is
the slope of a formula there: FLOPs and parameters by costs.py, bytes by the planner's memory.py, or
x itself. Constant parts make it smaller. If it is larger, by more than measuring explains, that is
a fault: the exit code is 1. Seconds are CPU time of a rank, so that weak scaling shows on two cores
and other work counts little; a step's are the least of three.
"""

import argparse
import gc
import importlib
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.compare import run_ranks
from benchmarks.ours import CPU, Place, build, picotron_min
from benchmarks.rows import MODEL, Row
from picotron_min.checkpoint import save, training_tensors
from picotron_min.costs import model_flops_per_token, parameter_count
from picotron_min.extensions.schedules.registry import build_plans
from picotron_min.extensions.settings import Workload
from picotron_min.planner.choices import Request, groups
from picotron_min.planner.memory import memory_per_rank
from picotron_min.planner.search import search
from picotron_min.planner.validate import log_log, point
from picotron_min.runtime.config_checks import resolve_model
from picotron_min.runtime.config_file import parse_config
from picotron_min.runtime.hardware import GPUS
from picotron_min.runtime.public_models import find_preset
from picotron_min.runtime.speed import memory_gb
from picotron_min.runtime.token_file import open_text
from picotron_min.runtime.tokenizer import load_tokenizer

LARGEST = 3  # so many sizes make the exponent: at smaller ones constant parts hide it
TOLERANCE = 0.2  # of a measured exponent
SMALL = MODEL | {"hidden_size": 64, "intermediate_size": 172, "num_hidden_layers": 2}
SMALL |= {"vocab_size": 512, "max_position_embeddings": 8192}
WORK = {"model": SMALL, "training": {"eval_batches": 0}}
STEP = {"seq_length": 64, "micro_batch_size": 1, "gradient_accumulation_steps": 1}


def row(distributed: dict | None = None, model: dict | None = None, **training: int) -> Row:
    return Row("", {}, distributed or {}, STEP | training, model or {})


# What is trained, by its size x.
WIDTHS = 64, 128, 256, 512, 1024  # 1M to 100M parameters
RUNS = {
    "ranks": {n: row({"dp_size": n}, seq_length=512) for n in (1, 2, 4, 8)},
    "sequence": {n: row(seq_length=n) for n in (256, 512, 1024, 2048, 4096, 8192)},
    "micro-batches": {n: row(gradient_accumulation_steps=n) for n in (1, 4, 16, 64)},
    "layers": {n: row(model={"num_hidden_layers": n}) for n in (2, 4, 8, 16, 32, 64)},
    "vocabulary": {n: row(model={"vocab_size": n}) for n in (257, 2048, 16384, 65536, 131072)},
    "parameters": {
        n: row(model=MODEL | {"hidden_size": n, "intermediate_size": 43 * n // 16}) for n in WIDTHS
    },
}


class Curve(NamedTuple):
    name: str
    quantity: str
    x: Sequence[float]
    y: Sequence[float]
    formula: Sequence[float]  # what y should be, but for a factor

    def exponents(self) -> tuple[float, float]:
        """As it should be, and as it is."""
        return tuple(exponent(self.x[-LARGEST:], y[-LARGEST:]) for y in (self.formula, self.y))


def exponent(x: Sequence[float], y: Sequence[float]) -> float:
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])


def run_curves(name: str, rows: dict[float, Row]) -> list[Curve]:
    """Seconds and bytes of training, of the median rank."""
    x, measured, formulas = [], [], []
    for size, of_size in rows.items():
        config = parse_config(of_size.sections(WORK))
        c, S = resolve_model(config), config.training.seq_length
        x.append(parameter_count(c) if name == "parameters" else size)
        measured.append(np.median(run_ranks(of_size, WORK, measure_run), axis=0))
        flops = model_flops_per_token(c, S) * config.tokens_per_step / config.world_size
        needed = memory_per_rank(c, config.layout, config.workload, "cpu").total
        formulas.append((flops, needed, parameter_count(c)))
    columns = zip(zip(*measured, strict=True), zip(*formulas, strict=True), strict=True)
    quantities = "step, s", "memory, GB", "start, s"
    return [Curve(name, q, x, *of) for q, of in zip(quantities, columns, strict=True)]


def measure_run(place: Place) -> tuple[float, float, float]:
    gc.freeze()  # what was there before makes each collection slower
    before, began = memory_gb(CPU), time.process_time()
    step, times = picotron_min(place), [time.process_time()]
    for index in range(4):
        step(index)
        times.append(time.process_time())
    return min(np.diff(times)[1:]), memory_gb(CPU) - before, times[0] - began


def seconds_of(function: Callable, *arguments) -> float:
    """The least of three."""
    times = [time.process_time()]
    for _ in range(3):
        function(*arguments)
        times.append(time.process_time())
    return min(np.diff(times))


def plans(folder: Path) -> list[Curve]:
    x = 512, 1024, 2048  # micro-batches on 8 ranks: at fewer, the garbage collector does not run
    kinds = {"1f1b": 1, "interleaved": 2, "zb_h1": 1, "zb_v": 2}
    return [
        Curve(f"plans, {k}", "tool, s", x, [seconds_of(build_plans, k, 8, n, v) for n in x], x)
        for k, v in kinds.items()
    ]


def planner(folder: Path) -> list[Curve]:
    x = 8, 64, 512, 2048  # GPUs
    model = find_preset("Llama-3.1-8B")
    work = Workload(8192, dtype="bfloat16")
    requests = [Request(model, GPUS["H100"], n, work, 4 * n) for n in x]
    choices = [len(list(groups(request))) for request in requests]
    return [Curve("planner", "tool, s", x, [seconds_of(search, r) for r in requests], choices)]


def checkpoints(folder: Path) -> list[Curve]:
    """Of what a run of each width saves, beside a plain write of as many bytes."""
    found = []
    for of_width in RUNS["parameters"].values():

        def saved(place: Place) -> tuple[float, float, float]:
            run = build(place)
            tensors = training_tensors(run.model.parameters, {}, run.optimizer)
            size, parts = sum(t.nbytes for t in tensors.values()), run.model.parts_of_whole(tensors)
            plain = folder / "plain"
            write = seconds_of(plain.write_bytes, bytes(size))
            return size, seconds_of(save, folder / "checkpoint", parts), write

        found += run_ranks(of_width, WORK, saved)
    size, ours, theirs = zip(*found, strict=True)
    speeds = (size[-1] / seconds[-1] / 1e6 for seconds in (ours, theirs))
    print("checkpoint: {:.0f} MB a second, a plain file {:.0f}".format(*speeds))
    return [Curve("checkpoint", "tool, s", size, ours, size)]


def token_file(folder: Path) -> list[Curve]:
    importlib.import_module("datasets")  # a second, which is not the tokens'
    x, seconds = (2**22, 2**24, 2**26), []
    line, text = "A line of text with some forty-odd characters.\n", folder / "text.txt"
    for size in x:
        text.write_text(line * (size // len(line)))
        dataset = {"name": str(text), "cache_dir": str(folder / str(size))}
        config = parse_config(WORK | {"dataset": dataset})
        began = time.process_time()
        open_text(config, load_tokenizer("bytes"), 512)
        seconds.append(time.process_time() - began)
    copy = seconds_of(shutil.copyfile, text, folder / "copy")
    speeds = (x[-1] / seconds / 1e6 for seconds in (seconds[-1], copy))
    print("token file: {:.0f} MB a second, cp {:.0f}".format(*speeds))
    return [Curve("token file", "tool, s", x, seconds, x)]


TOOLS = {f.__name__.replace("_", "-"): f for f in (plans, planner, checkpoints, token_file)}
COLOURS = {"step, s": "#0072B2", "memory, GB": "#D55E00", "start, s": "#009E73"}
COLOURS |= {"tool, s": "#CC79A7"}


def table(curves: list[Curve]) -> str:
    lines = [f"{'':32}{'from':>12}{'to':>12}{'y from':>10}{'to':>10}{'should be':>12}{'is':>7}"]
    for c in curves:
        should, found = c.exponents()
        ends = f"{c.x[0]:12,}{c.x[-1]:12,}{c.y[0]:10.3g}{c.y[-1]:10.3g}"
        fault = "  FAULT" * (found > should + TOLERANCE)
        lines.append(f"{c.name + ': ' + c.quantity:32}{ends}{should:12.2f}{found:7.2f}{fault}")
    return "\n".join(lines)


def draw(curves: list[Curve]) -> str:
    """All of them, from (1, 1): sizes and what they cost, relative to the smallest."""
    marks = []
    for c in curves:
        pairs = zip(c.x, c.y, strict=True)
        places = [point(x / c.x[0], max(0.1, y / c.y[0]), 0.1, 1000) for x, y in pairs]
        path = " ".join(f"{x},{y}" for x, y in places)
        should, found = c.exponents()
        about = f"{c.name}, {c.quantity}: exponent {found:.2f}, should be {should:.2f}"
        style = f'fill="none" stroke="{COLOURS[c.quantity]}" stroke-width="2"'
        marks.append(f'<polyline points="{path}" {style}><title>{about}</title></polyline>')
        x, y = places[-1]
        marks.append(f'<text x="{x}" y="{y}" fill="{COLOURS[c.quantity]}">{c.name}</text>')
    return log_log("Cost over size, both relative to the smallest", 0.1, 1000, marks, COLOURS)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.growth",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", nargs="+", choices=[*RUNS, *TOOLS], default=[*RUNS, *TOOLS])
    parser.add_argument("--picture", type=Path, metavar="FILE", help="an SVG of all curves")
    options = parser.parse_args(arguments)
    curves = []
    for name in options.only:
        with tempfile.TemporaryDirectory() as folder:
            new = run_curves(name, RUNS[name]) if name in RUNS else TOOLS[name](Path(folder))
        print(table(new), flush=True)
        curves += new
    if options.picture:
        options.picture.write_text(draw(curves))
    return any(found > should + TOLERANCE for should, found in (c.exponents() for c in curves))


if __name__ == "__main__":
    sys.exit(main())
