"""The metrics file, and wandb's mode."""

import json
import math
import sys
from dataclasses import fields, replace
from unittest import mock

import pytest

from picotron_min.runtime.metrics import EvalRecord, MetricsLog, StepRecord

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


@pytest.mark.quick
def test_records_are_lines_in_full_precision_with_null_for_no_number(tmp_path):
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path)
    log.write(RECORD)
    log.write(replace(RECORD, step=2, loss=math.nan, grad_norm=math.inf))
    first, second = map(json.loads, path.open())  # before the log is closed
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


@pytest.mark.parametrize(
    ("mode", "has_key", "answers", "used"),
    [
        ("online", False, [mock.DEFAULT], ["offline"]),
        ("online", True, [mock.DEFAULT], ["online"]),
        ("offline", True, [mock.DEFAULT], ["offline"]),
        ("online", True, [KeyError("error 401"), mock.DEFAULT], ["online", "offline"]),
    ],
)
def test_wandb_gets_the_same_records_online_only_when_logged_in_and_not_refused(
    mode, has_key, answers, used, monkeypatch, capsys, tmp_path
):
    wandb = mock.Mock(Error=KeyError)
    wandb.setup().settings.mode, wandb.login.return_value = mode, has_key
    wandb.init.side_effect = answers
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    log = MetricsLog(tmp_path / "m.jsonl", wandb_options={"project": "p"})
    log.write(replace(RECORD, loss=math.nan))
    log.close()
    assert wandb.init.call_args_list == [mock.call(mode=mode, project="p") for mode in used]
    told = capsys.readouterr().out.count("error 401'): recorded as with WANDB_MODE=offline")
    assert told == len(used) - 1
    written = json.loads((tmp_path / "m.jsonl").read_text())
    known = {key: value for key, value in written.items() if value is not None}
    run = wandb.init.return_value
    run.log.assert_called_once_with(known, step=known.pop("step"))
    run.finish.assert_called_once_with()
