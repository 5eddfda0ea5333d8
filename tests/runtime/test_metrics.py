"""The metrics file, and wandb's mode."""

import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from picotron_min.runtime.metrics import EvalRecord, MetricsLog, StepRecord, check_writable

RECORD = StepRecord(
    step=1,
    loss=5.6 / 3,
    grad_norm=1.25,
    learning_rate=3e-4,
    tokens=4096,
    tokens_per_second=1_234_567.8,
    tokens_per_second_per_device=617_283.9,
    mfu=0.345,
    mfu_common=0.4,
    hfu=None,
    step_seconds=0.1,
    memory_gb=80.125,
    comm_bytes={"dp": 1000, "tp": 0},
    measures={},
)


def read(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_records_are_json_lines_in_full_precision_and_appended(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for step in (1, 2):
        log = MetricsLog(path)
        log.write(replace(RECORD, step=step))
        log.close()
    first, second = read(path)
    fields = "step loss grad_norm learning_rate tokens tokens_per_second"
    fields += " tokens_per_second_per_device mfu mfu_common hfu step_seconds memory_gb comm_bytes"
    assert " ".join(first) == fields
    assert first["loss"] == 5.6 / 3 and first["comm_bytes"] == {"dp": 1000, "tp": 0}
    assert (first["step"], second["step"]) == (1, 2)


def test_a_record_is_in_the_file_before_the_log_is_closed(tmp_path):
    log = MetricsLog(tmp_path / "m.jsonl")
    log.write(EvalRecord(step=7, val_loss=2.5))
    assert read(tmp_path / "m.jsonl") == [{"step": 7, "val_loss": 2.5, "bits_per_byte": None}]
    log.close()


def test_a_line_that_a_kill_has_torn_does_not_swallow_the_next(tmp_path):
    path = tmp_path / "m.jsonl"
    for before in ("", '{"step": 1}\n', '{"step": 1}\n{"step": 2, "lo'):
        path.write_text(before)
        log = MetricsLog(path)
        log.write(EvalRecord(3, 2.5))
        log.close()
        *lines, last = path.read_text().splitlines()
        assert lines == before.splitlines() and json.loads(last)["step"] == 3


def test_a_full_disk_is_reported_with_the_file(tmp_path):
    with pytest.raises(OSError, match="No space left on device: '/dev/full'"):
        MetricsLog(Path("/dev/full")).write(RECORD)


def test_a_file_is_written_by_nothing_but_a_record(tmp_path):
    new, old, folder = (tmp_path / name for name in ("new/m.jsonl", "old.jsonl", "folder"))
    old.write_text("a line\n")
    check_writable(metrics_file=str(new), trace_file=str(old))
    check_writable(metrics_file=str(old), trace_file=None)
    assert new.parent.is_dir() and not new.exists() and old.read_text() == "a line\n"
    folder.mkdir()
    for path in (folder, old / "below a file", tmp_path / (256 * "x")):
        with pytest.raises(ValueError, match=r"^logging.trace_file=.* cannot be written \([A-Z]"):
            check_writable(metrics_file=str(old), trace_file=str(path))


def test_numbers_that_json_lacks_become_null(tmp_path):
    log = MetricsLog(tmp_path / "m.jsonl")
    log.write(replace(RECORD, loss=math.nan, grad_norm=math.inf))
    log.close()
    (record,) = read(tmp_path / "m.jsonl")
    assert record["loss"] is None and record["grad_norm"] is None


def test_other_ranks_write_nothing_and_import_no_wandb(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)  # importing it would raise
    log = MetricsLog(None, wandb_options={"project": "p"})
    log.write(RECORD)
    log.close()
    assert list(tmp_path.iterdir()) == []


def fake_wandb(mode, login, init):
    settings = SimpleNamespace(settings=SimpleNamespace(mode=mode))
    return SimpleNamespace(
        setup=lambda: settings, login=login, init=init, Error=KeyError, teardown=lambda: None
    )


@pytest.mark.parametrize(
    ("mode", "key", "used"),
    [
        ("online", None, "offline"),
        ("online", "a-key", "online"),
        ("offline", "a-key", "offline"),
        ("disabled", None, "disabled"),
    ],
)
def test_wandb_is_online_only_when_logged_in_and_gets_the_same_records(
    mode, key, used, monkeypatch, tmp_path
):
    calls = []

    def login(prompt=True, verify=True):
        assert not prompt and not verify
        return key is not None

    run = SimpleNamespace(
        log=lambda values, step: calls.append((step, values)), finish=lambda: calls.append("end")
    )
    fake = fake_wandb(mode, login, lambda **options: calls.append(options) or run)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    log = MetricsLog(tmp_path / "m.jsonl", wandb_options={"project": "p"})
    log.write(replace(RECORD, loss=math.nan))
    log.close()
    log.close()  # once more, when all that a run has opened is closed
    options, (step, values), end = calls
    assert options == {"mode": used, "project": "p"} and end == "end"
    (written,) = read(tmp_path / "m.jsonl")
    assert {"step": step} | values == {k: v for k, v in written.items() if v is not None}


def test_a_server_of_wandb_that_refuses_leaves_the_run_offline(monkeypatch, capsys, tmp_path):
    modes = []

    def init(mode, project):
        modes.append(mode)
        if mode == "online":
            raise KeyError("error 401: permission denied")

    fake = fake_wandb("online", lambda **_: True, init)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    MetricsLog(tmp_path / "m.jsonl", wandb_options={"project": "p"})
    assert modes == ["online", "offline"]
    assert "('error 401: permission denied'): recorded as with WANDB_MODE=offline" in (
        capsys.readouterr().out
    )
