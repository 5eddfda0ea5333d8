"""The metrics file, and wandb's mode."""

import json
import math
import sys
from dataclasses import fields, replace
from pathlib import Path
from unittest import mock

import pytest

from picotron_min.runtime.metrics import EvalRecord, MetricsLog, StepRecord, append_line

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


@pytest.mark.quick
def test_records_are_lines_in_full_precision_with_null_for_no_number(tmp_path):
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path)
    log.write(RECORD)
    log.write(replace(RECORD, step=2, loss=math.nan, grad_norm=math.inf))
    first, second = read(path)  # before the log is closed
    assert list(first) == [field.name for field in fields(RECORD) if field.name != "measures"]
    assert first["loss"] == 5.6 / 3 and first["comm_bytes"] == {"dp": 1000, "tp": 0}
    assert (second["step"], second["loss"], second["grad_norm"]) == (2, None, None)


@pytest.mark.parametrize("before", ["", '{"step": 1}\n', '{"step": 1}\n{"step": 2, "lo'])
def test_a_line_that_a_kill_has_torn_does_not_swallow_the_next(before, tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text(before)
    MetricsLog(path).write(EvalRecord(3, 2.5))
    *lines, last = path.read_text().splitlines()
    assert lines == before.splitlines() and json.loads(last)["step"] == 3


def test_a_full_disk_is_reported_with_the_file():
    with pytest.raises(OSError, match="No space left on device: '/dev/full'"):
        append_line(Path("/dev/full"), {"step": 1})


def test_other_ranks_write_nothing_and_import_no_wandb(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)  # importing it would raise
    log = MetricsLog(None, wandb_options={"project": "p"})
    log.write(RECORD)
    log.close()


@pytest.mark.parametrize(
    ("mode", "has_key", "used"),
    [
        ("online", False, "offline"),
        ("online", True, "online"),
        ("offline", True, "offline"),
        ("disabled", False, "disabled"),
    ],
)
def test_wandb_gets_the_same_records_and_is_online_only_when_logged_in(
    mode, has_key, used, monkeypatch, tmp_path
):
    run, wandb = mock.Mock(), mock.Mock()
    wandb.setup().settings.mode, wandb.login.return_value = mode, has_key
    wandb.init.return_value = run
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    log = MetricsLog(tmp_path / "m.jsonl", wandb_options={"project": "p"})
    log.write(replace(RECORD, loss=math.nan))
    log.close()
    log.close()  # once more, when all that a run has opened is closed
    wandb.init.assert_called_once_with(mode=used, project="p")
    run.finish.assert_called_once_with()
    (written,) = read(tmp_path / "m.jsonl")
    known = {key: value for key, value in written.items() if value is not None}
    run.log.assert_called_once_with(known, step=known.pop("step"))


def test_a_server_of_wandb_that_refuses_leaves_the_run_offline(monkeypatch, capsys, tmp_path):
    wandb, run = mock.Mock(Error=KeyError), mock.Mock()
    wandb.setup().settings.mode = "online"
    wandb.init.side_effect = [KeyError("error 401"), run]
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    assert MetricsLog(tmp_path / "m.jsonl", wandb_options={"project": "p"}).wandb is run
    assert [call.kwargs["mode"] for call in wandb.init.call_args_list] == ["online", "offline"]
    assert "error 401'): recorded as with WANDB_MODE=offline" in capsys.readouterr().out
