"""The console as users and logs see it."""

import io
import itertools
import re
import time
from dataclasses import replace
from pathlib import Path

import pytest

from picotron_min.runtime.console import Console
from picotron_min.runtime.metrics import EvalRecord
from picotron_min.runtime.wording import counted, duration, human
from tests.runtime.test_metrics import RECORD

LONG = "/a/" + "long/" * 30


def started(first: int, last: int) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(first, last, lambda line: print(line, file=out)), out


def run_console(first: int, last: int, stop_at: int = 0) -> str:
    console, out = started(first, last)
    console.header("picotron-min", {"parameters": "1.24B", "save to": LONG})
    for step in range(first, (stop_at or last) + 1):
        console.step(replace(RECORD, step=step, loss=10.0 - step / 1000))
    console.warn("its gradient is not finite [inf]")
    console.evaluation(EvalRecord(step, 2.345, 3.21))
    console.summary("checkpoints/tiny", Path("checkpoints/tiny/step-00000010"), "stdlib")
    return out.getvalue()


def printed_steps(text: str) -> list[int]:
    return [int(step) for step in re.findall(r"step +(\d+)/", text)]


@pytest.mark.quick
@pytest.mark.parametrize(("first", "last"), [(1, 1), (1, 21), (501, 1000)])
def test_about_twenty_steps_are_printed_with_the_first_and_the_last(first, last):
    steps = printed_steps(run_console(first, last))
    assert steps[0] == first and steps[-1] == last
    assert len(steps) == len(set(steps)) and min(10, last - first + 1) <= len(steps) <= 22


def test_a_slow_run_prints_a_step_every_minute_and_the_last_one_above_a_warning(monkeypatch):
    monkeypatch.setattr(time, "monotonic", itertools.count(1, 20.0).__next__)
    text = run_console(1, 1000, stop_at=18)
    assert printed_steps(text)[0] == 1 and 4 < len(printed_steps(text)) < 18
    assert text.index("step   18/1000") < text.index("warning: its gradient is not finite [inf]")


def test_a_log_has_short_lines_and_no_control_characters():
    text = run_console(99_000, 100_000)
    assert "\x1b" not in text and "\r" not in text and text.isascii() and "\n\n" not in text
    # A path stays whole, so that it can be copied.
    assert LONG in text and all(len(line) <= 80 or LONG in line for line in text.splitlines())


def test_the_console_shows_the_run_and_how_to_use_the_model():
    text = run_console(1, 1000)
    for line in (
        "step 1000/1000  loss 9.0000  1.23M tok/s  MFU 34.5%  80.12 GB  0s left",
        "  speed       1.23M tok/s  MFU 34.5%, without the first step",
        "  loss        9.9990 -> 9.0000",
        "  validation  loss 2.3450 (3.210 bits per byte)",
        "  checkpoint  checkpoints/tiny/step-00000010",
    ):
        assert f"{line}\n" in text
    code = text[text.index("Use the model:") :].splitlines()[1:]
    assert len(code) == 4 and "checkpoints/tiny/hf" in code[1] and "write('def ', " in code[2]
    compile("\n".join(line.strip() for line in code), "usage", "exec")


def test_the_summary_of_a_resumed_run_is_of_its_own_steps():
    console, out = started(501, 504)
    for step in range(501, 505):
        console.step(replace(RECORD, mfu=None, step=step, tokens_per_second=20_000.0))
        console.evaluation(EvalRecord(step, step / 1000))
    console.summary("a folder", None, "some text")
    summary = out.getvalue()[out.getvalue().index("Done") :]
    assert "trained     4 steps, 8.00k tokens in " in summary and "MFU n/a" in summary
    assert "validation  loss 0.5010 -> 0.5040\n" in summary and "write('The ', " in summary


def test_speeds_are_means_since_the_last_line_and_time_left_is_by_the_pace_so_far(monkeypatch):
    monkeypatch.setattr(time, "perf_counter", itertools.count(step=10).__next__)
    console, out = started(1, 60)  # prints every third step
    for step, seconds in enumerate((0.5, 1.0, 3.0), start=1):
        values = {"step_seconds": seconds, "tokens_per_second": 600 / seconds, "mfu": 0.6 / seconds}
        console.step(replace(RECORD, step=step, **values))
    console.summary("a folder", None, "some text")
    first, third, rest = re.findall(r".* tok/s.*", out.getvalue())
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
