"""The planner's commands: what they write and read, and the remedies that they name."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from picotron_min.planner.__main__ import build_parser, main
from picotron_min.runtime.config_file import load_config


def plan(*arguments: object) -> int:
    """The exit code, argparse's too."""
    try:
        return main([word for text in map(str, arguments) for word in text.split()])
    except SystemExit as exit_:
        return exit_.code


SEARCH = "search --model tiny --gpus 4 --seq_length 32 --global_batch 8"
LLAMA = SEARCH.replace("tiny", "Llama-3.1-8B")
MISTAKES = """
search --gpus 8 | --model, --seq_length, --global_batch
{SEARCH} --gpu H1000 | (choose from
{SEARCH} --model owner/model | download it and name its folder
{SEARCH} --seq_length 4096 | is above max_position_embeddings=2048
{SEARCH} --gpu L4 --dtype float64 | no peak for float64
{SEARCH} --gpu A100-80GB --precision fp8 | use H100
{SEARCH} --write docs | name another file
{SEARCH} --metrics m.jsonl | unrecognized arguments: --metrics
{SEARCH} --network 0 | above 0
{SEARCH} --global_batch 4194304 | at most 1048576
{LLAMA} --gpu RTX-4090 --gpus 2 | 24 x 0.92 - 1 for libraries): use more GPUs
{LLAMA} --gpus 8 --seq_length 4096 --fix sharding=none,dp=8 | or less in --fix
{SEARCH} --gpus 7 --global_batch 3 | use another --gpus or --global_batch
{SEARCH} --fix tpp=2 | use tp
{SEARCH} --fix recompute=ful | must be 'none', 'full' or 'selective'
{SEARCH} --fix tp=0 | greater than or equal to 1
{SEARCH} --fix tp=1,tp=2 | once
config missing.json | missing.json
calibrate README.md docs | README.md
calibrate config.json docs | has use_cpu true
validate README.md | row 1 is not a run as in tests/published_runs.csv
""".strip().splitlines()


@pytest.mark.parametrize("row", MISTAKES)
def test_mistakes_are_reported_with_the_remedy(row, capsys):
    arguments, message = row.format(**globals()).split(" | ")
    assert plan(arguments) == 2
    assert message in capsys.readouterr().err


def test_a_written_config_has_what_was_asked_for_and_replaces_no_other(tmp_path, capsys):
    path = tmp_path / "config.json"
    path.write_text("{}")
    assert plan(SEARCH, "--write", path) == 2 and path.read_text() == "{}"
    assert "already there and differs" in capsys.readouterr().err
    asked = "--optimizer muon --precision fp8 --compile --fix tp=1 --write"
    assert plan(SEARCH, asked, tmp_path / "new.json") == 0
    assert "yours to add are dataset.name" in capsys.readouterr().err
    config = load_config(tmp_path / "new.json")
    assert config.model.compile and config.model.fp8 and config.model.dtype == "bfloat16"
    assert config.training.optimizer == "muon" and config.distributed.tp_size == 1


def test_a_table_shows_intervals_and_what_is_a_toss_up(capsys):
    assert (
        plan(LLAMA, "--seq_length 8192 --global_batch 64 --gpus 8 --gpu L40S --fix recompute=full")
        == 0
    )
    text = capsys.readouterr().out
    assert "twice as wide here: no run was on L40S" in text
    assert re.search(r"\n~ .*\n~ .* [\d,]+-[\d,]+ ", text) and "a toss-up (+" in text


def test_a_closed_pipe_ends_a_plan_in_silence():
    command = [sys.executable, "-m", "picotron_min.planner", "validate", "tests/published_runs.csv"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""


RECORD = {"comm_bytes": {"tp": 1000, "pp": 0, "dp_cp": 10, "world": 1}}
CONFIG = {"distributed": {"tp_size": 2, "dp_size": 2}, "model": {"dtype": "bfloat16"}}


@pytest.fixture
def measured(tmp_path, monkeypatch):
    """Five slow steps, then six; an evaluation and a part of a line."""
    monkeypatch.chdir(tmp_path)  # with config.json, metrics.jsonl and hardware.json
    Path("config.json").write_text(json.dumps(CONFIG))
    steps = [RECORD | {"step": i, "step_seconds": 9.0 if i < 6 else 0.004} for i in range(1, 12)]
    lines = [*map(json.dumps, steps), '{"step": 11, "val_loss": 2.0}', '{"step": 12, "ste']
    path = Path("metrics.jsonl")
    path.write_text("\n".join(lines))
    return path


CALIBRATE = "calibrate config.json metrics.jsonl"
DAMAGE = ["0", "-1.0", "NaN", '"0.25"', "[" * 10**5, "null"]


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda text: text[:8])
def test_damaged_steps_and_calibrations_are_not_used(measured, capsys, damage):
    text = measured.read_text().replace('"step_seconds": 0.004', f'"step_seconds": {damage}')
    measured.write_text(text)
    assert plan(CALIBRATE) == 2
    assert "has 5 steps, and the first 5 warm up" in capsys.readouterr().err
    Path("hardware.json").write_text(f'{{"H100": {{"float8_share": {damage}}}}}')
    assert plan("config config.json") == 2
    assert "delete it, calibrate again" in capsys.readouterr().err


def test_steps_before_a_resume_are_another_layouts(measured, capsys):
    starts = '{"start": {"after_step": 0}}\n{"start": {"after_step": 8}}\n'
    Path("run.jsonl").write_text(starts)
    assert plan(CALIBRATE) == 2
    assert "has 3 steps after step 8, where the run resumed" in capsys.readouterr().err


def test_metrics_of_another_layout_are_refused(measured, capsys):
    measured.write_text(measured.read_text().replace('"tp": 1000', '"tp": 0'))
    assert plan(CALIBRATE) == 2
    assert "the axes dp_cp world; the config's are dp_cp tp" in capsys.readouterr().err


def test_what_was_found_is_written_and_read(measured, capsys):
    Path("hardware.json").write_text('{"H100": {"float8_share": 0.5}, "L4": {"float8_share": 1.0}}')
    assert plan(CALIBRATE) == 0
    found = json.loads(Path("hardware.json").read_text())
    assert found["H100"].keys() == {"float8_share", "matmul_share"}
    assert found["L4"] == {"float8_share": 1.0}
    assert plan("config config.json") == 0
    shown = capsys.readouterr()
    assert "time 0.004 s" in shown.out
    assert "hardware.json is used: what calibrate found of H100" in shown.err
    assert plan("config config.json --gpu A100-80GB") == 0
    assert "is used" not in capsys.readouterr().err, "of another device"


def test_docs_name_commands_that_there_are():
    pages = [Path(page).read_text() for page in ("docs/planner.md", "docs/teaching.md")]
    lines = [line for page in pages for line in page.splitlines()]
    commands = [
        line.split()[3:] for line in lines if line.startswith("python -m picotron_min.planner")
    ]
    assert len(commands) == 3
    for arguments in commands:
        build_parser().parse_args(arguments)
