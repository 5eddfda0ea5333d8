"""What the user sees of a run, all of it from the records of metrics.py. One rank prints."""

import math
import time
from pathlib import Path

from rich.console import Console as RichConsole
from rich.console import Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.text import Text

from picotron_min.runtime.metrics import EvalRecord, StepRecord

PATIENCE = 300.0  # seconds; a run that gives no sign for longer looks as if it hung


class Console:
    """What the user sees: a header, progress, warnings and a summary.

    On a terminal a status line and a bar stay at the bottom; everywhere about 20 evenly spaced
    steps, the first and the last among them, and one every five minutes, are printed as lines of at
    most 80 columns. Use it as a context manager around the training loop.
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
        self._printed_at = 0.0
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
        waited = time.monotonic() - self._printed_at
        if at_an_end or record.step % self._every == 0 or waited > PATIENCE:
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
        self._printed_step, self._printed_at = record.step, time.monotonic()
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
