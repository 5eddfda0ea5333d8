"""create_config.py as it is run: what it writes, prints and refuses to do."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from create_config import main
from picotron_min.runtime import config as schema
from picotron_min.runtime.config_file import MOST_PROCESSES, load_config

PICOTRON = (
    "--tp 1 --cp 1 --dp 4 --pp 1 --pp_engine afab --model_name HuggingFaceTB/SmolLM-360M-Instruct"
    " --num_hidden_layers 5 --num_attention_heads 16 --num_key_value_heads 4 --grad_acc_steps 2"
    " --mbs 3 --seq_len 128 --subset_name sub --use_wandb --use_cpu --use_fused_adam"
)


PATH = Path("runs/exp/config.json")


def test_picotrons_flags_end_up_under_their_keys(create):
    code, _, err = create(PICOTRON)
    assert (code, err) == (0, "")
    config = load_config(PATH)
    d, m, t = config.distributed, config.model, config.training
    assert (d.tp_size, d.cp_size, d.dp_size, d.pp_size, d.pp_engine) == (1, 1, 4, 1, "afab")
    assert m.name == "HuggingFaceTB/SmolLM-360M-Instruct" and m.use_fused_adam and d.use_cpu
    assert (m.num_hidden_layers, m.num_attention_heads, m.num_key_value_heads) == (5, 16, 4)
    assert (t.gradient_accumulation_steps, t.micro_batch_size, t.seq_length) == (2, 3, 128)
    assert config.dataset.subset_name == "sub" and config.logging.use_wandb
    assert config.logging.run_name == "exp"
    assert config.checkpoint.save_dir == "runs/exp/checkpoints"


def test_only_flags_that_were_given_are_written(create):
    create("--dp 2")
    written = json.loads(PATH.read_text())
    assert set(written) == {"distributed", "checkpoint", "logging", "environment"}
    assert written["distributed"] == {"dp_size": 2}


def test_every_key_of_the_schema_has_a_flag(create, capsys):
    with pytest.raises(SystemExit) as stopped:
        create("--help")
    shown = capsys.readouterr().out
    keys = [f"{s}.{key}" for s in schema.SECTIONS for key in schema.SECTIONS[s]]
    assert stopped.value.code == 0
    shown = " ".join(shown.split())
    said = {key: shown.partition(f"{key}, default ")[2].partition(" --")[0] for key in keys}
    assert [key for key, text in said.items() if ": " not in text] == [], "a comment in the source"
    assert 'dataset.name, default "stdlib": Python\'s own library, a local file' in shown
    assert "distributed.pp_size, default 1: pipeline parallel: each rank has some" in shown
    assert "--schedule constant|cosine|wsd training.schedule" in shown
    assert "--betas [X,...] training.betas" in shown


def test_values_get_the_type_that_the_schema_wants(create):
    flags = "--learning_rate 1e-4 --betas [0.8,0.9] --run_name 12 --max_tokens null"
    assert create(flags + " --no-use_fused_adam --dtype bfloat16")[0] == 0
    config = load_config(PATH)
    assert config.training.learning_rate == 1e-4 and config.training.betas == [0.8, 0.9]
    assert config.logging.run_name == "12" and config.training.max_tokens is None
    assert not config.model.use_fused_adam and config.model.dtype == "bfloat16"


def test_a_file_is_kept_unless_forced_and_nothing_is_deleted(create):
    create("--dp 2")
    code, out, _ = create("--dp 2")
    assert code == 0 and out.startswith("runs/exp/config.json is already there with the same")
    beside = PATH.with_name("metrics.jsonl")
    beside.write_text("precious")
    before = PATH.read_text()
    code, out, err = create("--dp 4")
    assert (code, out) == (2, "") and "differs: choose another --exp_name, or add --force" in err
    assert PATH.read_text() == before
    assert create("--dp 4 --force")[0] == 0
    assert load_config(PATH).distributed.dp_size == 4 and beside.read_text() == "precious"


def test_all_mistakes_are_reported_at_once_and_nothing_is_written(create):
    code, out, err = create("--dp two --seq_lem 3 --pp_engine gpipe --warmup_steps 500")
    assert (code, out) == (2, "") and not PATH.exists()
    problems = err.splitlines()
    assert len(problems) == 2 and all(problem.startswith("error: ") for problem in problems)
    assert 'distributed.dp_size="two": must be a valid integer' in err
    assert 'distributed.pp_engine="gpipe"' in err
    code, out, err = create("--seq_lem 3 --warmup_steps 500")  # keys that are well formed
    assert (code, out) == (2, "") and not PATH.exists()
    assert "--seq_lem is not known: did you mean --seq_len?" in err
    assert "warmup_steps=500: must be below total_train_steps=200" in err


def test_a_folder_that_cannot_be_made_is_reported(create):
    Path("runs").write_text("a file")
    code, _, err = create("--save_dir elsewhere")
    assert code == 2 and err == "error: cannot write runs/exp: Not a directory\n"


@pytest.mark.parametrize("name", ["../x", "/tmp/x", "a/../../x"])
def test_an_experiment_is_inside_its_folder(create, name):
    code, out, err = create(exp_name=name)
    assert (code, out) == (2, "") and "is outside --out_dir: name a folder in it" in err
    assert not Path("x").exists() and create(exp_name="a/b")[0] == 0


def test_a_file_is_checked_for_any_number_of_processes(create, capsys):
    create(f"--dp {4 * MOST_PROCESSES}")
    assert main(["--check", str(PATH)]) == 0
    with pytest.raises(SystemExit, match="2"):  # nothing is skipped
        main(["--check", str(PATH), "--dp", "2"])
    assert f"processes        {4 * MOST_PROCESSES} = " in capsys.readouterr().out
    PATH.write_text('{"training": {"sed": 1}, "model": {"nam": "nowhere"}}')
    assert main(["--check", str(PATH)]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 2
    PATH.unlink()
    assert main(["--check", str(PATH)]) == 2
    assert capsys.readouterr().err.startswith(f"error: cannot read {PATH}: No such file")


def test_an_unknown_flag_suggests_the_nearest(create):
    for flag, remedy in {
        "--SCHEDULE=wsd": "did you mean --schedule?",
        "--frobnicate": "see --help",
        "--learning=1": "did you mean --learning_rate?",  # an abbreviation is not guessed
        "--cpu": "did you mean --use_cpu?",  # not --cp
        "--num_layers": "did you mean --num_hidden_layers?",  # not --pp_layers
        "--xp": "see --help",  # as near to --pp, --dp, --cp, --tp and --ep
    }.items():
        code, _, err = create(flag)
        assert (code, err) == (2, f"error: {flag.split('=')[0]} is not known: {remedy}\n")


def test_one_machine_is_started_with_python_and_several_nodes_with_torchrun(create):
    def last_lines(flags: str) -> str:
        return create(flags + " --force")[1].split("\n\n", 2)[-1]

    one = "python train.py --config runs/exp/config.json\n"
    assert last_lines("--dp 8") == last_lines("--dp 16 --use_cpu") == one
    too_many = MOST_PROCESSES + 1
    assert "--nproc_per_node" in last_lines(f"--dp {too_many} --use_cpu")
    assert last_lines("--dp 6 --pp 4") == (
        "on each of 3 nodes with 8 processes, NODE from 0 to 2 and ADDRESS of node 0:\n\n"
        "torchrun --nnodes 3 --node-rank NODE --master-addr ADDRESS --master-port 29500"
        " --nproc_per_node 8 train.py --config runs/exp/config.json\n"
    )


@pytest.mark.parametrize(
    "flags",
    [
        "--num_hidden_layers 1000000000",
        "--num_local_experts 1000000",
        "--num_local_experts 10000 --num_hidden_layers 1000",
        "--grad_acc_steps 1000000000",
        "--dp 1000000000000",
        "--model_name owner/llama --pp_chunks 1000000000000",
    ],
)
def test_absurd_numbers_are_refused_at_once(create, flags):
    began = time.monotonic()
    code, out, err = create(flags)
    assert (code, out) == (2, "") and len(err.splitlines()) == 1
    assert time.monotonic() - began < 5


def test_a_hub_id_is_written_without_the_network(create, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)  # importing it would raise
    code, out, _ = create("--model_name someone/a-llama")
    assert code == 0 and load_config(PATH).model.name == "someone/a-llama"
    assert "not known without the network: download someone/a-llama" in out


def test_it_runs_as_a_script_without_torch(tmp_path):
    script = Path(__file__).parents[2] / "create_config.py"
    code = "import runpy, sys; sys.modules['torch'] = None; sys.argv = sys.argv[1:];"
    code += "runpy.run_path(sys.argv[0], run_name='__main__')"

    def run(*flags, stdout=subprocess.PIPE):
        command = [sys.executable, "-c", code, script, *flags]
        options = {"stdout": stdout, "stderr": subprocess.PIPE, "text": True}
        return subprocess.run(command, cwd=script.parent, **options)

    done = run("--out_dir", tmp_path, "--exp_name", "a b", "--dp", "2")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith(f"--config '{tmp_path}/a b/config.json'\n")
    assert (tmp_path / "a b" / "config.json").is_file()
    done = run()
    assert done.returncode == 2 and "give --out_dir, --exp_name" in done.stderr
    assert "Traceback" not in done.stderr
    read, write = os.pipe()
    os.close(read)  # as `| head` does, when it has seen enough
    with os.fdopen(write, "wb") as pipe:
        assert run("--check", tmp_path / "a b" / "config.json", stdout=pipe).stderr == ""
