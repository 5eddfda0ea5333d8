"""What create_config.py prints about a config."""

import re
from array import array

from picotron_min.planner import __main__ as planner
from picotron_min.runtime.config_file import load_config
from tests.planner.test_create_config import PATH


def test_it_prints_what_the_config_means(create):
    _, out, _ = create("--dp 2 --mbs 4 --grad_acc_steps 2 --seq_len 1024 --model_name Llama-3.2-1B")
    assert "processes        2 = pp 1 x dp 2 x cp 1 x tp 1" in out
    assert "  pp 0  dp 1  cp 0   rank 1\n" in out
    assert "tokens per step  16,384 = 2 dp x 4 sequences x 2 micro-batches x 1024" in out
    assert "parameters       1,235,814,400, " in out
    assert "weights            4.943 GB" in out and "optimizer state    9.887 GB" in out
    assert out.endswith("\npython train.py --config runs/exp/config.json\n")


def test_it_prints_what_offload_saves_and_whether_copies_are_hidden(create):
    # Of a layer: its input, 4 E S bytes; 26 E^2 S FLOPs, and attention's.
    of = "--model_name Llama-2-7B --dtype bfloat16 --seq_len 4096 --mbs 1 --recompute full"
    _, without, _ = create(of, exp_name="without")
    _, out, _ = create(f"{of} --offload 30", exp_name="full")
    assert "offload" not in without
    E, S, M = 4096, 4096, 11_008
    flops = S * (8 * E * E + 2 * E * S + 6 * E * M) / (0.7 * 989.4e12)
    copy = f"of a layer {4 * E * S / 1e6:.1f} MB, which take {4e3 * E * S / 50e9:.3g} ms at 50 GB/s"
    assert f"  {copy}, forward {1e3 * flops:.3g} ms: hidden\n" in out
    assert f"offload          {30 * 4 * E * S / 1e9:.3f} GB fewer activations" in out
    _, out, _ = create(f"{of.replace('full', 'none')} --offload 3", exp_name="none")
    assert " waits 1" in out and "hidden" not in out
    _, in_8_bits, _ = create(f"{of.replace('full', 'none')} --offload 3 --fp8", exp_name="fp8")
    copied = [float(re.search(r"of a layer (\S+) MB", text)[1]) for text in (out, in_8_bits)]
    assert copied[1] < 0.95 * copied[0]
    _, out, _ = create(f"{of} --offload 30 --use_cpu", exp_name="cpu")
    assert "offload          saves nothing on a CPU: the copies are in the same memory\n" in out


def test_a_run_that_does_not_fit_is_not_predicted_and_the_planner_finds_one_that_does(
    create, capsys
):
    of = "--model_name Llama-2-7B --dp 8 --mbs 4 --dtype bfloat16"
    code, out, _ = create(of)
    assert code == 0 and "predicted step" not in out
    together = float(re.search(r"together +(\S+) GB", out)[1])
    capacity = f"{0.92 * 80 - 1:.1f} GB (80 x 0.92 - 1 for libraries)"
    assert f"does not fit     {together:.1f} GB of {capacity}, on H100\n" in out
    command = re.search(r"looks for a layout that fits:  python -m picotron_min.planner (.+)", out)
    assert planner.main(command[1].split()) == 0
    assert "tok/s/GPU" in capsys.readouterr().out
    _, out, _ = create(f"{of} --optimizer muon --compile --fp8", exp_name="muon")
    assert "--optimizer muon --precision fp8 --compile\n" in out
    _, out, _ = create(f"{of} --num_hidden_layers 31", exp_name="overridden")
    assert "fits:  python -m picotron_min.planner --help\n" in out, "it cannot be told"
    _, out, _ = create(f"{of} --sharding parameters", exp_name="sharded")
    assert "does not fit" not in out and "predicted step" in out


def test_it_names_what_the_prediction_leaves_out(create):
    of = "--model_name SmolLM-1.7B --dtype bfloat16"
    _, plain, _ = create(of, exp_name="plain")
    assert "predicted step" in plain and "as without" not in plain
    overlap = "--tp 2 --sequence_parallel --tp_overlap"
    _, out, _ = create(f"{of} {overlap} --offload 3", exp_name="both")
    assert "  as without offload and tp_overlap, whose effect on the time is not modelled\n" in out
    _, out, _ = create(f"{of} {overlap}", exp_name="overlap")
    assert "  as without tp_overlap, whose effect" in out


def test_documents_shorten_the_attention_of_the_predicted_step(create, tmp_path):
    (tmp_path / "documents.bin").write_bytes(array("q", [1024, 2048]).tobytes())
    of, file = "--dtype bfloat16 --dp 8 --seq_len 2048 --model_name Llama-3.2-1B", "--documents ."
    code, out, err = create(f"{of} {file}")
    assert (code, out) == (2, "") and "not used without dataset.document_mask" in err
    assert not PATH.exists()
    one = create(f"{of} --document_mask")[1]
    assert "  Planned for one document a row: --documents FILE has their lengths.\n" in one
    several = create(f"{of} --document_mask {file}")[1]
    assert "  Attention is as costly as in rows of 1,024 tokens, by the documents' " in several
    steps = [float(text.split("predicted step")[1].split()[0]) for text in (one, several)]
    assert steps[1] < steps[0]


MIXTURE = "--num_local_experts 8 --moe_intermediate_size 96 --mlp_only_layers [0]"


def test_it_prints_what_experts_need(create):
    code, out, _ = create(f"{MIXTURE} --dp 4 --ep 2 --etp 2")
    assert code == 0 and load_config(PATH).layout.ep == load_config(PATH).layout.etp == 2
    assert "experts          8 in each of 3 layers, 2 of them a token\n" in out
    assert "  4 of a layer on a rank (ep 2), each cut over 2 (etp)\n" in out
    assert "  without moe_expert_capacity_factor their activations have no bound: all tokens" in out
    attention, dense, router, expert = 3 * 128 * 128, 3 * 128 * 384, 8 * 128, 3 * 128 * 96
    used = 4 * attention + dense + 3 * (router + 2 * expert) + 257 * 128
    total = used + 3 * 6 * expert + 257 * 128 + 9 * 128
    assert f"parameters       {total:,}, {used:,} a token is multiplied with\n" in out
    weights = 4 * (total - 3 * 8 * expert + 3 * 8 * expert / 4)
    assert f"weights        {weights / 1e6:9.3f} MB" in out
    _, out, _ = create(f"{MIXTURE} --moe_expert_capacity_factor 1.25", exp_name="bounded")
    assert "  8 of a layer on a rank (ep 1)\n" in out and "no bound" not in out
    assert "experts" not in create("--dp 2", exp_name="dense")[1]


def test_the_rank_grid_has_tp_innermost_and_stays_short(create):
    _, out, _ = create("--pp 2 --dp 4 --cp 2 --tp 2")
    assert "processes        32 = pp 2 x dp 4 x cp 2 x tp 2" in out
    assert "  pp 0  dp 0  cp 1   ranks 2 to 3 (tp)\n" in out
    assert "  pp 0  dp 3  cp 1   ranks 14 to 15 (tp)\n  and 8 more rows\n" in out
    _, out, _ = create("--mbs 1 --grad_acc_steps 1 --dp 9", exp_name="nine")
    assert "tokens per step  2,304 = 9 dp x 1 sequence x 1 micro-batch x 256\n" in out
    assert "  and 1 more row\n" in out
    assert "\ntokenizer        bytes, the model's own\n" in out
