"""The metrics file, the console as users and logs see it, wandb's mode, and the yardsticks."""

import io
import json
import math
import re
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console as RichConsole

from picotron_min import metrics
from picotron_min.metrics import Console, EvalRecord, MetricsLog, StepRecord

RECORD = StepRecord(
    step=1,
    loss=5.6 / 3,
    grad_norm=1.25,
    learning_rate=3e-4,
    tokens=4096,
    tokens_per_second=1_234_567.8,
    tokens_per_second_per_device=617_283.9,
    mfu=0.345,
    hfu=None,
    step_seconds=0.1,
    memory_gb=80.125,
    comm_bytes={"dp": 1000, "tp": 0},
)


def read(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_records_are_json_lines_in_full_precision_and_appended(tmp_path):
    path = tmp_path / "runs" / "metrics.jsonl"
    for step in (1, 2):
        log = MetricsLog(path, writes=True)
        log.write(replace(RECORD, step=step))
        log.close()
    first, second = read(path)
    fields = "step loss grad_norm learning_rate tokens tokens_per_second"
    fields += " tokens_per_second_per_device mfu hfu step_seconds memory_gb comm_bytes"
    assert " ".join(first) == fields
    assert first["loss"] == 5.6 / 3 and first["comm_bytes"] == {"dp": 1000, "tp": 0}
    assert (first["step"], second["step"]) == (1, 2)


def test_a_record_is_in_the_file_before_the_log_is_closed(tmp_path):
    log = MetricsLog(tmp_path / "m.jsonl", writes=True)
    log.write(EvalRecord(step=7, val_loss=2.5))
    assert read(tmp_path / "m.jsonl") == [{"step": 7, "val_loss": 2.5, "bits_per_byte": None}]
    log.close()


def test_numbers_that_json_lacks_become_null(tmp_path):
    log = MetricsLog(tmp_path / "m.jsonl", writes=True)
    log.write(replace(RECORD, loss=math.nan, grad_norm=math.inf))
    log.close()
    (record,) = read(tmp_path / "m.jsonl")
    assert record["loss"] is None and record["grad_norm"] is None


def test_other_ranks_write_nothing_and_import_no_wandb(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)  # importing it would raise
    log = MetricsLog(tmp_path / "m.jsonl", writes=False, wandb_options={"project": "p"})
    log.write(RECORD)
    log.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("mode", "key", "used"),
    [
        ("online", None, "offline"),
        ("online", "a-key", "online"),
        ("offline", "a-key", "offline"),
        ("disabled", None, "disabled"),
    ],
)
@pytest.mark.parametrize("has_prompt", [True, False], ids=["login-prompt", "older"])
def test_wandb_is_online_only_when_logged_in_and_gets_the_same_records(
    mode, key, used, has_prompt, monkeypatch, tmp_path
):
    calls = []

    def login(prompt=True, verify=True):
        assert not prompt and not verify
        return key is not None

    run = SimpleNamespace(
        log=lambda values, step: calls.append((step, values)), finish=lambda: calls.append("end")
    )
    fake = SimpleNamespace(
        setup=lambda: SimpleNamespace(settings=SimpleNamespace(mode=mode)),
        login=login if has_prompt else lambda: pytest.fail("this login would ask"),
        api=SimpleNamespace(api_key=key),
        init=lambda **options: calls.append(options) or run,
    )
    monkeypatch.setitem(sys.modules, "wandb", fake)
    log = MetricsLog(tmp_path / "m.jsonl", writes=True, wandb_options={"project": "p"})
    log.write(replace(RECORD, loss=math.nan))
    log.close()
    options, (step, values), end = calls
    assert options == {"mode": used, "project": "p"} and end == "end"
    (written,) = read(tmp_path / "m.jsonl")
    assert {"step": step} | values == {k: v for k, v in written.items() if v is not None}


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
    monkeypatch.setattr(metrics.time, "perf_counter", lambda: next(clock))
    out = io.StringIO()
    console = Console(1, 4, prints=True, rich=RichConsole(file=out, width=80))
    console.step(replace(RECORD, step=1, step_seconds=10.0))
    console.step(replace(RECORD, step=2))
    lefts = re.findall(r"(\S+) left", out.getvalue())
    assert lefts == ["1m00s", "30s"]  # 3 x (10 + 10), 2 x (10 + 20) / 2


def test_large_numbers_have_three_digits_and_a_unit():
    numbers = (0, 950, 999.6, 12_345, 99_960, 1_235_814_400, 405.9e9, 2e15)
    shown = ["0", "950", "1.00k", "12.3k", "100k", "1.24B", "406B", "2000T"]
    assert [metrics.human(number) for number in numbers] == shown


def test_durations_are_read_at_a_glance():
    assert [metrics.duration(s) for s in (0, 59.6, 200, 18_420)] == [
        "0s",
        "1m00s",
        "3m20s",
        "5h07m",
    ]


@pytest.mark.parametrize(
    ("name", "bfloat16", "float32"),
    [
        ("NVIDIA A100-SXM4-80GB", 312e12, 19.5e12),
        ("NVIDIA A100-PCIE-40GB", 312e12, 19.5e12),
        ("NVIDIA H100 80GB HBM3", 989.4e12, 66.9e12),
        ("NVIDIA H100 PCIe", 756e12, 51.2e12),
        ("NVIDIA H200", 989.4e12, 66.9e12),
        ("NVIDIA B200", 2250e12, 75e12),
        ("NVIDIA L4", 121e12, 30.3e12),
        ("NVIDIA L40S", 362e12, 91.6e12),
        ("NVIDIA GeForce RTX 4090", 165.2e12, 82.6e12),
        ("AMD Instinct MI300X", 1307.4e12, 163.4e12),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None, None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None, None),
        ("Tesla T4", None, None),
    ],
)
def test_peaks_are_of_exactly_that_device(name, bfloat16, float32):
    assert metrics.table_peak_flops(name, torch.bfloat16) == pytest.approx(bfloat16)
    assert metrics.table_peak_flops(name, torch.float32) == pytest.approx(float32)


def test_a_dtype_that_is_not_in_the_table_has_no_peak():
    assert metrics.table_peak_flops("NVIDIA L4", torch.float64) is None


def test_a_cpus_peak_is_measured_in_the_dtype():
    cpu = torch.device("cpu")
    single, double = (metrics.peak_flops(cpu, d) for d in (torch.float32, torch.float64))
    assert 1e9 < double < single < 1e15


def test_memory_is_this_process_in_gigabytes():
    assert 0.05 < metrics.memory_gb(torch.device("cpu")) < 50
