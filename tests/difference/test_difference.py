"""python -m difference: right layouts pass, and known mistakes are found, located and explained."""

import json
import os
import signal
from functools import partial

import pytest
import torch

from difference.__main__ import main
from difference.whole import group_of_one
from picotron_min.collectives import Axis, all_gather
from tests.assembled import make_config
from tests.difference.changed import answer, by_names
from tests.difference.extensions import EveryThird, Scaled, Shrinking, ZLoss, install
from tests.pool import run_forked

CORE = "picotron_min/"
TIED = {"tie_word_embeddings": True}
FURTHER = {"num_nextn_predict_layers": 2, "document_mask": True}
RIGHT = {
    "1f1b": {"pp": 2, "micro_batches": 3},
    "zb_v": {"pp": 2, "micro_batches": 2, "engine": "zb_v", "chunks": 2, "model": TIED},
    "ring, recompute": {"cp": 2, "tp": 2, "sequence_parallel": True, "recompute": "full"},
    "sharded": {"dp": 2, "micro_batches": 2, "sharding": "parameters", "optimizer": "adamw"},
    "muon": {"dp": 2, "tp": 2, "optimizer": "muon"},
    "further tokens": {"pp": 2, "cp": 2, "model": FURTHER},
}


@pytest.mark.parametrize("options", RIGHT.values(), ids=RIGHT)
def test_a_right_layout_is_right(options):
    code, text = answer(make_config(**options))
    assert code == 0 and text.startswith("ALL RIGHT"), text


EXPERTS = {"num_local_experts": 4, "scoring_func": "sigmoid", "moe_router_bias_update_rate": 0.1}


def test_the_biases_of_routers_are_updated_in_the_one_process_too():
    code, text = answer(make_config(dp=2, **EXPERTS))
    assert code == 0 and text.startswith("ALL RIGHT"), text


def gather_alone():
    all_gather(torch.ones(1), Axis("tp", group_of_one(), torch.device("cpu")), dim=0)


def test_a_forked_process_has_a_group_of_its_own():
    gather_alone()
    assert run_forked(gather_alone, count=1) == [0]  # it has no threads of the group above


@pytest.mark.parametrize(
    "kinds,options",
    [
        ((ZLoss, Scaled), {"tp": 2, "micro_batches": 2}),
        ((EveryThird, Shrinking), {"cp": 2, "cp_engine": "ulysses"}),
    ],
)
def test_right_extensions_are_right(kinds, options):
    code, text = answer(make_config(**options), before=partial(install, *kinds))
    assert code == 0 and text.startswith("ALL RIGHT"), text


SIX_HEADS = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3}
# picotron's five known bugs, here: file, right line, wrong line, a layout that shows it, what is
# said of it, and the function that is named.
KNOWN = [
    (
        "initialise.py",
        "parameter.data.copy_(whole[mine])",
        "parameter.data.copy_(initial_weight(name, tuple(parameter.shape), seed, std))",
        {"tp": 2},
        "initial model.embed_tokens.weight",
        "initialise:initialise",
    ),
    (
        "placement.py",
        'sums=("dp_cp",), is_hidden_matrix=True)',
        'sums=("dp",), is_hidden_matrix=True)',
        {"cp": 2},
        "it is this rank's own part of a sum over cp: the sum is missing",
        "placement:_placement",
    ),
    (
        "pipeline_parallel.py",
        "end, gradient)  #",
        "end, gradient if gradient is not None else torch.tensor(4.0, dtype=torch.float64))  #",
        {"pp": 2, "micro_batches": 4},
        "it is 4 (micro-batches) times what it should be",
        "pipeline_parallel:Pipeline._backward",
    ),
    (
        "parallelize.py",
        "return totals if self.axes.tp.rank == 0",
        "return totals if self.axes.tp.rank + self.axes.dp.rank == 0",
        {"dp": 2},
        "rank 0: it is the part of dp 0 alone, 2 times",
        "parallelize:ParallelModel.counted_once",
    ),
    (
        "data_parallel.py",
        "bucket.gradients.mul_(factor)",
        "bucket.gradients.mul_(factor / self.axis.size)",
        {"dp": 2},
        "it is 0.5 (1/dp) times what it should be",
        "data_parallel:GradientBuckets.scale",
    ),
]
# And others: a gradient's part, a call, the row of an extension's rule, what a build sets, heads.
KNOWN += [
    (
        "tensor_parallel.py",
        "first = ends.axis.rank * -(-V // ends.axis.size)",
        "first = ends.axis.rank * (V // ends.axis.size)",
        {"tp": 2},
        "rank 0: tokens 15-27 have the rows of 16-28",
        "tensor_parallel:cut_vocabulary",
    ),
    (
        "collectives.py",
        "for d in (distance, -distance))",
        "for d in (-distance, distance))",
        {"cp": 3},
        "queries 4-7 see the keys 4-11, and should see 0-7; queries 16-19 see the keys 0-11 16-23,",
        "look at      context_parallel:_RingAttention.forward, collectives:ring, ",
    ),
    (
        "context_parallel.py",
        "x.repeat_interleave(repeats, dim=1) if repeats > 1 else x for x in (k, v)",
        "x.repeat(1, repeats, 1, 1) for x in (k, v)",
        {"cp": 2, "cp_engine": "ulysses", "model": SIX_HEADS},
        "see the key heads 0 1 2 0 1 2, and should see 0 0 1 1 2 2",
        "look at      context_parallel:UlyssesAttention.forward",
    ),
    (
        "extensions/overlap/boundary.py",
        "y, work = self.start_sum(add_products(xs, products))",
        "y, work = self.start_sum(products[0](xs[0]))",
        {"tp": 2},
        "it is the part of linear gate_proj alone",
        "look at      extensions/overlap/boundary:_Enter,",
    ),
    (
        "tensor_parallel.py",
        "ends.leave(forward(ends.enter(x), *rest))",
        "ends.leave(forward(x, *rest))",
        {"tp": 2, "overlap": False},
        "it is this rank's own part of a sum over tp: the sum is missing",
        "tensor_parallel:_between",
    ),
    (
        "extensions/qk_norm/shape.py",
        'sums=("dp_cp_tp",)',
        'sums=("dp_cp",)',
        {"tp": 2, "model": {"qk_norm": True}},
        "it is this rank's own part of a sum over tp: the sum is missing",
        "extensions/qk_norm/shape:norm_rows",
    ),
]
# And positions in another order, what a stage keeps, an expert's gradient, documents.
KNOWN += [
    (
        "collectives.py",
        "tensor.unflatten(dim, (axis.size, -1)).movedim(dim, 0)",
        "tensor.unflatten(dim, (-1, axis.size)).movedim(dim + 1, 0)",
        {"tp": 2, "sequence_parallel": True},
        "rank 0: positions 1-7 are those of 2 4 6 8 10 12 14",
        "collectives:reduce_scatter",
    ),
    (
        "pipeline_parallel.py",
        "model.model.norm, model.lm_head = nn.Identity(), nn.Identity()",
        "model.lm_head = nn.Identity()",
        {"pp": 2},
        "rank 1: it is model.norm of rank 0",
        "look at      pipeline_parallel:keep_stage",
    ),
    (
        "extensions/experts/mixture.py",
        'copies=("edp",), sums=("edp",)',
        'copies=("edp",), sums=("dp_cp",)',
        {"dp": 2, "ep": 2, "num_local_experts": 4},
        "it is added to the gradient of model.layers.0.mlp.experts.2.gate_proj.weight",
        "look at      extensions/experts/mixture:expert_rows",
    ),
    (
        "context_parallel.py",
        "out[:, :, rows], lse[:, :, rows] = merged",
        "out[:, :, rows], _ = merged",
        {"cp": 2},
        "its backward has the log-sum-exp of each rank's own keys in place of all keys'",
        "look at      attention:merge_blocks, context_parallel:_RingAttention,",
    ),
    (
        "extensions/experts/dispatch.py",
        "by_expert.sort(weights)",
        "weights",
        {"dp": 2, "ep": 2, "num_local_experts": 4},
        "tokens have other weights for their experts",
        "look at      extensions/experts/dispatch:AllToAllDispatch.__call__,",
    ),
    (
        "extensions/optimizers/muon.py",
        "math.sqrt(max(batch.shape))",
        "math.sqrt(max(updates[0].shape))",
        {"tp": 2, "optimizer": "muon"},
        "step 1, weights of model.layers.0.mlp.gate_proj.weight",
        "look at      extensions/optimizers/muon:Muon.step,",
    ),
    (
        "extensions/documents/rectangles.py",
        "j * width + right), q == k",
        "j * width + right), i == j",
        {"cp": 2, "document_mask": True},
        "rank 1: queries 4-7 of sequences 0-2 see the keys 0-3 with a causal mask, and should see",
        "look at      extensions/documents/attention:_DocumentRing.forward",
    ),
]
KNOWN += [  # And a plan that cannot run.
    (
        "pipeline_schedule.py",
        "chunks, warmup=ranks - rank - 1)  #",
        "chunks, warmup=ranks - rank - 1)[:-1]  #",
        {"pp": 2, "micro_batches": 2},
        "'B1' is missing",
        "look at      pipeline_schedule:one_f_one_b, ",
    ),
]
# And counts of experts; tokens further ahead: their targets, and a parameter of two ranks.
KNOWN += [
    (
        "extensions/experts/router.py",
        "tokens = totals[router.layer, : self.num_experts]",
        "tokens = self.table[router.layer, : self.num_experts]",
        {"dp": 2, **EXPERTS},
        "rank 1: it follows the tokens of dp 1 alone",
        "look at      extensions/experts/router:RoutingCounts.update_biases",
    ),
    (
        "extensions/experts/router.py",
        "counts = self.sum_over_sequences(counts)",
        "counts = counts + 0",
        {"cp": 2, **EXPERTS, "moe_seq_aux_loss_coeff": 0.1},
        "experts/router:Router._balance: counts is a part of a sum over cp; ",
        "look at      extensions/experts/router:Router._balance, ",
    ),
    (
        "extensions/multi_token/targets.py",
        "rows[:, batches.positions + ahead]",
        "rows[:, ahead : ahead + len(batches.positions)]",
        {"cp": 2, "model": FURTHER},
        "step 1, depth 2 of tokens",
        "look at      extensions/multi_token/targets:look_ahead",
    ),
    (
        "extensions/multi_token/shape.py",
        "_replace(copies=axes, sums=axes)",
        "_replace(sums=axes)",
        {"pp": 2, "model": FURTHER},
        "rank 0: its square counts the embeddings of pp 0 2 (pp) times",
        "look at      extensions/multi_token/shape:depth_rows",
    ),
    (
        "extensions/multi_token/shape.py",
        'axes, name = ("dp_cp", "ends")',
        'axes, name = ("dp_cp",)',
        {"pp": 2, "model": FURTHER},
        "it is this rank's own part of a sum over pp: the sum is missing",
        "look at      placement:_placement, extensions/multi_token/shape:depth_rows",
    ),
]


@pytest.mark.parametrize("file,right,wrong,options,said,function", KNOWN)
def test_known_bugs_are_explained(file, right, wrong, options, said, function):
    code, text = answer(make_config(**options), (CORE + file, right, wrong), steps=1)
    named = by_names(text[text.rindex("look at") :])
    assert code == 1 and said in text and function in named and ".arrived" not in named, text


@pytest.mark.parametrize(
    "file,right,wrong,options,said,function",
    [
        (
            "data.py",
            "self.global_batch = self.dp_size * self",
            "self.global_batch = self",
            {"dp": 2, "micro_batches": 2},
            "sequences 0-3 are those of 8-11 of the global batch of the step before",
            "look at      data:Batches.__post_init__",
        ),
        (
            "extensions/experts/router.py",
            "tokens = totals[router.layer",
            "tokens = self.table[router.layer",
            {"dp": 2, **EXPERTS},
            "step 1, biases of routers of model.layers.0.mlp.gate.e_score_correction_bias",
            "look at      extensions/experts/router:RoutingCounts.update_biases",
        ),
    ],
)
def test_what_goes_wrong_between_steps_is_explained(file, right, wrong, options, said, function):
    code, text = answer(make_config(**options), (CORE + file, right, wrong))
    assert code == 1 and said in text and function in by_names(text), text


def kill_rank_1_in_step_2() -> None:
    from difference import runs

    step = runs.Rank._step

    def killed(rank, number: int) -> None:
        if rank.here.rank == number == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        step(rank, number)

    runs.Rank._step = killed


def test_what_a_killed_rank_has_recorded_is_compared():
    code, text = answer(make_config(dp=2), before=kill_rank_1_in_step_2)
    assert code == 1 and "FAILED       rank 1: it was killed" in text
    assert "tensors that were recorded before are right" in text


def test_an_exception_names_its_place_and_functions():
    edit = CORE + "data_parallel.py", "self.buckets[len(self.works) :]", "self.buckets"
    code, text = answer(make_config(dp=2), edit, steps=1)  # each bucket is sent again
    assert code == 1 and "zip() argument 2 is longer" in text
    assert "look at      data_parallel:GradientBuckets.wait" in by_names(text)


def test_a_config_that_cannot_be_compared_is_refused(tmp_path, capsys):
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"distributed": {"tp_size": 3, "use_cpu": True}}))
    assert main(["--config", str(path)]) == 2
    assert "tp_size=3" in capsys.readouterr().err


def test_the_one_process_of_another_version_is_saved_and_compared_with(tmp_path, capsys):
    files, right = (tmp_path / "a.json", tmp_path / "b.json"), tmp_path / "right"
    for file, micro_batches in zip(files, (1, 2), strict=True):
        config = make_config(micro_batches=micro_batches)
        file.write_text(config.model_dump_json(by_alias=True))
    command = ["--config", str(files[0]), "--steps", "1", "--right", str(right)]
    assert main(command) == 0
    of, saved = torch.load(right, weights_only=True)
    saved[0, "loss", "loss", 0, 0] += 1
    torch.save((of, saved), right)
    assert main(command) == 1
    assert "FIRST WRONG  step 1, loss" in capsys.readouterr().out
    assert main(["--config", str(files[1]), "--right", str(right)]) == 2
    assert "is of another config" in capsys.readouterr().err
    torch.save((of, main), right)  # loading it would import and run what it names
    assert main(command) == 2
    assert "is no file that --right has written" in capsys.readouterr().err
    for wrong in (tmp_path, tmp_path / "nowhere" / "right"):
        assert main(["--config", str(files[1]), "--right", str(wrong)]) == 2
        assert f"--right {wrong}: name a file" in capsys.readouterr().err
