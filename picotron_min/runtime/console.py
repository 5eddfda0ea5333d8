"""What the user sees of a run, made from the records of metrics.py. One rank prints."""

import math
import time
from pathlib import Path

from rich.console import Console as RichConsole
from rich.console import Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.text import Text

from picotron_min.runtime.metrics import EvalRecord, StepRecord
from picotron_min.runtime.wording import counted, duration, human

MAX_SILENCE = 300.0  # seconds; a run that prints nothing for longer looks as if it hung
NOTHING = (0, 0.0, 0.0)  # steps, their seconds, their tokens


class Console:
    """A header, progress, warnings and a summary.

    On a terminal a status line and a bar stay at the bottom; everywhere about 20 evenly spaced
    steps, the first and the last among them, and one every five minutes, are printed as lines of at
    most 80 columns. Use it as a context manager around the training loop.
    """

    def __init__(
        self, first_step: int, last_step: int, *, prints: bool, rich: RichConsole | None = None
    ) -> None:
        self._rich = rich or RichConsole()
        self._rich.quiet = not prints
        self._last_step, self._width = last_step, len(str(last_step))
        self._every = max(1, math.ceil((last_step - first_step + 1) / 20))
        self._first = self._latest = self._printed = None  # StepRecords
        self._evaluations: list[EvalRecord] = []
        self._began = self._printed_at = 0.0
        self._work = self._printed_work = NOTHING
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
        self._print_step()  # of a run that stopped early

    def header(self, title: str, rows: dict[str, str]) -> None:
        width = max(len(name) for name in rows)
        self._print(title, style="bold")
        for name, value in rows.items():
            self._print(f"  {name:<{width}}  {value}")

    def step(self, record: StepRecord) -> None:
        if self._first is None:
            self._first, self._began = record, time.perf_counter() - record.step_seconds
        self._latest, (steps, seconds, tokens) = record, self._work
        step_tokens = record.step_seconds * record.tokens_per_second
        self._work = (steps + 1, seconds + record.step_seconds, tokens + step_tokens)
        if self._live:
            bar = ProgressBar(total=self._last_step, completed=record.step)
            status = Text(self._status(), no_wrap=True, overflow="ellipsis")
            self._live.update(Group(status, bar))
        at_an_end = record is self._first or record.step == self._last_step
        silence = time.monotonic() - self._printed_at
        if at_an_end or record.step % self._every == 0 or silence > MAX_SILENCE:
            self._print_step()

    def evaluation(self, record: EvalRecord) -> None:
        self._evaluations.append(record)
        self._print(f"step {record.step:>{self._width}}  validation {_validation(record)}")

    def warn(self, text: str) -> None:
        """Print a warning, below the line of the step that it is about."""
        self._print_step()
        self._print(f"warning: {text.strip()}", style="yellow")

    def summary(self, model_folder: Path | str, checkpoint: Path | None, prompt: str) -> None:
        """The results of the run, and the lines of Python that use the model in `model_folder`."""
        rows = {}
        if self._first:
            steps, tokens = counted(self._work[0], "step"), human(self._work[2])
            rows["trained"] = (
                f"{steps}, {tokens} tokens in {duration(time.perf_counter() - self._began)}"
            )
            if self._first.step > 1:  # resumed
                steps, tokens = counted(self._latest.step, "step"), human(self._latest.tokens)
                rows["in all"] = f"{steps}, {tokens} tokens"
            rows["speed"] = self._speed(since=NOTHING)
            rows["loss"] = f"{self._first.loss:.4f} -> {self._latest.loss:.4f}"
        if self._evaluations:
            first, last = self._evaluations[0], self._evaluations[-1]
            rows["validation"] = _validation(
                last, "" if first is last else f"{first.val_loss:.4f} -> "
            )
        if checkpoint:
            rows["checkpoint"] = str(checkpoint)
        rows["model"] = str(model_folder)
        self.header("Done", rows)
        self._print("Use the model:", style="bold")
        self._print(USAGE.format(folder=str(model_folder), prompt=prompt))

    def _speed(self, since: tuple) -> str:
        """The means of all steps since then."""
        _, seconds, tokens = (now - before for now, before in zip(self._work, since, strict=True))
        speed, latest = tokens / seconds, self._latest
        mfu = latest.mfu and latest.mfu / latest.tokens_per_second * speed  # proportional to speed
        return f"{human(speed)} tok/s  MFU {'n/a' if mfu is None else f'{mfu:.1%}'}"

    def _status(self) -> str:
        record = self._latest
        # The pace so far, with the evaluations and checkpoints between the steps.
        pace = (time.perf_counter() - self._began) / self._work[0]
        return (
            f"step {record.step:>{self._width}}/{self._last_step}  loss {record.loss:.4f}"
            f"  {self._speed(since=self._printed_work)}  {record.memory_gb:.2f} GB"
            f"  {duration(pace * (self._last_step - record.step))} left"
        )

    def _print_step(self) -> None:
        """Print the latest step, if it is new, with the mean speed since the last such line."""
        if self._latest is not self._printed:
            self._print(self._status())
            self._printed, self._printed_at = self._latest, time.monotonic()
            self._printed_work = self._work

    def _print(self, text: str, style: str | None = None) -> None:
        self._rich.print(
            text, style=style, soft_wrap=True, markup=False, highlight=False, emoji=False
        )


USAGE = """\
  from transformers import pipeline
  write = pipeline("text-generation", model="{folder}")
  text = write({prompt!r}, max_new_tokens=100, do_sample=True)
  print(text[0]["generated_text"])"""


def prompt_for(dataset: str) -> str:
    """A beginning that fits the text: Python code, or anything else."""
    return "def " if dataset == "stdlib" or dataset.endswith(".py") else "The "


def _validation(record: EvalRecord, first: str = "") -> str:
    bits = record.bits_per_byte
    return f"loss {first}{record.val_loss:.4f}" + (f" ({bits:.3f} bits per byte)" if bits else "")
