"""The console as users and logs see it."""

import io
import itertools
import time
from dataclasses import replace
from pathlib import Path

import pytest

from picotron_min.runtime.console import Console
from picotron_min.runtime.metrics import EvalRecord
from picotron_min.runtime.wording import counted, duration, human
from tests.runtime.test_metrics import RECORD


def started(first: int, last: int) -> tuple[Console, io.StringIO]:
    """A console, and what it prints."""
    out = io.StringIO()
    return Console(first, last, lambda line: print(line, file=out)), out


def printed_steps(first: int, last: int, stop_at: int = 0) -> list[int]:
    """The steps whose lines are printed until a warning, which is below all of them."""
    console, out = started(first, last)
    for step in range(first, (stop_at or last) + 1):
        console.step(replace(RECORD, step=step))
    console.warn("its gradient is not finite [inf]")
    *lines, warning = out.getvalue().splitlines()
    assert warning == "warning: its gradient is not finite [inf]"
    return [int(line.split("/")[0].removeprefix("step")) for line in lines]


@pytest.mark.quick
@pytest.mark.parametrize(("first", "last"), [(1, 1), (1, 21), (501, 1000)])
def test_about_twenty_steps_are_printed_with_the_first_and_the_last(first, last):
    steps = printed_steps(first, last)
    assert steps[0] == first and steps[-1] == last
    assert len(steps) == len(set(steps)) and min(10, last - first + 1) <= len(steps) <= 22


def test_a_slow_run_prints_a_step_every_minute_and_the_last_one_above_a_warning(monkeypatch):
    monkeypatch.setattr(time, "monotonic", itertools.count(1, 20.0).__next__)
    steps = printed_steps(1, 1000, stop_at=18)
    assert steps[0] == 1 and steps[-1] == 18 and 4 < len(steps) < 18


def test_the_summary_is_of_the_steps_of_this_run_and_shows_how_to_use_the_model():
    console, out = started(501, 504)
    for step in range(501, 505):
        values = {"loss": 10.0 - step / 1000, "tokens_per_second": 20_000.0, "mfu": None}
        console.step(replace(RECORD, step=step, **values))
        console.evaluation(EvalRecord(step, step / 1000, 3.21))
    console.summary("checkpoints/a b", Path("checkpoints/a b/step-00000504"), "stdlib")
    text = out.getvalue()
    for line in (
        "step 504/504  loss 9.4960  20.0k tok/s  MFU n/a  80.12 GB  0s left",
        "  trained     4 steps, 8.00k tokens in 0s",
        "  speed       20.0k tok/s  MFU n/a, without the first step",
        "  loss        9.4990 -> 9.4960",
        "  validation  loss 0.5010 -> 0.5040 (3.210 bits per byte)",
        "  checkpoint  checkpoints/a b/step-00000504",
        "  report      python -m picotron_min.report 'checkpoints/a b'",
    ):
        assert f"\n{line}\n" in text
    code = text[text.index("Use the model:") :].splitlines()[1:]
    assert len(code) == 4 and "checkpoints/a b/hf" in code[1] and "write('def ', " in code[2]
    compile("\n".join(line.strip() for line in code), "usage", "exec")


def test_speeds_are_means_since_the_last_line_and_time_left_is_by_the_pace_so_far(monkeypatch):
    monkeypatch.setattr(time, "perf_counter", itertools.count(step=10).__next__)
    console, out = started(1, 60)  # prints every third step
    for step, seconds in enumerate((0.5, 1.0, 3.0), start=1):
        values = {"step_seconds": seconds, "tokens_per_second": 600 / seconds, "mfu": 0.6 / seconds}
        console.step(replace(RECORD, step=step, **values))
    console.summary("a folder", None, "some text")
    first, third, rest = (line for line in out.getvalue().splitlines() if " tok/s" in line)
    assert "1.20k tok/s  MFU 120.0%" in first and "300 tok/s  MFU 30.0%" in third
    assert "300 tok/s  MFU 30.0%, without the first step" in rest
    # 59 x (0.5 + 10), and 57 x (0.5 + 3 x 10) / 3: with what lies between the steps.
    assert first.endswith(" 10m20s left") and third.endswith(" 9m40s left")


@pytest.mark.quick
def test_numbers_are_read_at_a_glance():
    assert [counted(n, "batch") for n in (1, 12_345)] == ["1 batch", "12,345 batches"]
    shown = [human(n) for n in (0, 950, 999.6, 12_345, 99_960, 1_235_814_400, 2e15)]
    assert shown == ["0", "950", "1.00k", "12.3k", "100k", "1.24B", "2000T"]
    durations = [duration(seconds) for seconds in (0, 59.6, 200, 18_420)]
    assert durations == ["0s", "1m00s", "3m20s", "5h07m"]
