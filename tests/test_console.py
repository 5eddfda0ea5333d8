"""The console as users and logs see it."""

import io
import itertools
import re
import time
from dataclasses import replace

import pytest
from rich.console import Console as RichConsole

from picotron_min.runtime.console import Console, duration, human
from picotron_min.runtime.metrics import EvalRecord
from tests.test_metrics import RECORD


def run_console(
    steps: range, last_step: int, *, stop_at: int | None = None, prints: bool = True, **rich
) -> str:
    out = io.StringIO()
    console = Console(
        steps[0], last_step, prints=prints, rich=RichConsole(file=out, width=80, **rich)
    )
    console.header("picotron-min", {"parameters": "1.24B", "save to": "/a/" + "long/" * 30})
    with console:
        for step in steps:
            console.step(replace(RECORD, step=step, loss=10.0 - step / 1000))
            if step == stop_at:
                break
        console.evaluation(EvalRecord(step, 2.345, 3.21))
        console.warn("step 3 skipped: its gradient is not finite [inf]")
    console.summary("checkpoints/tiny/hf", checkpoint="checkpoints/tiny/step-00000010")
    return out.getvalue()


def printed_steps(text: str) -> list[int]:
    return [int(step) for step in re.findall(r"step +(\d+)/", text)]


@pytest.mark.parametrize(
    ("first", "last"), [(1, 1), (1, 7), (1, 20), (1, 21), (1, 1000), (501, 1000), (3, 99)]
)
def test_about_twenty_steps_are_printed_with_the_first_and_the_last(first, last):
    text = run_console(range(first, last + 1), last)
    assert text.index(f"step {last}/{last}") < text.index("validation loss")
    steps = printed_steps(text)
    assert steps[0] == first and steps[-1] == last
    assert len(steps) == len(set(steps)) and min(10, last - first + 1) <= len(steps) <= 22


def test_a_slow_run_prints_a_step_every_five_minutes(monkeypatch):
    seconds = itertools.count(1, 100.0)
    monkeypatch.setattr(time, "monotonic", lambda: next(seconds))
    text = run_console(range(1, 20), 1000, stop_at=18)
    printed = printed_steps(text)
    assert printed[0] == 1 and 4 < len(printed) < 18


def test_a_run_that_stops_early_prints_its_last_step_too():
    assert printed_steps(run_console(range(1, 101), 100, stop_at=42))[-1] == 42


def test_a_log_has_short_lines_and_no_control_characters():
    text = run_console(range(99_000, 100_001), 100_000)
    assert "\x1b" not in text and "\r" not in text and text.isascii()
    path = "/a/" + "long/" * 30  # stays whole, so that it can be copied
    assert path in text and all(len(line) <= 80 or path in line for line in text.splitlines())


def test_a_dumb_terminal_gets_the_same_lines_as_a_log():
    def dumb(**rich):
        environ = {"TERM": "dumb"}
        return run_console(range(1, 30), 29, _environ=environ, color_system=None, **rich)

    assert dumb(force_terminal=True) == dumb(force_terminal=False)


def test_a_terminal_gets_a_live_bar_as_well():
    environ = {"TERM": "xterm"}
    text = run_console(range(1, 30), 29, force_terminal=True, _environ=environ)
    hides_cursor, shows_cursor = "\x1b[?25l", "\x1b[?25h"
    assert text.count(hides_cursor) == text.count(shows_cursor) == 1
    assert {1, 28, 29} <= set(printed_steps(text))


def test_other_ranks_print_nothing():
    for terminal in (True, False):
        environ = {"TERM": "xterm"}
        assert (
            run_console(range(1, 5), 4, prints=False, force_terminal=terminal, _environ=environ)
            == ""
        )


def test_the_console_tells_what_happened():
    text = run_console(range(1, 1001), 1000)
    assert "warning: step 3 skipped: its gradient is not finite [inf]" in text
    assert "step 1000/1000  loss 9.0000  1.23M tok/s  MFU 34.5%  80.12 GB  0s left" in text
    assert "loss        9.9990 -> 9.0000" in text
    assert "validation  loss 2.3450 (3.210 bits per byte)" in text
    assert "checkpoint  checkpoints/tiny/step-00000010" in text
    code = text[text.index("Use the model:") :].splitlines()[1:]
    assert len(code) == 4 and "checkpoints/tiny/hf" in code[1]
    compile("\n".join(line.strip() for line in code), "usage", "exec")


def test_an_unknown_mfu_is_not_guessed():
    out = io.StringIO()
    console = Console(1, 1, prints=True, rich=RichConsole(file=out, width=80))
    console.step(replace(RECORD, mfu=None))
    assert "MFU n/a" in out.getvalue()


def test_time_left_is_the_pace_so_far_times_what_is_left(monkeypatch):
    clock = iter(range(0, 1000, 10))  # ten seconds between any two looks at it
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    out = io.StringIO()
    console = Console(1, 4, prints=True, rich=RichConsole(file=out, width=80))
    console.step(replace(RECORD, step=1, step_seconds=10.0))
    console.step(replace(RECORD, step=2))
    lefts = re.findall(r"(\S+) left", out.getvalue())
    assert lefts == ["1m00s", "30s"]  # 3 x (10 + 10), 2 x (10 + 20) / 2


def test_large_numbers_have_three_digits_and_a_unit():
    numbers = (0, 950, 999.6, 12_345, 99_960, 1_235_814_400, 405.9e9, 2e15)
    shown = ["0", "950", "1.00k", "12.3k", "100k", "1.24B", "406B", "2000T"]
    assert [human(number) for number in numbers] == shown


def test_durations_are_read_at_a_glance():
    assert [duration(s) for s in (0, 59.6, 200, 18_420)] == [
        "0s",
        "1m00s",
        "3m20s",
        "5h07m",
    ]
