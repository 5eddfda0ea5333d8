"""The arithmetic of benchmarks/compare.py, and one small run of all its rows."""

import json
import math
from collections import Counter

import pytest
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaForCausalLM

from benchmarks import compare
from benchmarks.common import CHECKED_STEPS, Done, check_same_work
from benchmarks.ours import Place, bound
from picotron_min.costs import model_flops_per_token, parameter_count
from picotron_min.runtime.config_checks import resolve_model
from picotron_min.runtime.config_file import parse_config

STEP = {"seq_length": 16, "micro_batch_size": 2, "gradient_accumulation_steps": 2}
TINY = {"model": {"name": "tiny", "hidden_size": 32, "num_hidden_layers": 4}}
TINY["training"] = STEP | {"eval_batches": 0}
SAME = [Done(5.0, 1.0)] * CHECKED_STEPS


def work_of_a_bound(place: Place) -> tuple[int, float, int]:
    """FLOPs of its products, and by the formula without attention; bytes read and written."""
    limit, found = bound(place), Counter()

    class Multiply(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            matrices = [x.shape for x in args if isinstance(x, Tensor)][-2:]
            if "mm" in function.overloadpacket.__name__:
                found["flops"] += 2 * math.prod(matrices[0]) * matrices[1][-1]
            found["copied"] += 2 * args[1].nbytes if "copy_" in str(function) else 0
            return function(*args, **(kwargs or {}))

    with Multiply():
        limit(0)
    formula = model_flops_per_token(place.model_config, 0) * place.config.tokens_per_step
    return found["flops"], formula / place.config.world_size, found["copied"]


def test_a_bound_has_all_products_of_a_step_and_moves_its_bytes():
    parameters = 4 * parameter_count(resolve_model(parse_config(TINY)))  # bytes
    (flops, formula, copied), *_ = compare.run_ranks(compare.ROWS["dp2"], TINY, work_of_a_bound)
    assert flops == formula
    # Of weights and moments each byte is read and written, of gradients read twice; one is sent.
    assert copied == pytest.approx(2 * (4 + 1) * parameters, rel=0.01)


@pytest.mark.parametrize("last", [Done(5.01, 1.0), Done(5.0, 1.01), Done(float("nan"), 1.0)])
def test_different_work_is_refused(last):
    check_same_work({"ours": SAME, "theirs": SAME}, compare.TOLERANCE)
    with pytest.raises(ValueError, match=r"theirs .* do not do the same work"):
        check_same_work({"ours": SAME, "theirs": [*SAME[1:], last]}, compare.TOLERANCE)


def test_the_table_shows_medians_ratios_of_neighbours_and_memory():
    seconds = {"picotron-min": [0.1, 0.2, 0.3], "DDP": [0.2, 0.4, 0.6], "bound": [0.05, 0.1, 0.15]}
    shown = compare.table(compare.Result(seconds, {"picotron-min": 100, "DDP": 200}))
    lines = [" ".join(line.split()) for line in shown.splitlines()[1:]]
    ratio = "0.500 (0.500-0.500)"
    assert lines == [
        "picotron-min 200 100",
        f"DDP 400 {ratio} 200 0.500",
        f"{ratio} of it is its bound",
    ]


def test_rows_run_and_their_contenders_do_the_same_work(tmp_path, capsys, monkeypatch):
    assert LlamaForCausalLM  # imported here once, not in each process of the row that compares it
    monkeypatch.setattr(compare, "WARMUP", CHECKED_STEPS - 1)
    monkeypatch.setattr(compare, "measure_memory", lambda row, alone, work: 50.0)
    compare.main(["--rounds", "1", "--json", str(tmp_path / "numbers.json")], work=TINY)
    written = json.loads((tmp_path / "numbers.json").read_text())
    assert written.keys() > {"date", "device", "torch", "load", "model", "step", *compare.ROWS}
    shown = capsys.readouterr().out
    for name, row in compare.ROWS.items():
        assert [*written[name]["seconds"]] == ["picotron-min", row.peer, "bound"]
        assert f"\n{row.peer} " in shown
