"""How fast on one GPU, next to transformers' Llama:

    python benchmarks/gpu.py                                   all presets, in eight minutes or so
    python benchmarks/gpu.py --presets SmolLM-1.7B --profile traces    and where the time goes
    python benchmarks/gpu.py --presets tiny --device cpu --quick       only to see that it runs

A step is that of train.py, on random tokens: bfloat16 with float32 weights, fused AdamW, clipping,
the same number of tokens for everybody. Contenders of a preset start from the same weights, and
their first losses and gradient norms must agree: to compare different work is worth nothing.

Each contender is alone in the GPU's memory, or large micro-batches would not fit, and has the
micro-batch that is fastest for it: powers of two are tried, as far as memory.py lets hope and until
one does not fit or is not faster. It is then measured as it is, and once more with its layers and
its loss compiled: with the same micro-batch, and where time is left with twice that, because what
is compiled needs less memory. The median of 20 steps counts.

What is left of `--minutes` is shared among the presets that are left, and among their contenders:
one that is too slow for its share is left out, and the table says so. The clock is read between
runs, so it can be late by one start, a minute or so. Presets that matter most come first.
"""

import argparse
import contextlib
import gc
import itertools
import json
import math
import platform
import statistics
import subprocess
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timedelta
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from picotron_min.data import Batches
from picotron_min.extensions.build import build_model
from picotron_min.extensions.memory.recompute import apply_compile
from picotron_min.extensions.overlap.linear import linears
from picotron_min.extensions.schedules.registry import build_plans
from picotron_min.extensions.settings import Layout, ModelConfig, Recipe, Workload
from picotron_min.initialise import initialise
from picotron_min.mesh import build_axes
from picotron_min.optimizer import build_optimizer
from picotron_min.planner.memory import memory_per_rank
from picotron_min.runtime.launch import (
    Launch,
    choose_backend,
    choose_device,
    open_process_group,
    set_environment,
)
from picotron_min.runtime.public_models import find_preset
from picotron_min.runtime.speed import Speedometer, device_name
from train import build_run, train_step

CHECKED_STEPS = 3
# Relative, between the contenders in those steps: bfloat16 rounds a lot. Random tokens cost ln V
# whatever a model does, so it is the gradient's norm that tells models apart.
TOLERANCES = {"losses": 0.01, "norms": 0.03}
RECIPE = Recipe(learning_rate=1e-4)
STEPS_OF_DATA = 8  # then the tokens come again
ATTENTION = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


class Preset(NamedTuple):
    model: str
    seq_length: int
    recompute: str = "none"
    tokens: int = 2**15  # of a step

    @property
    def sequences(self) -> int:
        return self.tokens // self.seq_length


PRESETS = {
    "SmolLM-1.7B": Preset("SmolLM-1.7B", 2048),
    "Llama-3.2-1B-8k": Preset("Llama-3.2-1B", 8192),
    "SmolLM-360M": Preset("SmolLM-360M", 2048),
    "SmolLM-135M": Preset("SmolLM-135M", 2048),
    "Llama-3.2-1B-4k": Preset("Llama-3.2-1B", 4096),
    "Llama-3.2-1B-32k": Preset("Llama-3.2-1B", 32_768, "full"),
    "tiny": Preset("tiny", 64, tokens=256),
}
DEFAULT = [name for name in PRESETS if name != "tiny"]


class Work(NamedTuple):
    """A preset on a device: what every contender is given."""

    preset: Preset
    device: torch.device

    def workload(self, micro_batch: int) -> Workload:
        preset, count = self.preset, self.preset.sequences // micro_batch
        return Workload(preset.seq_length, micro_batch, count, "bfloat16", preset.recompute)

    def data(self, micro_batch: int) -> Batches:
        """Random tokens: the same steps, whatever the micro-batch."""
        work, num_tokens = self.workload(micro_batch), STEPS_OF_DATA * self.preset.tokens + 1
        return Batches(
            np.random.default_rng(0).integers(self.model_config.vocab_size, size=num_tokens),
            seq_length=work.seq_length,
            seed=0,
            micro_batch_size=micro_batch,
            num_micro_batches=work.num_micro_batches,
            dp_rank=0,
            dp_size=1,
        )

    @property
    def model_config(self) -> ModelConfig:
        return find_preset(self.preset.model)


class Effort(NamedTuple):
    warmup: int
    steps: int


FULL, QUICK = Effort(3, 20), Effort(3, 5)


class Contender(NamedTuple):
    """A model on the device, and how it is trained."""

    parameters: dict[str, nn.Parameter]
    optimizer: torch.optim.Optimizer
    step: Callable[[Batches, int], tuple[float, float]]  # data, which step -> loss, gradient norm
    compile: Callable[[], None]
    weights_changed: Callable[[], None] = lambda: None  # to be called after the parameters have


@dataclass
class Result:
    preset: str
    contender: str
    micro_batch: int = 0
    step_seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)  # of the first steps
    tokens_per_second: float | None = None
    mfu: float | None = None
    hfu: float | None = None
    memory_gb: float | None = None
    left_out: str = ""  # why there are no numbers
    norms: list[float] = field(default_factory=list)  # beside the losses


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--presets", nargs="+", choices=PRESETS, default=DEFAULT, metavar="NAME")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK.steps} steps, not 20")
    parser.add_argument("--minutes", type=float, default=7.5, help="for everything; default: 7.5")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers here")
    parser.add_argument("--profile", type=Path, metavar="FOLDER", help="traces, largest kernels")
    parser.add_argument("--attention", choices=ATTENTION, help="kernel to prefer, for all")
    options = parser.parse_args(arguments)
    if options.json:
        options.json.open("a").close()  # an error now rather than after minutes
    set_environment()
    end = time.monotonic() + 60 * options.minutes
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch finds no GPU: --device cpu --presets tiny shows that the script runs")
    with one_process(options.device) as device, prefer(options.attention):
        facts = describe(device) | {"attention": options.attention or "torch's choice"}
        print("\n".join(f"{name:<13} {value}" for name, value in facts.items()), flush=True)
        results = []
        for i, name in enumerate(options.presets):
            now = time.monotonic()
            until = now + (end - now) / (len(options.presets) - i)
            effort = QUICK if options.quick else FULL
            results += measure(name, device, effort, until, options.profile)
            print(f"\n{table(results[-4:])}", flush=True)
            if options.json:
                written = facts | {"results": [asdict(result) for result in results]}
                options.json.write_text(json.dumps(written, indent=2) + "\n")
    check_same_work(results)


@contextlib.contextmanager
def one_process(device: str) -> Iterator[torch.device]:
    """A process group of this process alone, which the mesh needs."""
    launch = Launch(0, 0, 1, open_store=lambda timeout: dist.HashStore())
    chosen = choose_device(launch, use_cpu=device == "cpu")
    backend = choose_backend(chosen, "auto")
    open_process_group(launch, backend, launch.open_store(600), timedelta(seconds=600))
    yield chosen
    dist.destroy_process_group()


def prefer(attention: str | None) -> contextlib.AbstractContextManager:
    if not attention:
        return contextlib.nullcontext()
    others = [kernel for name, kernel in ATTENTION.items() if name != attention]
    return sdpa_kernel([ATTENTION[attention], *others], set_priority=True)


def describe(device: torch.device) -> dict[str, str]:
    """What one must know to read the numbers."""
    try:
        peer = version("transformers")
    except PackageNotFoundError:
        peer = "not installed"
    return {
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "device": device_name(device),
        "driver": driver() if device.type == "cuda" else "none",
        "torch": f"{torch.__version__}, CUDA {torch.version.cuda}",
        "python": platform.python_version(),
        "transformers": peer,
    }


def driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True).stdout.split()[0]
    except (OSError, IndexError):
        return "unknown"


def measure(
    name: str, device: torch.device, effort: Effort, until: float, profile_to: Path | None = None
) -> list[Result]:
    """Four results: ours and the peer, each as it is and compiled, sharing the time."""
    work, results, weights = Work(PRESETS[name], device), [], {}
    contenders = {"picotron-min": picotron_min, "transformers": transformers_llama}
    for to_come, (who, build) in zip((2, 1), contenders.items(), strict=True):
        now = time.monotonic()
        share = now + (until - now) / to_come
        plain, compiled = Result(name, who), Result(name, f"{who} compiled")
        results += [plain, compiled]
        contender = None
        with leaving_out(plain, compiled):
            if now > until:
                raise OutOfTime("no time is left for it")
            contender = build(work)
            if not weights:  # the first one's are everybody's
                weights = {n: p.to("cpu", copy=True) for n, p in contender.parameters.items()}
        if contender:
            with leaving_out(plain):
                plain.micro_batch = fastest_micro_batch(contender, work)
                start_again(contender, weights)
                time_steps(contender, work, plain, effort, share)
            with leaving_out(compiled):
                if time.monotonic() > share:
                    raise OutOfTime("no time is left for it")
                compiled.micro_batch = plain.micro_batch or 1
                contender.compile()
                start_again(contender, weights)
                began = time.monotonic()
                time_steps(contender, work, compiled, effort, share)
                took, twice = time.monotonic() - began, 2 * compiled.micro_batch
                if twice <= work.preset.sequences and time.monotonic() + took < share:
                    compiled = results[-1] = faster_with(twice, contender, work, compiled, effort)
                if profile_to and who == "picotron-min":
                    profile(contender, work.data(compiled.micro_batch), profile_to / f"{name}.json")
        contender = None  # its memory is the next one's
        clean_up(device)
    return results


@contextlib.contextmanager
def leaving_out(*results: Result) -> Iterator[None]:
    """Whatever is wrong with a contender, the others get their numbers, which cost minutes."""
    try:
        yield
    except Exception as error:
        reason = str(error).partition("\n")[0]
        if not isinstance(error, (OutOfTime, ImportError, torch.OutOfMemoryError)):
            traceback.print_exception(error)
            reason = f"{type(error).__name__}: {reason}"
        for result in results:
            if not result.step_seconds:
                result.left_out = reason


def faster_with(
    micro_batch: int, contender: Contender, work: Work, result: Result, effort: Effort
) -> Result:
    """The result with this micro-batch if it fits and is faster, else the one there is."""
    other = replace(result, micro_batch=micro_batch, step_seconds=[])
    try:
        time_steps(contender, work, other, effort)
    except torch.OutOfMemoryError:
        return result
    return max(result, other, key=lambda r: r.tokens_per_second)


class OutOfTime(Exception):
    """The preset's share of the minutes is used up."""


def clean_up(device: torch.device) -> None:
    """Let go of what earlier contenders had, on the device and in the compiler, which gives up on
    a function that it has seen with too many shapes."""
    torch._dynamo.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def picotron_min(work: Work) -> Contender:
    layout, axes = Layout(), build_axes(work.device, Layout())
    model = build_model(work.model_config, layout, work.workload(1), axes, work.device)
    initialise(model.parameters, work.model_config, 0, model.placements, axes)
    model.weights_changed()
    run = build_run(model, RECIPE, work.data(1))

    def step(data: Batches, index: int) -> tuple[float, float]:
        # A model is made for one micro-batch size; a new one would draw its weights again.
        (plan,) = build_plans("1f1b", 1, data.num_micro_batches, 1)
        result = train_step(run._replace(model=replace(model, plan=plan), batches=data), index)
        return result.loss, result.grad_norm

    def compile() -> None:
        """As model.compile in one process, where a layer is then one graph."""
        (chunk,) = model.pipeline.chunks
        for linear in linears(chunk.model).values():
            del linear.forward  # the one with a queue
        apply_compile(chunk.model)

    return Contender(model.parameters, run.optimizer, step, compile, model.weights_changed)


def transformers_llama(work: Work) -> Contender:
    """Hugging Face's model with SDPA, in the loop that its users write, and their loss.

    Compiled are its layers, one by one like ours, and the loss with the projection before it: what
    compiling the whole would fuse, in a fraction of the time that takes.
    """
    import transformers

    from picotron_min.runtime.architectures import to_hf  # needs pydantic

    device, shape = work.device, to_hf(work.model_config)
    with device:
        model = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(**shape, attn_implementation="sdpa")
        )
    if work.preset.recompute == "full":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    head_loss = linear_cross_entropy
    optimizer = build_optimizer(model.parameters(), RECIPE)

    def step(data: Batches, index: int) -> tuple[float, float]:
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
        total, norm = torch.stack([total, norm]).tolist()  # once a step, as we do
        optimizer.step()
        return total, norm

    def compile() -> None:
        nonlocal head_loss
        head_loss = torch.compile(linear_cross_entropy, dynamic=False)
        for layer in model.model.layers:
            layer.compile(dynamic=False)

    return Contender(dict(model.named_parameters()), optimizer, step, compile)


def linear_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """As in transformers: all logits, in float32."""
    return F.cross_entropy(F.linear(x, weight).float().flatten(0, 1), targets.flatten())


def start_again(contender: Contender, weights: dict[str, Tensor]) -> None:
    for name, parameter in contender.parameters.items():
        parameter.data.copy_(weights[name])
    contender.weights_changed()
    contender.optimizer.state.clear()


def fastest_micro_batch(contender: Contender, work: Work) -> int:
    """By trying; torch.OutOfMemoryError if not even a single sequence fits."""
    best, best_seconds = 0, float("inf")
    for size in candidates(work):
        data = work.data(size)
        try:
            contender.step(data, 0)
            began = time.perf_counter()
            contender.step(data, 1)
            contender.step(data, 2)
            seconds = time.perf_counter() - began
        except torch.OutOfMemoryError:
            if not best:
                raise
            break
        if seconds > 0.99 * best_seconds:
            break  # larger ones take memory for nothing
        best, best_seconds = size, seconds
    clean_up(work.device)
    return best


def candidates(work: Work) -> list[int]:
    """Powers of two that our own model should fit with; 1 always, let it show."""
    on_gpu = work.device.type == "cuda"
    limit = torch.cuda.mem_get_info(work.device)[1] if on_gpu else math.inf

    def needed(size: int) -> int:
        return memory_per_rank(work.model_config, Layout(), work.workload(size)).total

    sizes = [2**i for i in range(work.preset.sequences.bit_length())]
    return [size for size in sizes if size == 1 or needed(size) <= limit]


def time_steps(
    contender: Contender, work: Work, result: Result, effort: Effort, until: float = math.inf
) -> None:
    """Fill in a result; OutOfTime if its steps would take longer than `until`."""
    device, data, times = work.device, work.data(result.micro_batch), []
    for index in range(effort.warmup + effort.steps):
        # Every step reads its loss, so the host is never more than one ahead of the GPU.
        began = time.perf_counter()
        loss, norm = contender.step(data, index)
        times.append(time.perf_counter() - began)
        if len(result.losses) < CHECKED_STEPS:
            result.losses.append(loss)
            result.norms.append(norm)
        if index == effort.warmup - 1:
            needs, has = effort.steps * times[-1], until - time.monotonic()
            if needs > has:
                raise OutOfTime(f"needs {needs:.0f} s, and the preset has {max(has, 0):.0f} left")
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
    result.step_seconds = times[effort.warmup :]
    speedometer = Speedometer(work.model_config, work.workload(1), device)
    tokens_per_second = work.preset.tokens / statistics.median(result.step_seconds)
    measured = speedometer.measure(tokens_per_second, devices=1)
    for name in ("tokens_per_second", "mfu", "hfu", "memory_gb"):
        setattr(result, name, measured[name])


def profile(contender: Contender, data: Batches, file: Path) -> None:
    """Print the largest kernels of two steps, and write their Chrome trace."""
    with torch.profiler.profile() as profiler:  # of a GPU as well, where there is one
        for index in range(2):
            contender.step(data, index)
    file.parent.mkdir(parents=True, exist_ok=True)
    on_gpu = next(iter(contender.parameters.values())).is_cuda
    profiler.export_chrome_trace(str(file))
    order = f"self_{'device' if on_gpu else 'cpu'}_time_total"
    print(f"\n{profiler.key_averages().table(sort_by=order, row_limit=20)}\ntrace: {file}")


def table(results: list[Result]) -> str:
    """The contenders of a preset, ours first; ratios are of our fastest's speed to theirs."""
    fastest = max((r.tokens_per_second or 0 for r in results[:2]), default=0)
    lines = [
        f"{results[0].preset:24}{'mbs':>4}{'ms a step':>11}{'tokens/s':>11}{'MFU':>8}{'HFU':>8}"
        f"{'GB':>7}{'ours / it':>11}"
    ]
    for r in results:
        if r.left_out:
            lines.append(f"{r.contender:24}left out: {r.left_out}")
            continue
        shares = "".join(f"{'n/a' if x is None else f'{x:.1%}':>8}" for x in (r.mfu, r.hfu))
        lines.append(
            f"{r.contender:24}{r.micro_batch:4}{1000 * statistics.median(r.step_seconds):11.1f}"
            f"{r.tokens_per_second:11.0f}{shares}{r.memory_gb:7.1f}"
            f"{fastest / r.tokens_per_second:11.3f}"
        )
    return "\n".join(lines)


def check_same_work(results: list[Result]) -> None:
    """ValueError if contenders of a preset differ in the loss or the norm of an early step."""
    for other, (what, tolerance) in itertools.product(results, TOLERANCES.items()):
        same = [r for r in results if r.preset == other.preset and getattr(r, what)]
        ours = same[0] if same else other
        mine, theirs = getattr(ours, what), getattr(other, what)
        if any(not abs(a - b) <= tolerance * abs(a) for a, b in zip(mine, theirs, strict=False)):
            raise ValueError(
                f"{ours.preset}: the first {what} of {ours.contender} are {mine}, those of"
                f" {other.contender} {theirs}: they do not do the same work, so their times cannot"
                " be compared"
            )


if __name__ == "__main__":
    main()
