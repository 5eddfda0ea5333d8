"""A small run of all rows of benchmarks/compare.py, which refuses to compare different work."""

import pytest
from transformers import LlamaForCausalLM

from benchmarks import compare
from benchmarks.common import CHECKED_STEPS, Done, check_same_work

STEP = {"seq_length": 16, "micro_batch_size": 2, "gradient_accumulation_steps": 2}
TINY = {"model": {"name": "tiny", "hidden_size": 32, "num_hidden_layers": 4}}
TINY["training"] = STEP | {"eval_batches": 0}
SAME = [Done(5.0, 1.0)] * CHECKED_STEPS


@pytest.mark.parametrize("last", [Done(5.01, 1.0), Done(5.0, 1.01), Done(float("nan"), 1.0)])
def test_different_work_is_refused(last):
    with pytest.raises(ValueError, match=r"theirs .* do not do the same work"):
        check_same_work({"ours": SAME, "theirs": [*SAME[1:], last]}, compare.TOLERANCE)


def test_rows_run_and_their_contenders_do_the_same_work(capsys, monkeypatch):
    assert LlamaForCausalLM  # imported here once, not in each process of the row that compares it
    monkeypatch.setattr(compare, "WARMUP", CHECKED_STEPS - 1)
    monkeypatch.setattr(compare, "measure_memory", lambda row, alone, work: 50.0)
    compare.main(["--rounds", "1"], work=TINY)
    shown = capsys.readouterr().out
    for name, row in compare.ROWS.items():
        assert f"\n{name}\n" in shown and f"\n{row.peer} " in shown
    assert shown.count(" of it is its bound") == len(compare.ROWS)
