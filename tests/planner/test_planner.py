"""The planner's commands: what they write and read, and the remedies that they name."""

import json
from pathlib import Path

import pytest

from picotron_min.planner.__main__ import build_parser, main
from picotron_min.planner.config_files import gpu_of
from picotron_min.runtime.config import Config
from picotron_min.runtime.config_checks import resolve_model
from picotron_min.runtime.config_file import load_config
from picotron_min.runtime.hardware import GPUS
from tests.assembled import make_training


def plan(*arguments: object) -> int:
    """The exit code, argparse's too."""
    try:
        return main([word for text in map(str, arguments) for word in text.split()])
    except SystemExit as exit_:
        return exit_.code


SEARCH = "search --model tiny --gpus 4 --seq_length 32 --global_batch 8"
CPU, LLAMA = f"{SEARCH} --gpu cpu --cores 2", SEARCH.replace("tiny", "Llama-3.1-8B")
MISTAKES = """
search --gpus 8 | --model, --seq_length, --global_batch
{SEARCH} --gpu H1000 | --gpu H1000 is not known
{SEARCH} --model owner/model | download it and name its folder
{SEARCH} --seq_length 4096 | is above max_position_embeddings=2048
{SEARCH} --gpu L4 --dtype float64 | no peak for float64
{SEARCH} --gpu A100-80GB --precision fp8 | use H100
{SEARCH} --gpu L4 --cores 2 | --cores: not used for L4
{CPU} --network 100 --gpus_per_node 2 | --gpus_per_node: not used for a CPU
{CPU} --write docs | name another file
{CPU} --hardware docs | docs is no file: write it with calibrate
{CPU} --metrics m.jsonl | unrecognized arguments: --metrics
{SEARCH} --network 0 | above 0
{SEARCH} --global_batch 4194304 | at most 1048576
{LLAMA} --gpu RTX-4090 --gpus 2 --global_batch 8 | 24 x 0.92 - 1 for libraries): use more GPUs
{LLAMA} --gpus 8 --seq_length 4096 --fix sharding=none,dp=8 | or leave out --fix
{SEARCH} --gpus 7 --global_batch 3 | use another --gpus or --global_batch
{SEARCH} --fix tpp=2 | use tp
{SEARCH} --fix recompute=ful | must be 'none', 'full' or 'selective'
{SEARCH} --fix tp=0 | greater than or equal to 1
{SEARCH} --fix tp=1,tp=2 | once
config config.json --gpu L4 | --gpu L4: not used for config.json, which
config missing.json | missing.json
calibrate config.json docs | name another file
calibrate config.json | give pairs
validate README.md | row 1 is not a run as in tests/published_runs.csv
""".strip().splitlines()


@pytest.mark.parametrize("row", MISTAKES)
def test_mistakes_are_reported_with_the_remedy(row, capsys):
    arguments, message = row.format(**globals()).split(" | ")
    assert plan(arguments) == 2
    assert message in capsys.readouterr().err


def trained(configs: list[Config]) -> list[list[float]]:
    runs = [make_training(config, resolve_model(config)) for config in configs]
    return [[run.step(step).loss for step in range(2)] for run in runs]


def test_the_best_layouts_are_written_and_train(pool, tmp_path, capsys):
    assert plan(CPU, "--json --top 6") == 0
    configs = []
    for numbers in json.loads(capsys.readouterr().out):
        choices, path = numbers["choices"], tmp_path / str(len(configs)) / "config.json"
        fixed = ",".join(f"{name}={json.dumps(v).strip(chr(34))}" for name, v in choices.items())
        assert plan(CPU, "--fix", fixed, "--write", path) == 0
        assert "yours to add are dataset.name" in capsys.readouterr().err
        config = load_config(path)
        layout = vars(config.layout) | vars(config.workload)
        assert {name: layout[name] for name in choices} == choices
        configs.append(config)
    losses = pool.run(4, trained, configs)[0]
    assert len(losses) == 6 and losses == [pytest.approx(losses[0], rel=1e-4)] * 6


def test_a_written_config_has_what_was_asked_for_and_replaces_no_other(tmp_path, capsys):
    path = tmp_path / "config.json"
    path.write_text("{}")
    assert plan(CPU, "--write", path) == 2 and path.read_text() == "{}"
    assert "already there and differs" in capsys.readouterr().err
    asked = "--optimizer muon --precision fp8 --compile --fix tp=1 --write"
    assert plan(SEARCH, asked, tmp_path / "new.json") == 0
    config = load_config(tmp_path / "new.json")
    assert config.model.compile and config.model.fp8 and config.model.dtype == "bfloat16"
    assert config.training.optimizer == "muon" and config.distributed.tp_size == 1


def test_a_table_shows_intervals_and_what_is_a_toss_up(capsys):
    def asked(*flags: str) -> str:
        assert plan(LLAMA, "--seq_length 8192 --global_batch 64 --gpus 8", *flags) == 0
        return capsys.readouterr().out

    first, *others = json.loads(asked("--json"))
    (low, high), speed = first["interval"], first["tokens_per_second_per_device"]
    assert 0.8 < low / speed < 1 and low * high == pytest.approx(speed**2)
    text = asked()
    near = [o["step_seconds"] / first["step_seconds"] < 1.1 for o in others]
    assert text.count("\n~ ") == sum(near) > 0, "all that are close"
    assert "a toss-up (+" in text and f"{low:,.0f}-{high:,.0f}" in text
    assert "twice as wide here: no run was on L40S" in asked("--gpu L40S --fix recompute=full")


RECORD = {"comm_bytes": {"tp": 1000, "pp": 0, "dp_cp": 10, "world": 1}}


@pytest.fixture
def measured(tmp_path):
    """Metrics of config.json: five slow steps, then six; an evaluation and a part of a line."""
    steps = [RECORD | {"step": i, "step_seconds": 9.0 if i < 6 else 0.25} for i in range(1, 12)]
    lines = [*map(json.dumps, steps), '{"step": 11, "val_loss": 2.0}', '{"step": 12, "ste']
    path = tmp_path / "metrics.jsonl"
    path.write_text("\n".join(lines))
    return path


DAMAGE = ["0", "-1.0", "NaN", "1e999", '"0.25"', "[" * 10**5, "null", "true"]


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda text: text[:8])
def test_damaged_steps_and_calibrations_are_not_used(measured, tmp_path, capsys, damage):
    text = measured.read_text().replace('"step_seconds": 0.25', f'"step_seconds": {damage}')
    measured.write_text(text)
    assert plan("calibrate config.json", measured) == 2
    assert "has 5 steps, and the first 5 warm up" in capsys.readouterr().err
    (tmp_path / "hardware.json").write_text(f'{{"cpu": {{"latency": {damage}}}}}')
    assert plan("config config.json --hardware", tmp_path / "hardware.json") == 2
    assert "delete it, calibrate again" in capsys.readouterr().err


def test_steps_before_a_resume_are_another_layouts(measured, capsys):
    log = measured.with_name("run.jsonl")
    log.write_text('{"start": {"after_step": 0}}\n{"start": {"after_step": 8}}\n')
    assert plan("calibrate config.json", measured) == 2
    assert "has 3 steps after step 8, where the run resumed" in capsys.readouterr().err


def test_metrics_of_another_layout_are_refused(measured, capsys):
    measured.write_text(measured.read_text().replace('"tp": 1000', '"tp": 0'))
    assert plan("calibrate config.json", measured) == 2
    assert "the axes dp_cp world; the config's are dp_cp tp" in capsys.readouterr().err


def test_what_was_found_is_written_and_read(measured, tmp_path, capsys):
    hardware = tmp_path / "hardware.json"
    at = ("--cores 2 --hardware", hardware)
    assert plan("calibrate config.json", measured, *at) == 0
    out = capsys.readouterr().out
    assert out.count("as it was") == 4 and "config.json: fitted, as many unknowns" in out
    assert plan("config config.json --json", *at) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["step_seconds"] == pytest.approx(0.25)
    assert f"{hardware} is used: what calibrate found of cpu" in shown.err
    flags = build_parser().parse_args([*SEARCH.split(), "--hardware", str(hardware)])
    assert gpu_of(flags, "H100", 8) == GPUS["H100"], "of another device"


def test_docs_name_commands_that_there_are():
    pages = [Path(page).read_text() for page in ("docs/planner.md", "docs/teaching.md")]
    lines = [line for page in pages for line in page.splitlines()]
    commands = [
        line.split()[3:] for line in lines if line.startswith("python -m picotron_min.planner")
    ]
    assert len(commands) == 3
    for arguments in commands:
        build_parser().parse_args(arguments)
