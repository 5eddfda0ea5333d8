"""The arithmetic of benchmarks/compare.py, and one small run of all its rows."""

import json
import math
from collections import Counter
from functools import partial

import pytest
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaForCausalLM

from benchmarks import compare, rows
from benchmarks.common import CHECKED_STEPS, Done, check_same_work
from benchmarks.compare import Result, Turns
from benchmarks.ours import Place, bound, picotron_min
from benchmarks.rows import Row
from picotron_min.costs import model_flops_per_token, parameter_count
from picotron_min.runtime.config_checks import resolve_model
from picotron_min.runtime.config_file import parse_config

TINY = {
    "model": {"name": "tiny", "hidden_size": 32, "num_hidden_layers": 4},
    "training": {
        "seq_length": 16,
        "micro_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "eval_batches": 0,
    },
}
SAME = [Done(5.0, 1.0)] * CHECKED_STEPS


def result(contender: str, seconds: list[float]) -> Result:
    return Result("row", contender, seconds, memory_mb=100, done=SAME)


def test_contenders_take_turns_and_the_warm_up_is_not_timed(monkeypatch):
    monkeypatch.setattr(dist, "barrier", lambda: calls.append("barrier"))
    calls = []

    def build(name):
        def step(index):
            calls.append(f"{name}{index}")
            return Done(index, 0.0)

        return lambda place: step

    turns = compare.take_turns({name: build(name) for name in "AB"}, 1, 2, None)
    assert [call for call in calls if call != "barrier"] == ["A0", "B0", "A1", "B1", "A2", "B2"]
    assert calls[::2] == ["barrier"] * 6
    assert [len(turns.seconds[name]) for name in "AB"] == [2, 2]
    assert [done.loss for done in turns.done["B"]] == [0, 1, 2]


def test_the_slowest_rank_sets_the_time_and_the_largest_the_memory(monkeypatch):
    def run_ranks(row, work, function):
        contenders, *_ = function.args
        done = dict.fromkeys(contenders, SAME)
        if len(contenders) == 1:  # for its memory
            return [Turns(done, {}, memory) for memory in ((100, 150), (200, 240))]
        ours = {"picotron-min": [1.0, 4.0]}, {"picotron-min": [3.0, 2.0]}
        others = {"1F1B": [2.0, 2.0], "bound": [0.5, 1.0]}
        return [Turns(done, others | of_rank, (300, 900)) for of_rank in ours]

    monkeypatch.setattr(compare, "run_ranks", run_ranks)
    (ours, _), limit = compare.measure("pp2-1f1b", compare.ROWS["pp2-1f1b"], TINY, 2)
    assert ours.step_seconds == [3.0, 4.0]
    assert ours.memory_mb == 50
    bubble = 1 / 3  # of 2 ranks with 2 micro-batches
    assert limit.step_seconds == pytest.approx([0.5 / (1 - bubble), 1.0 / (1 - bubble)])


def work_of_a_bound(place: Place) -> tuple[int, float, int]:
    """FLOPs of its products, and by the formula without attention; bytes read and written."""
    limit, found = bound(place, picotron_min), Counter()

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


def test_a_bound_has_all_products_of_a_step_and_moves_its_bytes(monkeypatch):
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
    """Of neighbours, so that a slow phase of the machine cancels."""
    ours, theirs = result("ours", [0.1, 0.2, 0.3]), result("theirs", [0.2, 0.4, 0.6])
    _, first, second = (" ".join(x.split()) for x in compare.table([ours, theirs]).splitlines())
    assert first == "ours 200 (150-250) 100"
    assert second == "theirs 400 (300-500) 0.500 (0.500-0.500) 100 1.000"


def test_an_unknown_row_is_reported(capsys):
    with pytest.raises(SystemExit):
        compare.main(["--rows", "dp2", "tp3"])
    assert "no row tp3: choose of one-process, dp2" in capsys.readouterr().err


def memory_of_one(measure, row: Row, who: str, work: dict) -> float:
    """Memory needs processes for each contender."""
    return measure(row, who, work) if row is compare.ROWS["dp2"] else 50


def test_rows_run_and_their_contenders_do_the_same_work(tmp_path, capsys, monkeypatch, request):
    """By default one row of each set of contenders."""
    every = request.config.getoption("--all-layouts")
    chosen = {name if every else id(row.contenders): name for name, row in compare.ROWS.items()}
    assert LlamaForCausalLM  # imported here once, not in each process of the row that compares it
    monkeypatch.setattr(compare, "WARMUP", 1)
    monkeypatch.setitem(rows.LONG, "seq_length", 32)
    monkeypatch.setitem(rows.MANY, "num_local_experts", 8)
    monkeypatch.setattr(compare, "measure_memory", partial(memory_of_one, compare.measure_memory))
    file = tmp_path / "numbers.json"
    options = ["--rounds", "2", "--json", str(file), "--rows", *chosen.values()]
    compare.main(options, work=TINY)
    written = json.loads(file.read_text())
    assert {"date", "device", "torch", "load", "model", "step"} <= written.keys()
    shown = capsys.readouterr().out
    for name in chosen.values():
        *results, limit = [r for r in written["results"] if r["row"] == name]
        assert [r["contender"] for r in results] == list(compare.ROWS[name].contenders)
        assert limit["contender"] == "bound" and min(limit["step_seconds"]) > 0
        for r in results:
            assert len(r["step_seconds"]) == 2 and r["memory_mb"] > 0
            assert f"\n{r['contender']} " in shown
