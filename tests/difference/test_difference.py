"""python -m difference: right layouts pass, and known mistakes are found, located and explained."""

import json
import os
import signal

import pytest

from difference.__main__ import main
from tests.assembled import make_config
from tests.difference.changed import answer

CORE = "picotron_min/"
SUM = 'return Placement(cuts, ("dp_cp",), sums=("dp_cp",), is_hidden_matrix=True)'
INITIAL = "parameter.data.copy_(whole[mine])"
OWN_SHAPE = "parameter.data.copy_(initial_weight(name, tuple(parameter.shape), seed, std))"

RIGHT = {
    "one rank": {},
    "1f1b": {"pp": 2, "micro_batches": 3},
    "zb_v": {
        "pp": 2,
        "micro_batches": 2,
        "engine": "zb_v",
        "chunks": 2,
        "model": {"tie_word_embeddings": True},
    },
    "ring, recompute": {"cp": 3, "tp": 2, "sequence_parallel": True, "recompute": "full"},
    "sharded": {"dp": 2, "micro_batches": 2, "sharding": "parameters", "optimizer": "adamw"},
}


@pytest.mark.parametrize("options", RIGHT.values(), ids=RIGHT)
def test_a_right_layout_is_right(options):
    code, text = answer(make_config(**options))
    assert code == 0 and text.startswith("ALL RIGHT"), text


# picotron's five known bugs, here: the change, a layout that shows it, and what is said of it.
KNOWN = {
    "equal shards": (
        ("initialise.py", INITIAL, OWN_SHAPE),
        {"tp": 2},
        "initial model.embed_tokens.weight",
        "initialise:initialise",
    ),
    "sum over cp missing": (
        ("placement.py", SUM, SUM.replace('sums=("dp_cp",)', 'sums=("dp",)')),
        {"cp": 2},
        "it is this rank's own part of a sum over cp: the sum is missing",
        "placement:_placement",
    ),
    "micro-batches": (
        (
            "pipeline_parallel.py",
            "end, gradient)  #",
            "end, gradient if gradient is not None else torch.tensor(4.0, dtype=torch.float64))  #",
        ),
        {"pp": 2, "micro_batches": 4},
        "it is 4 (micro-batches) times what it should be",
        "pipeline_parallel:Pipeline._backward",
    ),
    "loss of one dp rank": (
        (
            "parallelize.py",
            "return totals if self.axes.tp.rank == 0",
            "return totals if self.axes.tp.rank + self.axes.dp.rank == 0",
        ),
        {"dp": 2},
        "",
        "parallelize:ParallelModel.counted_once",
    ),
    "gradients divided by dp": (
        (
            "data_parallel.py",
            "bucket.gradients.mul_(factor)",
            "bucket.gradients.mul_(factor / self.axis.size)",
        ),
        {"dp": 2},
        "it is 0.5 (1/dp) times what it should be",
        "data_parallel:GradientBuckets.scale",
    ),
}


@pytest.mark.parametrize("edit,options,said,function", KNOWN.values(), ids=KNOWN)
def test_picotrons_five_known_bugs_are_explained(edit, options, said, function):
    code, text = answer(make_config(**options), (CORE + edit[0], *edit[1:]))
    assert code == 1 and said in text and function in text.rpartition("look at")[2], text


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
    code, text = answer(make_config(dp=2), edit)  # each bucket is sent again
    assert code == 1 and "zip() argument 2 is longer" in text
    assert "look at      data_parallel:GradientBuckets.wait" in text


def test_a_config_that_cannot_be_compared_is_refused(tmp_path, capsys):
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"distributed": {"tp_size": 3, "use_cpu": True}}))
    assert main(["--config", str(path)]) == 2
    assert "tp_size=3" in capsys.readouterr().err
