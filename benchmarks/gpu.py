"""How fast on one GPU, next to transformers' models:

    python benchmarks/gpu.py                                   all presets
    python benchmarks/gpu.py --presets SmolLM-1.7B --profile traces    and where the time goes
    python benchmarks/gpu.py --only "picotron-min compiled" --sizes 4  some contenders, and sizes
    python benchmarks/gpu.py --presets tiny --device cpu --steps 2     only to see that it runs

A step is as in train.py, on random tokens: bfloat16 with float32 weights, fused AdamW, clipping,
the same number of tokens for each contender. All contenders of a preset start from the same
weights, and their first losses and gradient norms must agree, or their times say nothing.

Each contender is alone in the GPU's memory, or large micro-batches would not fit, and has the
micro-batch that is fastest for it: powers of two are tried until one does not fit or is not faster.
It is measured as it is, and with its layers and its loss compiled: then from that size on, since
it needs less memory. The median counts. Beside ours is what its products take alone.

A row is printed, and written to the file of `--json`, as soon as it is measured. It is marked where
it is more than 5% slower than in benchmarks/gpu.json, the rows to hold it against, if it is there.
"""

import contextlib
import gc
import json
import sys
import time
import traceback
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import lru_cache, partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))  # measure this copy, installed or not

from benchmarks import common
from benchmarks.common import Done, Step, our_step
from benchmarks.products import products_alone
from picotron_min.data import Batches
from picotron_min.extensions.build import build_model
from picotron_min.extensions.settings import Layout, ModelConfig, Recipe, Workload
from picotron_min.mesh import build_axes
from picotron_min.optimizer import build_optimizer
from picotron_min.runtime import launch
from picotron_min.runtime.public_models import find_preset
from picotron_min.runtime.speed import peak_flops, speeds
from train import Run, build_run

# Relative: bfloat16 rounds a lot. Random tokens cost ln V whatever a model does, so it is the
# gradient's norm that tells models apart.
TOLERANCE = Done(0.01, 0.03)
RECIPE = Recipe(learning_rate=1e-4)
STEPS_OF_DATA = 8  # then the tokens come again
WARMUP = 3  # steps
ALONE = "its products alone"
PEER = "transformers"
CONTENDERS = ("picotron-min", ALONE, "picotron-min compiled", PEER, f"{PEER} compiled")
RECORDS = Path(__file__).with_suffix(".json")
HEAD = f"{'':28}{'mbs':>4}{'ms a step':>11}{'tokens/s':>11}{'MFU':>8}{'HFU':>8}{'GB':>7}"
HEAD += f"{'ours / it':>11}"


class Preset(NamedTuple):
    model: str
    seq_length: int
    recompute: str = "none"
    tokens: int = 2**15  # of a step

    @property
    def micro_batches(self) -> list[int]:
        """Sizes, in sequences."""
        return [2**i for i in range((self.tokens // self.seq_length).bit_length())]


PRESETS = {
    "SmolLM-1.7B": Preset("SmolLM-1.7B", 2048),
    "Llama-3.2-1B-8k": Preset("Llama-3.2-1B", 8192),
    "Qwen3-0.6B-8k": Preset("Qwen3-0.6B", 8192, "full"),
    "SmolLM-360M": Preset("SmolLM-360M", 2048),
    "Llama-3.2-1B-32k": Preset("Llama-3.2-1B", 32_768, "full"),
    "tiny": Preset("tiny", 64, tokens=256),
}


class Work(NamedTuple):
    """A preset on a device: what every contender is given."""

    preset: Preset
    device: torch.device

    def workload(self, micro_batch: int, compile: bool = False) -> Workload:
        preset, count = self.preset, self.preset.micro_batches[-1] // micro_batch
        kind = {"dtype": "bfloat16", "recompute": preset.recompute, "compile": compile}
        return Workload(preset.seq_length, micro_batch, count, **kind)

    def data(self, workload: Workload) -> Batches:
        """Random tokens: the same steps, whatever the micro-batch."""
        num_tokens = STEPS_OF_DATA * self.preset.tokens + 1
        return Batches(
            np.random.default_rng(0).integers(self.model_config.vocab_size, size=num_tokens),
            seq_length=workload.seq_length,
            seed=0,
            micro_batch_size=workload.micro_batch_size,
            num_micro_batches=workload.num_micro_batches,
            dp_rank=0,
            dp_size=1,
        )

    @property
    def model_config(self) -> ModelConfig:
        return find_preset(self.preset.model)


class Result(NamedTuple):
    contender: str
    micro_batch: int
    step_seconds: list[float]
    done: list[Done]  # by all steps, the warm-up included
    speed: dict[str, float | None]  # and memory: see runtime/speed.py


def main(arguments: list[str] | None = None) -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    on_gpu = [name for name in PRESETS if name != "tiny"]
    parser.add_argument("--presets", nargs="+", choices=PRESETS, default=on_gpu, metavar="NAME")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--steps", type=int, default=20, help="that are timed; default: 20")
    parser.add_argument("--only", nargs="+", choices=CONTENDERS, default=CONTENDERS, metavar="WHO")
    parser.add_argument("--sizes", nargs="+", type=int, help="micro-batches; default: the fastest")
    parser.add_argument("--json", type=Path, metavar="FILE", help="rows, beside what is printed")
    parser.add_argument("--profile", type=Path, metavar="FOLDER", help="traces, largest kernels")
    options = parser.parse_args(arguments)
    launch.set_environment()
    if options.profile and PROFILED not in options.only:
        parser.error(f'--profile profiles {PROFILED}: name "{PROFILED}" in --only')
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch finds no GPU: --device cpu --presets tiny shows that the script runs")
    recorded = json.loads(RECORDS.read_text()) if RECORDS.exists() else []
    with one_process(options.device) as device:
        machine, rows = common.facts(device), []
        for name, value in machine.items():
            print(f"{name:<13} {value}", flush=True)
        for name in options.presets:
            print(f"\n{name}\n{HEAD}", flush=True)
            work, results = Work(PRESETS[name], device), []
            for result in measure(work, options.only, options.sizes, options.steps):
                results.append(result)
                rows.append(record(machine, name, result))
                print(line(result, results) + slower(rows[-1], recorded), flush=True)
                if options.json:  # each time: the next contender may be cut off
                    options.json.write_text(json.dumps(rows, indent=1))
            sizes = {result.contender: result.micro_batch for result in results}
            if options.profile and PROFILED in sizes:
                trace = options.profile / f"{name}.json"
                print(profile(work, sizes[PROFILED], trace), flush=True)
            done = {r.contender: r.done for r in results if r.contender != ALONE}
            common.check_same_work(done, TOLERANCE)


@contextlib.contextmanager
def one_process(device: str) -> Iterator[torch.device]:
    """A process group of this process alone, which the mesh needs."""
    alone = launch.Launch(0, 0, 1, open_store=lambda timeout: dist.HashStore())
    chosen, backend = launch.choose_device(alone, use_cpu=device == "cpu")
    launch.open_process_group(alone, backend, alone.open_store(600), timedelta(seconds=600))
    yield chosen
    dist.destroy_process_group()


def measure(
    work: Work, only: Sequence[str], sizes: list[int] | None, steps: int
) -> Iterator[Result]:
    """Ours, with its products alone, and the peer; each as it is and compiled."""
    best = {}  # the micro-batch of each contender, as it is
    for who in filter(only.__contains__, CONTENDERS):
        known = best.get("picotron-min" if who == ALONE else who.removesuffix(" compiled"), 1)
        larger = [n for n in work.preset.micro_batches if n >= known]
        tried = [known] if who == ALONE else larger
        try:
            result = fastest(who, work, partial(make_step, who, work), sizes or tried, steps)
        except Exception as error:  # the others get their numbers, which cost minutes
            traceback.print_exception(error)
            continue
        best[who] = result.micro_batch
        yield result


def make_step(who: str, work: Work, size: int) -> Step:
    if who == ALONE:
        return products_alone(make_step("picotron-min", work, size), work.device)
    workload = work.workload(size, compile=who.endswith(" compiled"))
    if who.startswith(PEER):
        return transformers_model(work, workload)
    return our_step(our_run(work, workload))


PROFILED = "picotron-min compiled"


def profile(work: Work, size: int, trace: Path) -> str:
    """The operations that take most time in two steps; their Chrome trace goes to a file."""
    trace.parent.mkdir(parents=True, exist_ok=True)
    clean_up(work.device)
    step = make_step(PROFILED, work, size)
    step(0)  # makes the optimizer's state, and compiles
    with torch.profiler.profile() as profiler:
        step(1)
        step(2)
    profiler.export_chrome_trace(str(trace))
    order = f"self_{work.device.type.replace('cuda', 'device')}_time_total"
    return profiler.key_averages().table(sort_by=order, row_limit=25)


def fastest(who: str, work: Work, make: Callable, sizes: list[int], steps: int) -> Result:
    """Times with the micro-batch that is fastest; an error only if not even the first one runs."""
    best = None
    for size in sizes:
        clean_up(work.device)
        try:
            result = time_steps(who, work, size, make(size), steps)
        except RuntimeError as error:  # memory, of torch or of a library
            if not best:
                raise
            print(f"{who} at {size}: {str(error).partition(chr(10))[0]}", file=sys.stderr)
            break
        if best and result.speed["tokens_per_second"] < 1.01 * best.speed["tokens_per_second"]:
            break  # larger ones take memory for nothing
        best = result
    return best


def clean_up(device: torch.device) -> None:
    """Free what earlier contenders had, and forget what was compiled with other shapes."""
    torch._dynamo.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def time_steps(who: str, work: Work, size: int, step: Step, steps: int) -> Result:
    seconds, done = [], []
    for index in range(WARMUP + steps):
        if index == WARMUP and work.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(work.device)
        # Every step reads its loss, so the host is never more than one ahead of the GPU.
        began = time.perf_counter()
        done.append(step(index))
        seconds.append(time.perf_counter() - began)
    del seconds[:WARMUP]
    peak, speed = peak_flops(work.device, "bfloat16"), work.preset.tokens / median(seconds)
    numbers = speeds(work.model_config, work.workload(1), work.device, peak, speed)
    return Result(who, size, seconds, done, numbers)


@lru_cache(maxsize=1)
def weights_of(model: str) -> dict[str, Tensor]:
    """Everybody's, on the host: drawing them takes longer than a contender's steps."""
    return dict(common.initial_weights(find_preset(model), seed=0))


def our_run(work: Work, workload: Workload) -> Run:
    axes = build_axes(work.device, Layout())
    model = build_model(work.model_config, Layout(), workload, axes, work.device)
    common.fill(model.parameters, weights_of(work.preset.model).items())
    model.weights_changed()
    return build_run(model, RECIPE, work.data(workload))


def transformers_model(work: Work, workload: Workload) -> Step:
    """Hugging Face's model, in the loop that its users write, and their loss."""
    device, data = work.device, work.data(workload)
    with device:
        model = common.transformers_model(work.model_config)
    common.fill(dict(model.named_parameters()), weights_of(work.preset.model).items())
    if work.preset.recompute == "full":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    head_loss = linear_cross_entropy
    if workload.compile:  # what compiling the whole would fuse, in a fraction of the time
        head_loss = torch.compile(linear_cross_entropy, dynamic=False)
        for layer in model.model.layers:
            layer.compile(dynamic=False)
    optimizer = build_optimizer(model.parameters(), RECIPE)

    def step(index: int) -> Done:
        optimizer.zero_grad()
        total = torch.zeros((), device=device)
        for i in range(data.num_micro_batches):
            batch = data.batch(index, i).to(device)
            with torch.autocast(device.type, torch.bfloat16):
                x = model.model(batch.tokens, use_cache=False).last_hidden_state
                loss = head_loss(x, model.lm_head.weight, batch.targets) / data.num_micro_batches
            loss.backward()
            total += loss.detach()
        norm = nn.utils.clip_grad_norm_(model.parameters(), RECIPE.grad_clip)
        done = Done(*torch.stack([total, norm]).tolist())  # once a step, as we do
        optimizer.step()
        return done

    return step


def linear_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """As in transformers: all logits, in float32."""
    return F.cross_entropy(F.linear(x, weight).float().flatten(0, 1), targets.flatten())


def line(r: Result, results: list[Result]) -> str:
    """A row of a preset's table; the ratio is of our fastest's speed so far to this one's."""
    speeds = [r.speed["tokens_per_second"] for r in results if "picotron-min" in r.contender]
    shares = [f"{r.speed[x]:.1%}" if r.speed[x] else "n/a" for x in ("mfu", "hfu")]
    ms, speed = 1000 * median(r.step_seconds), r.speed["tokens_per_second"]
    numbers = f"{r.micro_batch:4}{ms:11.1f}{speed:11.0f}{shares[0]:>8}{shares[1]:>8}"
    ratio = max(speeds, default=0) / speed
    return f"{r.contender:28}{numbers}{r.speed['memory_gb']:7.1f}{ratio:11.3f}"


def record(machine: dict[str, str], preset: str, r: Result) -> dict[str, object]:
    return {**machine, "preset": preset, "contender": r.contender, "mbs": r.micro_batch, **r.speed}


def slower(row: dict, recorded: list[dict]) -> str:
    """A remark if the same was more than 5% faster on the same device."""
    keys, unit = ("device", "preset", "contender"), "tokens_per_second"
    best = max((o[unit] for o in recorded if all(o[k] == row[k] for k in keys)), default=0)
    return f"   SLOWER: {best:.0f} recorded" if row[unit] < 0.95 * best else ""


if __name__ == "__main__":
    main()
