"""create_config.py as it is run: what it writes, prints and refuses to do."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from create_config import main
from picotron_min.runtime.config_file import MOST_PROCESSES, load_config

PATH = Path("runs/exp/config.json")
# A flag, its key, and the value that the config has then.
FLAGS = """
--dp 4 | distributed.dp_size | 4
--model_name HuggingFaceTB/SmolLM-360M-Instruct | model.name | "HuggingFaceTB/SmolLM-360M-Instruct"
--grad_acc_steps 2 | training.gradient_accumulation_steps | 2
--mbs 3 | training.micro_batch_size | 3
--seq_len 128 | training.seq_length | 128
--use_cpu | distributed.use_cpu | true
--no-use_fused_adam | model.use_fused_adam | false
--learning_rate 1e-4 | training.learning_rate | 1e-4
--betas [0.8,0.9] | training.betas | [0.8, 0.9]
--run_name 12 | logging.run_name | "12"
--max_tokens null | training.max_tokens | null
""".strip().splitlines()


def test_flags_end_up_under_their_keys_and_nothing_else_is_written(create):
    rows = [row.split(" | ") for row in FLAGS]
    assert create(" ".join(flag for flag, *_ in rows))[::2] == (0, "")
    written = json.loads(PATH.read_text())
    found = {f"{section}.{key}": v for section, keys in written.items() for key, v in keys.items()}
    for _, where, value in rows:
        assert found.pop(where) == json.loads(value), where
    environment = {"environment.OMP_NUM_THREADS", "environment.TOKENIZERS_PARALLELISM"}
    assert found.keys() == environment | {"checkpoint.save_dir"}
    assert load_config(PATH).checkpoint.save_dir == "runs/exp/checkpoints"


def test_a_file_is_kept_unless_forced(create):
    assert create("--dp 2")[0] == create("--dp 2")[0] == 0
    code, out, err = create("--dp 4")
    assert (code, out) == (2, "") and "choose another --exp_name, or add --force" in err
    assert load_config(PATH).distributed.dp_size == 2
    assert create("--dp 4 --force")[0] == 0
    assert load_config(PATH).distributed.dp_size == 4


@pytest.mark.quick
@pytest.mark.parametrize("name", ["exp", "b/../../x", "..", ".", "/tmp/x"])
def test_mistakes_and_names_outside_of_the_folder_are_refused_and_nothing_is_written(
    create, tmp_path, name
):
    code, out, err = create("--dp two --warmup_steps 1.5", name)
    assert (code, out, err.count("error: ")) == (2, "", 2 if name == "exp" else 1)
    assert not any(tmp_path.iterdir())


def test_a_file_is_checked_for_any_number_of_processes(create, capsys):
    create(f"--dp {4 * MOST_PROCESSES}")
    assert main(["--check", str(PATH)]) == 0
    with pytest.raises(SystemExit, match="2"):  # nothing is skipped
        main(["--check", str(PATH), "--dp", "2"])
    assert f"processes        {4 * MOST_PROCESSES} = " in capsys.readouterr().out
    PATH.unlink()
    assert main(["--check", str(PATH)]) == 2
    assert f"cannot read {PATH}" in capsys.readouterr().err


# What starts the run.
STARTS = """
--dp 8 | python train.py --config runs/exp/config.json
--dp 16 --use_cpu | python train.py --config runs/exp/config.json
--dp 6 --pp 4 | torchrun --nnodes 3 --node-rank NODE --master-addr ADDRESS --nproc_per_node 8
""".strip().splitlines()


@pytest.mark.parametrize("row", STARTS)
def test_one_machine_is_started_with_python_and_several_nodes_with_torchrun(create, row):
    flags, line = row.split(" | ")
    assert create(flags)[1].splitlines()[-1].startswith(line)


def test_a_hub_id_is_written_without_the_network(create, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)  # importing it would raise
    assert "download someone/a-llama" in create("--model_name someone/a-llama")[1]


def test_it_runs_as_a_script_without_torch(tmp_path):
    script = Path(__file__).parents[2] / "create_config.py"
    code = "import runpy, sys; sys.argv = sys.argv[1:];"
    code += "sys.modules |= dict.fromkeys(['torch', 'numpy', 'transformers', 'datasets']);"
    code += "runpy.run_path(sys.argv[0], run_name='__main__')"
    flags = ["--out_dir", tmp_path, "--exp_name", "a b", "--dp", "2"]
    command = [sys.executable, "-c", code, script, *flags]
    done = subprocess.run(command, cwd=script.parent, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith(f"--config '{tmp_path}/a b/config.json'\n")
