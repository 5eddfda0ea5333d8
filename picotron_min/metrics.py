"""What a run tells: the metrics file, wandb, the console, and the yardsticks for MFU and memory.

A step is measured once, as a StepRecord. Everything that is shown, plotted or compared comes from
these records. One rank writes and prints; on the others the same objects do nothing.
"""

import inspect
import json
import math
import re
import resource
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console as RichConsole
from rich.console import Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.text import Text

from picotron_min.costs import hardware_flops_per_token, model_flops_per_token
from picotron_min.llama_config import LlamaConfig


@dataclass(frozen=True)
class StepRecord:
    """One training step; None where a number is not known."""

    step: int
    loss: float  # mean over the target tokens of the global batch
    grad_norm: float  # before clipping
    learning_rate: float
    tokens: int  # trained on so far
    tokens_per_second: float
    tokens_per_second_per_device: float
    mfu: float | None  # share of the devices' peak FLOPs, 0 to 1
    hfu: float | None  # the same, with what recomputation runs again
    step_seconds: float
    memory_gb: float  # the writing rank's peak so far
    comm_bytes: dict[str, int]  # axis -> bytes this rank sent in the step


@dataclass(frozen=True)
class EvalRecord:
    """One evaluation; bits_per_byte compares models of different tokenizers."""

    step: int
    val_loss: float
    bits_per_byte: float | None = None


@dataclass(frozen=True)
class SaveRecord:
    """One checkpoint; the step loop stood still for so long."""

    step: int
    save_seconds: float


class MetricsLog:
    """Appends every record to a file of JSON lines and, if asked, to wandb.

    A resumed run appends to the same file: where a step is there twice, the later line counts.
    `wandb_options` are `wandb.init`'s (project, name, config, dir), None for no wandb.
    """

    def __init__(self, path: Path, *, writes: bool, wandb_options: dict | None = None) -> None:
        self._file = self._run = None
        if writes:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a", encoding="utf-8")
            if wandb_options is not None:
                self._run = start_wandb(**wandb_options)

    def write(self, record: StepRecord | EvalRecord | SaveRecord) -> None:
        values = {name: finite_or_none(value) for name, value in asdict(record).items()}
        if self._file:
            self._file.write(json.dumps(values, allow_nan=False) + "\n")
            self._file.flush()  # so that a killed run leaves every step it finished
        if self._run:
            known = {name: value for name, value in values.items() if value is not None}
            self._run.log(known, step=known.pop("step"))

    def close(self) -> None:
        if self._file:
            self._file.close()
        if self._run:
            self._run.finish()


def finite_or_none(value: object) -> object:
    """JSON has no NaN and no infinity; null is what every reader takes for a missing number."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def start_wandb(**options):
    """A wandb run that never asks: online where the user is logged in, else offline.

    WANDB_MODE and the other settings of wandb are read by wandb itself and win.
    """
    import wandb

    mode = wandb.setup().settings.mode
    if mode == "online" and not _is_logged_in(wandb):
        mode = "offline"
    return wandb.init(mode=mode, **options)


def _is_logged_in(wandb) -> bool:
    if "prompt" in inspect.signature(wandb.login).parameters:
        return wandb.login(prompt=False, verify=False)
    return bool(wandb.api.api_key)  # releases before `prompt` existed


class Console:
    """What the user sees: a header, progress, warnings and a summary.

    On a terminal a status line and a bar stay at the bottom; everywhere about 20 evenly spaced
    steps, the first and the last among them, are printed as lines of at most 80 columns. Use it as
    a context manager around the training loop.
    """

    def __init__(
        self, first_step: int, last_step: int, *, prints: bool, rich: RichConsole | None = None
    ) -> None:
        self._rich = rich or RichConsole()
        self._rich.quiet = not prints
        self._last_step = last_step
        self._every = max(1, math.ceil((last_step - first_step + 1) / 20))
        self._first: StepRecord | None = None
        self._latest: StepRecord | None = None
        self._evaluation: EvalRecord | None = None
        self._first_at = 0.0  # when the first step was done
        self._printed_step: int | None = None
        live = prints and self._rich.is_terminal and not self._rich.is_dumb_terminal
        self._live = Live(console=self._rich, transient=True) if live else None

    def __enter__(self) -> "Console":
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_) -> None:
        if self._live:
            self._live.stop()
            self._live = None
        if self._latest and self._latest.step != self._printed_step:
            self._print_step(self._latest)  # a run that stopped early

    def header(self, title: str, rows: dict[str, str]) -> None:
        self._print(title, style="bold")
        self._print_rows(rows)

    def step(self, record: StepRecord) -> None:
        if self._first is None:
            self._first, self._first_at = record, time.perf_counter()
        self._latest = record
        at_an_end = record is self._first or record.step == self._last_step
        if at_an_end or record.step % self._every == 0:
            self._print_step(record)
        if self._live:
            bar = ProgressBar(total=self._last_step, completed=record.step)
            status = Text(self._status(record), no_wrap=True, overflow="ellipsis")
            self._live.update(Group(status, bar))

    def evaluation(self, record: EvalRecord) -> None:
        self._evaluation = record
        self._print(f"step {record.step:>{self._width}}  validation {self._validation()}")

    def warn(self, text: str) -> None:
        self._print(f"warning: {text}", style="yellow")

    def summary(self, model_folder: Path | str, checkpoint: Path | str | None = None) -> None:
        """What came of the run, and the lines of Python that use the model in `model_folder`."""
        rows = {}
        if self._first and self._latest:
            steps = self._latest.step - self._first.step + 1
            rows["trained"] = f"{steps} steps in {duration(self._elapsed())}"
            rows["tokens"] = human(self._latest.tokens)
            rows["loss"] = f"{self._first.loss:.4f} -> {self._latest.loss:.4f}"
        if self._evaluation:
            rows["validation"] = self._validation()
        if checkpoint:
            rows["checkpoint"] = str(checkpoint)
        rows["model"] = str(model_folder)
        self._print("Done", style="bold")
        self._print_rows(rows)
        self._print("Use the model:", style="bold")
        self._print(USAGE.format(folder=str(model_folder)))

    def _validation(self) -> str:
        record = self._evaluation
        text = f"loss {record.val_loss:.4f}"
        if record.bits_per_byte is not None:
            text += f" ({record.bits_per_byte:.3f} bits per byte)"
        return text

    def _elapsed(self) -> float:
        """Seconds of all steps so far, with the evaluations and checkpoints between them."""
        return self._first.step_seconds + time.perf_counter() - self._first_at

    @property
    def _width(self) -> int:
        return len(str(self._last_step))

    def _status(self, record: StepRecord) -> str:
        mfu = "n/a" if record.mfu is None else f"{record.mfu:.1%}"
        done = record.step - self._first.step + 1
        left = (self._last_step - record.step) * self._elapsed() / done
        return (
            f"step {record.step:>{self._width}}/{self._last_step}  loss {record.loss:.4f}"
            f"  {human(record.tokens_per_second)} tok/s  MFU {mfu}  {record.memory_gb:.2f} GB"
            f"  {duration(left)} left"
        )

    def _print_step(self, record: StepRecord) -> None:
        self._printed_step = record.step
        self._print(self._status(record))

    def _print_rows(self, rows: dict[str, str]) -> None:
        width = max(len(name) for name in rows)
        for name, value in rows.items():
            self._print(f"  {name:<{width}}  {value}")

    def _print(self, text: str, style: str | None = None) -> None:
        self._rich.print(
            text, style=style, soft_wrap=True, markup=False, highlight=False, emoji=False
        )


USAGE = """\
  from transformers import pipeline
  write = pipeline("text-generation", model="{folder}")
  text = write("import ", max_new_tokens=100, do_sample=True)
  print(text[0]["generated_text"])"""


def human(number: float) -> str:
    """Three digits and a unit of thousands: 950, 1.24B, 12.3k."""
    for unit in ("", "k", "M", "B", "T"):
        if number < 999.5 or unit == "T":
            digits = 0 if unit == "" or number >= 99.95 else 1 if number >= 9.995 else 2
            return f"{number:.{digits}f}{unit}"
        number /= 1000
    raise AssertionError("the last unit takes any number")


def duration(seconds: float) -> str:
    """As 7s, 3m20s or 5h07m."""
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}m{rest:02}s" if minutes else f"{rest}s"
    return f"{minutes // 60}h{minutes % 60:02}m"


class Speedometer:
    """Turns tokens per second into the step record's figures of speed, on every rank alike."""

    def __init__(
        self,
        model: LlamaConfig,
        seq_length: int,
        recompute: str,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self._device = device
        self._peak = peak_flops(device, dtype)
        self._flops = model_flops_per_token(model, seq_length)
        self._hardware_flops = hardware_flops_per_token(model, seq_length, recompute)

    def measure(self, tokens_per_second: float, devices: int) -> dict[str, float | None]:
        """The fields of StepRecord that come of it, and the memory."""
        speed = tokens_per_second / devices
        return {
            "tokens_per_second": tokens_per_second,
            "tokens_per_second_per_device": speed,
            "mfu": self._peak and self._flops * speed / self._peak,
            "hfu": self._peak and self._hardware_flops * speed / self._peak,
            "memory_gb": memory_gb(self._device),
        }


def memory_gb(device: torch.device) -> float:
    """This process's peak in 10^9 bytes: torch's allocations on a GPU, all it holds on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, Linux kilobytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """The device's peak FLOPs per second in that dtype: from the table, or measured on a CPU.

    None for a GPU that is not in the table: MFU is then not known, and not guessed.
    """
    if device.type != "cuda":
        return measure_peak_flops(device, dtype)
    return table_peak_flops(torch.cuda.get_device_name(device), dtype)


def table_peak_flops(device_name: str, dtype: torch.dtype) -> float | None:
    """Peak FLOPs per second by the name that the driver gives, None if it is not in the table.

    The whole name must fit: a laptop's RTX 4090 or a slice of an H100 (MIG) is another device.
    """
    for pattern, teraflops in PEAK_TERAFLOPS.items():
        if re.fullmatch(pattern, device_name):
            peak = teraflops.get(dtype)
            return None if peak is None else peak * 1e12
    return None


def _peaks(bfloat16: float, float32: float, float64: float | None = None) -> dict:
    peaks = {torch.bfloat16: bfloat16, torch.float32: float32, torch.float64: float64}
    return {dtype: peak for dtype, peak in peaks.items() if peak is not None}


# Dense peaks (no sparsity) from the vendors' data sheets and architecture whitepapers. bfloat16 and
# float64 on matrix units with full accumulation; float32 without TF32, which torch leaves off. The
# consumer cards' float64 is a token, and left out.
PEAK_TERAFLOPS = {
    r"NVIDIA A100-(SXM4?|PCIE)-[48]0GB|NVIDIA A100 80GB PCIe": _peaks(312, 19.5, 19.5),
    r"NVIDIA H100 80GB HBM3": _peaks(989.4, 66.9, 66.9),  # the SXM form
    r"NVIDIA H100 PCIe": _peaks(756, 51.2, 51.2),
    r"NVIDIA H100 NVL": _peaks(835.5, 60, 60),
    r"NVIDIA H200": _peaks(989.4, 66.9, 66.9),
    r"NVIDIA H200 NVL": _peaks(835.5, 60, 60),
    r"NVIDIA B200": _peaks(2250, 75, 37),
    r"NVIDIA L4": _peaks(121, 30.3),
    r"NVIDIA L40S": _peaks(362, 91.6),
    r"NVIDIA GeForce RTX 4090": _peaks(165.2, 82.6),
    r"NVIDIA GeForce RTX 3090": _peaks(71, 35.6),
    r"AMD Instinct MI300X( OAM)?": _peaks(1307.4, 163.4, 163.4),
}


def measure_peak_flops(
    device: torch.device, dtype: torch.dtype, size: int = 1024, seconds: float = 0.2
) -> float:
    """The best of several [size, size] matmuls in FLOPs per second, with this process's threads.

    A CPU is timed by the work it does for this process, so that other work does not lower the peak.
    """
    a = torch.randn(size, size, device=device).to(dtype)
    on_gpu = device.type == "cuda"

    def clock() -> float:
        if on_gpu:
            torch.cuda.synchronize()
            return time.perf_counter()
        return time.process_time() / torch.get_num_threads()

    best, deadline = math.inf, time.perf_counter() + seconds
    a @ a  # the first one allocates, and sets the library up
    while time.perf_counter() < deadline or best == math.inf:
        started = clock()
        a @ a
        best = min(best, clock() - started)
    return 2 * size**3 / best
