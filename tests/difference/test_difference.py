"""python -m difference: right layouts pass, and known mistakes are found, placed and explained."""

import multiprocessing
import os
import re
import runpy
import signal
import sys
from pathlib import Path

import pytest
import torch

import difference
from difference.__main__ import main
from difference.taps import Notes
from difference.tiny import tiny_model
from picotron_min.extensions.settings import Layout, ModelConfig
from tests.assembled import make_config
from tests.difference.changed import answer, functions_in

TIED = {"tie_word_embeddings": True}
FURTHER = {"model": {"num_nextn_predict_layers": 2, "document_mask": True}}
FURTHER |= {"num_local_experts": 4, "moe_aux_loss_coeff": 0.1}  # and balanced
EXPERTS = {"num_local_experts": 4, "scoring_func": "sigmoid", "moe_router_bias_update_rate": 0.1}
GROUPS = {"num_local_experts": 8, "n_group": 4, "topk_group": 2}
SHARDED = {
    "sequence_parallel": True,
    "micro_batches": 2,
    "sharding": "parameters",
    "optimizer": "adamw",
}
# With the number of steps: AdamW in the second step has moments.
RIGHT = {
    "zb_v": (1, {"pp": 2, "micro_batches": 2, "engine": "zb_v", "chunks": 2, "model": TIED}),
    "sharded experts": (2, {"dp": 2, "tp": 2, "ep": 2, "etp": 2, **SHARDED, **EXPERTS, **GROUPS}),
    "further tokens, balanced": (1, {"pp": 2, "cp": 2, "recompute": "full", **FURTHER}),
}


@pytest.mark.parametrize(("steps", "options"), RIGHT.values(), ids=RIGHT)
def test_a_right_layout_is_right(steps, options):
    code, text = answer(make_config(**options), steps=steps)
    assert code == 0 and "\nALL RIGHT" in text, text


# A file, a right line, a wrong line, a layout that shows it, what is said, and a named function.
# More are hunts 6 and 7 of the exercises.
KNOWN = [
    (
        "tensor_parallel.py",
        "ends.leave(forward(ends.enter(x), *rest))",
        "ends.leave(forward(x, *rest))",
        {"tp": 2, "overlap": False},
        "own part of a sum over tp: the sum is missing",
        "tensor_parallel:_between",
    ),
    (
        "context_parallel.py",
        "out[:, :, rows], lse[:, :, rows] = merged",
        "out[:, :, rows], _ = merged",
        {"cp": 2},
        "gradient of model.layers.1.self_attn.core_attention.",
        "context_parallel:_RingAttention.backward",
    ),
    (
        "extensions/experts/router.py",
        "tokens = totals[router.layer, : self.num_experts]",
        "tokens = self.table[router.layer, : self.num_experts]",
        {"dp": 2, **EXPERTS},
        ".mlp.gate.e_score_correction_bias  on dp ",
        "router:RoutingCounts.update_biases",
    ),
    (
        "data_parallel.py",
        "torch._foreach_zero_",
        "list",
        {"dp": 2},
        "FIRST WRONG  step 2, summed gradient of",
        "placement:_placement",  # of a table
    ),
    (
        "pipeline_schedule.py",
        "ranks - rank - 1)  #",
        "ranks - rank - 1)[:-1]  #",
        {"pp": 2, "micro_batches": 2},
        "FAILED .*'B1' is missing.*\\.py:",  # it cannot run
        "",
    ),
]


@pytest.mark.parametrize("file,right,wrong,options,said,function", KNOWN)
def test_a_known_mistake_is_found_and_its_function_is_named(
    file, right, wrong, options, said, function
):
    code, text = answer(make_config(**options), (file, right, wrong))
    assert code == 1 and re.search(said, text, re.S), text
    named = functions_in(text)
    assert (len(named) <= 3 and function in named) or function == "", text


def kill_rank_1_after_its_first_record() -> None:
    note = Notes.note

    def killed(notes, *what) -> None:
        note(notes, *what)
        if torch.distributed.get_rank():
            os.kill(os.getpid(), signal.SIGKILL)

    Notes.note = killed


def test_what_a_killed_rank_has_noted_is_compared():
    right = "parameter.data.copy_(whole[mine])"
    wrong = "parameter.data.copy_(initial_weight(name, tuple(parameter.shape), seed, std))"
    edit = "initialise.py", right, wrong
    code, text = answer(make_config(tp=2), edit, kill_rank_1_after_its_first_record)
    first = "FIRST WRONG  step 1, initial weight of model.embed_tokens.weight  on tp 1 (rank 1)"
    assert code == 1 and first in text and "initialise:initialise" in functions_in(text)
    assert "FAILED       rank 1: it ended with code -9" in text


def command(config: Path, out: int) -> None:
    """`python -m difference`, in a group of processes as a terminal makes it."""
    os.setsid()
    sys.stdout = sys.stderr = open(out, "w")  # noqa: SIM115
    sys.argv = ["difference", "--config", str(config)]
    del sys.modules["difference.__main__"]  # else runpy warns that it is there
    runpy.run_module("difference", run_name="__main__")


def test_a_config_is_refused_and_ctrl_c_ends_a_run_without_a_traceback(tmp_path, capsys):
    path = tmp_path / "a.json"
    path.write_text('{"distributed": {"tp_size": 3}}')
    assert main(["--config", str(path)]) == 2 and "tp_size=3" in capsys.readouterr().err
    path.write_text('{"distributed": {"dp_size": 2, "use_cpu": true}}')
    ours, theirs = os.pipe()
    process = multiprocessing.get_context("fork").Process(target=command, args=(path, theirs))
    process.start()
    os.close(theirs)
    with open(ours) as printed:
        assert printed.readline().startswith("compared in float64")  # it trains now
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does, to all its processes
        assert printed.read() == ""
    process.join(60)
    assert process.exitcode == -signal.SIGINT


def test_a_kind_of_layer_that_the_tiny_model_lacks_is_refused(monkeypatch):
    mixed = ModelConfig(61, 32, 48, 8, 4, 2, num_local_experts=4, mlp_only_layers=(1, 3))
    tiny_model(mixed, Layout(pp=2))  # has both kinds, or it would be refused
    of_layer = ModelConfig.mlp_shapes  # as if every eighth layer were of another kind

    def with_eighth(model, layer):
        return of_layer(model, layer) | ({"mlp.extra": (1,)} if layer == 7 else {})

    monkeypatch.setattr(ModelConfig, "mlp_shapes", with_eighth)
    with pytest.raises(ValueError, match=r"no layer of the kind of layer 7.*use --own-sizes"):
        tiny_model(mixed, Layout())


@pytest.mark.parametrize("row", ["4 2 4 12 6", "32 8 2 16 4", "6 3 2 6 3", "8 8 2 4 4"])
def test_the_tiny_model_has_the_heads_ratio_and_what_cp_does_not_divide(row):
    heads, kv, cp, *tiny = map(int, row.split())
    layout = Layout(cp=cp, cp_engine="ulysses")
    model = tiny_model(ModelConfig(61, 8 * heads, 48, 8, heads, kv), layout)
    assert [model.num_attention_heads, model.num_key_value_heads] == tiny


def test_a_course_that_cannot_be_imported_is_reported_in_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(difference, "__path__", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "difference.report")  # it is found in that folder now
    for text, said in (("def f(:\n", "SyntaxError"), ("import nothing_like_it\n", "nothing_like_")):
        (tmp_path / "report.py").write_text(text)
        assert main(["--config", "a.json"]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and f"{tmp_path}/report.py:1" in error and said in error
