"""What create_config.py prints about a config."""

import re

import pytest

from picotron_min.planner import __main__ as planner

# Flags, and what is printed for them.
ROWS = """
--dp 2 --mbs 4 --grad_acc_steps 2 --seq_len 1024 | 16,384 = 2 dp x 4 sequences x 2 micro-batches x 1024
--dp 2 | processes        2 = pp 1 x dp 2 x cp 1 x tp 1
--dp 2 | bytes, the model's own
--model_name Llama-3.2-1B | parameters       1,235,814,400,
--model_name Llama-3.2-1B | 9.887 GB
--model_name Llama-3.2-1B | not counted: CUDA's context, NCCL's buffers
--model_name Llama-3.2-1B --dtype bfloat16 | H100 is assumed: name another with --gpu
--model_name Llama-3.2-1B --dtype bfloat16 | python -m picotron_min.dry_run --config runs/exp/config.json
--model_name Llama-3.2-1B --dtype bfloat16 | No GPU has run this code yet
--model_name SmolLM-1.7B --dtype bfloat16 --tp 2 --sequence_parallel --tp_overlap --offload 3 | without offload and tp_overlap
--dp 8 --dtype bfloat16 --document_mask | Planned for one document a row
--num_hidden_layers 2 --offload 1 --use_cpu | offload          saves nothing on a CPU
{EXPERTS} --dp 4 --ep 2 --etp 2 | 8 a layer, 2 of them a token; 4 of a layer on a rank (ep 2, etp 2)
{EXPERTS} --dp 4 --ep 2 --etp 2 | without moe_expert_capacity_factor their activations have no bound
{FITS_NOT} | GB of 72.6 GB (80 x 0.92 - 1 for libraries), on H100
{FITS_NOT} --optimizer muon --compile --fp8 | --optimizer muon --precision fp8 --compile
{FITS_NOT} --num_hidden_layers 31 | python -m picotron_min.planner search --help
{FITS_NOT} --sharding parameters | predicted step
--model_name Llama-3.2-1B --dp 8 --dtype bfloat16 --gpu A100-80GB | on A100-80GB: see python -m picotron_min.planner
""".strip().splitlines()  # noqa: E501
EXPERTS = "--num_local_experts 8 --moe_intermediate_size 96 --mlp_only_layers [0]"
FITS_NOT = "--model_name Llama-2-7B --dp 8 --mbs 4 --dtype bfloat16"


@pytest.mark.parametrize("row", ROWS)
def test_it_prints_what_the_config_means(create, row):
    flags, line = row.format(**globals()).split(" | ")
    code, out, _ = create(flags)
    assert code == 0 and line in out


def test_the_planner_finds_a_layout_that_fits(create, capsys):
    _, out, _ = create(FITS_NOT)
    assert "predicted step" not in out
    command = re.search(r"looks for a layout that fits:  python -m picotron_min.planner (.+)", out)
    assert planner.main(command[1].split()) == 0
    assert "tok/s/GPU" in capsys.readouterr().out
