"""The console as users and logs see it."""

import io
import itertools
import math
import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console as RichConsole

from picotron_min.runtime.console import Console
from picotron_min.runtime.metrics import EvalRecord
from picotron_min.runtime.wording import counted, duration, human
from tests.runtime.test_metrics import RECORD


def run_console(
    steps: range, last_step: int, *, stop_at: int | None = None, prints: bool = True, **rich
) -> str:
    out = io.StringIO()
    output = RichConsole(file=out, width=80, quiet=not prints, **rich)
    console = Console(steps[0], last_step, output)
    console.header("picotron-min", {"parameters": "1.24B", "save to": "/a/" + "long/" * 30})
    with console:
        for step in steps:
            console.step(replace(RECORD, step=step, loss=10.0 - step / 1000))
            if step == stop_at:
                break
        console.evaluation(EvalRecord(step, 2.345, 3.21))
        console.warn("step 3 skipped: its gradient is not finite [inf]")
    checkpoint = Path("checkpoints/tiny/step-00000010")
    console.summary("checkpoints/tiny", checkpoint, "stdlib")
    return out.getvalue()


def printed_steps(text: str) -> list[int]:
    return [int(step) for step in re.findall(r"step +(\d+)/", text)]


@pytest.mark.parametrize(("first", "last"), [(1, 1), (1, 20), (1, 21), (501, 1000), (3, 99)])
def test_about_twenty_steps_are_printed_with_the_first_and_the_last(first, last):
    text = run_console(range(first, last + 1), last)
    assert text.index(f"step {last}/{last}") < text.index("validation loss")
    steps = printed_steps(text)
    assert steps[0] == first and steps[-1] == last
    assert len(steps) == len(set(steps)) and min(10, last - first + 1) <= len(steps) <= 22


def test_a_slow_run_prints_a_step_every_minute(monkeypatch):
    seconds = itertools.count(1, 20.0)
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


def test_a_terminal_gets_a_live_bar_as_well():
    environ = {"TERM": "xterm"}
    text = run_console(range(1, 30), 29, force_terminal=True, _environ=environ)
    hides_cursor, shows_cursor = "\x1b[?25l", "\x1b[?25h"
    assert text.count(hides_cursor) == text.count(shows_cursor) == 1
    assert {1, 28, 29} <= set(printed_steps(text))


PRINTS = """
from pathlib import Path
from rich.console import Console as RichConsole
from picotron_min.runtime.console import Console
from picotron_min.runtime.launch import begin_process
begin_process()
console = Console(1, 9, RichConsole())
for i in range(9):
    console.warn("größe")
    print("größe", flush=True)
Path("trained").touch()
"""


def gone() -> int:
    reader, writer = os.pipe()
    os.close(reader)
    return writer


def hung_up() -> int:
    terminal, end = os.openpty()
    os.close(terminal)
    return end


OUTPUTS = {"a reader that has gone": gone, "a terminal that has gone": hung_up}
OUTPUTS["a full disk"] = lambda: os.open("/dev/full", os.O_WRONLY)
OUTPUTS["no letters"] = lambda: os.open(os.devnull, os.O_WRONLY)


@pytest.mark.parametrize("where", OUTPUTS)
def test_output_that_cannot_be_written_ends_no_run(where, tmp_path):
    env = os.environ | {"PYTHONPATH": os.getcwd(), "PYTHONIOENCODING": "ascii"}
    end = OUTPUTS[where]()
    run = subprocess.run([sys.executable, "-c", PRINTS], stdout=end, cwd=tmp_path, env=env)
    os.close(end)
    assert run.returncode == 0 and (tmp_path / "trained").exists()


@pytest.mark.parametrize("terminal", [True, False])
def test_other_ranks_print_nothing(terminal):
    rich = {"force_terminal": terminal, "_environ": {"TERM": "xterm"}}
    assert run_console(range(1, 5), 4, prints=False, **rich) == ""


def test_the_console_shows_the_run_and_how_to_use_the_model():
    text = run_console(range(1, 1001), 1000)
    assert "warning: step 3 skipped: its gradient is not finite [inf]" in text
    assert "step 1000/1000  loss 9.0000  1.23M tok/s  MFU 34.5%  80.12 GB  0s left" in text
    assert "trained     1,000 steps, 123M tokens in 0s\n" in text
    assert "speed       1.23M tok/s  MFU 34.5%, without the first step\n" in text
    assert "loss        9.9990 -> 9.0000\n" in text
    assert "validation  loss 2.3450 (3.210 bits per byte)\n" in text
    assert "checkpoint  checkpoints/tiny/step-00000010\n" in text
    assert "report      python -m picotron_min.report checkpoints/tiny\n" in text
    assert "in all" not in text
    code = text[text.index("Use the model:") :].splitlines()[1:]
    assert len(code) == 4 and "checkpoints/tiny/hf" in code[1] and "write('def ', " in code[2]
    compile("\n".join(line.strip() for line in code), "usage", "exec")


def started(first: int, last: int) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(first, last, RichConsole(file=out, width=80)), out


def test_the_summary_of_a_resumed_run_separates_it_from_the_whole():
    console, out = started(501, 504)
    for step in range(501, 505):
        console.step(replace(RECORD, step=step, tokens=2000 * step, tokens_per_second=20_000.0))
    for step, loss in ((502, 3.5), (503, 3.25), (504, 3.0)):
        console.evaluation(EvalRecord(step, loss))
    console.summary("a folder", None, "some text")
    summary = out.getvalue()[out.getvalue().index("Done") :]
    assert "trained     4 steps, 8.00k tokens in 0s\n" in summary
    assert "in all      504 steps, 1.01M tokens\n" in summary
    assert "validation  loss 3.5000 -> 3.0000\n" in summary
    assert "write('The ', " in summary  # of a text that is no Python


@pytest.mark.parametrize("last,is_far", [(2.9, False), (3.1, True), (math.nan, True)])
def test_a_last_loss_far_above_the_lowest_is_named(last, is_far):
    console, out = started(1, 3)
    for step, loss in enumerate((4.0, 2.0, last), 1):
        console.step(replace(RECORD, step=step, loss=loss))
    console.summary("a folder", None, "some text")
    warning = ", far above the lowest, 2.0000 in step 2"
    assert f"loss     4.0000 -> {last:.4f}{warning * is_far}\n" in out.getvalue()


def test_speeds_are_means_of_the_steps_since_the_last_line():
    console, out = started(1, 60)  # prints every third step
    speeds = {1: (0.5, 200.0), 2: (1.0, 100.0), 3: (3.0, 900.0)}  # seconds and tokens per second
    for step, (seconds, speed) in speeds.items():
        values = {"step_seconds": seconds, "tokens_per_second": speed, "mfu": speed / 1000}
        console.step(replace(RECORD, step=step, **values))
    first, third = (line for line in out.getvalue().splitlines() if "tok/s" in line)
    assert "200 tok/s  MFU 20.0%" in first and "700 tok/s  MFU 70.0%" in third
    console.summary("a folder", None, "some text")
    assert re.search(r"speed +700 tok/s  MFU 70.0%, without the first step", out.getvalue())


def test_a_warning_stands_below_the_line_of_its_step():
    console, out = started(1, 100)
    for step in (1, 2):
        console.step(replace(RECORD, step=step))
    console.warn("stopped by SIGTERM after step 2")
    with console:
        pass
    lines = out.getvalue().splitlines()
    assert [line[:12] for line in lines] == ["step   1/100", "step   2/100", "warning: sto"]


def test_nouns_have_their_plural():
    texts = [counted(n, noun) for n, noun in ((1, "step"), (0, "step"), (12_345, "micro-batch"))]
    assert texts == ["1 step", "0 steps", "12,345 micro-batches"]


def test_an_unknown_mfu_is_not_guessed():
    console, out = started(1, 1)
    console.step(replace(RECORD, mfu=None))
    assert "MFU n/a" in out.getvalue()


def test_time_left_is_the_pace_so_far_times_what_is_left(monkeypatch):
    clock = iter(range(0, 1000, 10))  # ten seconds between any two looks at it
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    console, out = started(1, 4)
    console.step(replace(RECORD, step=1, step_seconds=10.0))
    console.step(replace(RECORD, step=2))
    lefts = re.findall(r"(\S+) left", out.getvalue())
    assert lefts == ["1m00s", "30s"]  # 3 x (10 + 10), 2 x (10 + 20) / 2


def test_large_numbers_have_three_digits_and_a_unit():
    numbers = (0, 950, 999.6, 12_345, 99_960, 1_235_814_400, 405.9e9, 2e15)
    shown = ["0", "950", "1.00k", "12.3k", "100k", "1.24B", "406B", "2000T"]
    assert [human(number) for number in numbers] == shown


def test_durations_are_read_at_a_glance():
    durations = [duration(seconds) for seconds in (0, 59.6, 200, 18_420)]
    assert durations == ["0s", "1m00s", "3m20s", "5h07m"]
