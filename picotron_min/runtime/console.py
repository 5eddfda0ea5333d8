"""What the user sees of a run, made from the records of metrics.py. One rank prints.

About 20 evenly spaced steps, the first and the last among them, and at least one step a minute.
"""

import math
import shlex
import time
from collections.abc import Callable
from pathlib import Path
from statistics import fmean

from picotron_min.runtime.metrics import EvalRecord, StepRecord
from picotron_min.runtime.wording import counted, duration, human


class Console:
    """A header, progress, warnings and a summary, each line given to `output`."""

    def __init__(self, first_step: int, last_step: int, output: Callable[[str], None]) -> None:
        self._print = output
        self._last_step, self._width = last_step, len(str(last_step))
        self._every = math.ceil((last_step - first_step + 1) / 20)
        self._steps: list[StepRecord] = []  # the first and the latest, here and below
        self._evaluations: list[EvalRecord] = []
        self._seconds: list[float] = []  # of each step
        self._line, self._printed = "", 0  # of the latest step, until printed; steps until then
        self._began = self._printed_at = 0.0

    def header(self, title: str, rows: dict[str, str]) -> None:
        self._print(title)
        for name, value in rows.items():
            self._print(f"  {name:<{max(map(len, rows))}}  {value}")

    def step(self, record: StepRecord) -> None:
        step, last = record.step, self._last_step
        if not self._steps:
            self._began = time.perf_counter() - record.step_seconds
        self._steps[1:] = [record]
        self._seconds.append(record.step_seconds)
        # The pace so far, with the evaluations and checkpoints between the steps.
        pace = (time.perf_counter() - self._began) / len(self._seconds)
        self._line = (
            f"step {step:>{self._width}}/{last}  loss {record.loss:.4f}{_measures(record)}"
            f"  {self._speed(self._seconds[self._printed :])}  {record.memory_gb:.2f} GB"
            f"  {duration(pace * (last - step))} left"
        )
        is_silent = time.monotonic() - self._printed_at > 60  # looks as if the run hung
        if step % self._every == 0 or step == last or record is self._steps[0] or is_silent:
            self.print_step()

    def print_step(self) -> None:
        """Print the latest step, if it is new, with the mean speed since the last such line."""
        if self._line:
            self._print(self._line)
            self._line, self._printed_at = "", time.monotonic()
            self._printed = len(self._seconds)

    def _speed(self, seconds: list[float]) -> str:
        """The mean of steps that took so long: all have the same tokens."""
        latest = self._steps[-1]
        ratio = latest.step_seconds / fmean(seconds)
        speed, mfu = latest.tokens_per_second * ratio, latest.mfu and latest.mfu * ratio
        return f"{human(speed)} tok/s  MFU {'n/a' if mfu is None else f'{mfu:.1%}'}"

    def evaluation(self, record: EvalRecord) -> None:
        self._evaluations[1:] = [record]
        self._print(f"step {record.step:>{self._width}}  validation {_validation(record)}")

    def warn(self, text: str) -> None:
        self.print_step()  # below the line of the step that it is about
        self._print(f"warning: {text.strip()}")

    def summary(
        self,
        save_dir: str,
        checkpoint: Path | None,
        dataset: str,
        is_exported: bool = True,
    ) -> None:
        """Print the results of the run, and how to use its model."""
        rows, seconds, folder = {}, self._seconds, Path(save_dir, "hf")
        if self._steps:
            first, latest = self._steps[0], self._steps[-1]
            tokens = len(seconds) * latest.tokens_per_second * latest.step_seconds
            done = f"{counted(len(seconds), 'step')}, {human(tokens)} tokens"
            rows["trained"] = f"{done} in {duration(time.perf_counter() - self._began)}"
            later = seconds[1:]  # in the first one torch compiles
            rows["speed"] = self._speed(later or seconds) + ", without the first step" * bool(later)
            rows["loss"] = f"{first.loss:.4f} -> {latest.loss:.4f}"
        if self._evaluations:
            rows["validation"] = _validation(*self._evaluations)
        if checkpoint:
            rows["checkpoint"] = str(checkpoint)
        if is_exported:
            rows["model"] = str(folder)
        if self._steps:
            rows["report"] = f"python -m picotron_min.report {shlex.quote(save_dir)}"
        self.header("Done", rows)
        if is_exported:
            prompt = "def " if dataset == "stdlib" else "The "  # a beginning that fits the text
            self._print(USAGE.format(folder=folder, prompt=prompt))


SHOWN = ("mtp_1_loss", "load_imbalance", "dropped")  # measures of a step's line


def _measures(record: StepRecord) -> str:
    known = {name: record.measures.get(name) for name in SHOWN}
    return "".join(f"  {name} {value:.4g}" for name, value in known.items() if value)


def _validation(*records: EvalRecord) -> str:
    bits = records[-1].bits_per_byte
    losses = " -> ".join(f"{record.val_loss:.4f}" for record in records)
    return f"loss {losses}" + (f" ({bits:.3f} bits per byte)" if bits else "")


USAGE = """\
Use the model:
  from transformers import pipeline
  write = pipeline("text-generation", model="{folder}")
  text = write({prompt!r}, max_new_tokens=100, do_sample=True)
  print(text[0]["generated_text"])"""
