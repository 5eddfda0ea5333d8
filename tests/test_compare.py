"""The arithmetic of benchmarks/compare.py, and one small run of all its rows."""

import json
from functools import partial

import pytest
import torch.distributed as dist
from transformers import LlamaForCausalLM

from benchmarks import compare, rows
from benchmarks.compare import Effort, Result, Turns
from benchmarks.ours import Done

TINY = {
    "model": {"name": "tiny", "hidden_size": 32, "num_hidden_layers": 4},
    "training": {
        "seq_length": 16,
        "micro_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "eval_batches": 0,
    },
}
SAME = [Done(5.0, 1.0)] * compare.CHECKED_STEPS


def result(contender: str, seconds: list[float], done: list[Done] = SAME) -> Result:
    return Result("row", contender, seconds, memory_mb=100, total_memory_mb=300, done=done)


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


def test_ratios_compare_neighbours_so_that_a_slow_phase_of_the_machine_cancels():
    ours, theirs = result("ours", [1, 3, 10, 2]), result("theirs", [2, 6, 20, 4])
    assert compare.ratios(ours, theirs) == (0.5, 0.5, 0.5)


def test_the_slowest_rank_sets_the_time_and_the_largest_the_memory(monkeypatch):
    def run_ranks(row, work, function):
        contenders, *_ = function.args
        done = dict.fromkeys(contenders, SAME)
        if len(contenders) == 1:  # for its memory
            return [Turns(done, {}, memory) for memory in ((100, 150), (200, 240))]
        seconds = {"picotron-min": [1.0, 4.0]}, {"picotron-min": [3.0, 2.0]}
        return [Turns(done, {"transformers": [2.0, 2.0]} | own, (300, 900)) for own in seconds]

    monkeypatch.setattr(compare, "run_ranks", run_ranks)
    ours, _ = compare.measure("one-process", TINY, Effort(1, 2, 2))
    assert ours.step_seconds == [3.0, 4.0]
    assert (ours.memory_mb, ours.total_memory_mb) == (50, 150)


@pytest.mark.parametrize("last", [Done(5.01, 1.0), Done(5.0, 1.01), Done(float("nan"), 1.0)])
def test_different_work_is_refused(last):
    compare.check_same_work([result("ours", [1]), result("theirs", [1])])
    with pytest.raises(ValueError, match=r"theirs .* do not do the same work"):
        compare.check_same_work([result("ours", [1]), result("theirs", [1], [*SAME[1:], last])])


def test_the_table_shows_medians_ratios_and_memory():
    ours, theirs = result("ours", [0.1, 0.2, 0.3]), result("theirs", [0.2, 0.4, 0.6])
    _, first, second = compare.table([ours, theirs]).splitlines()
    assert first.split() == ["ours", "200", "(150-250)", "100"]
    assert second.split() == [
        "theirs", "400", "(300-500)", "0.500", "(0.500-0.500)", "100", "1.000",
    ]  # fmt: skip


def memory_of_one(measure, row: str, name: str, work: dict, steps: int) -> tuple[float, float]:
    """Memory needs processes for each contender."""
    return measure(row, name, work, steps) if row == "dp2" else (100, 150)


def test_rows_run_and_their_contenders_do_the_same_work(tmp_path, capsys, monkeypatch, request):
    """By default one row of each set of contenders."""
    every = request.config.getoption("--all-layouts")
    chosen = {name if every else id(row.contenders): name for name, row in compare.ROWS.items()}
    assert LlamaForCausalLM  # imported here once, not in each process of the row that compares it
    monkeypatch.setattr(compare, "QUICK", Effort(1, 2, 2))
    monkeypatch.setitem(rows.LONG, "seq_length", 32)
    monkeypatch.setitem(rows.MANY, "num_local_experts", 8)
    monkeypatch.setattr(compare, "measure_memory", partial(memory_of_one, compare.measure_memory))
    file = tmp_path / "numbers.json"
    compare.main(["--quick", "--json", str(file), "--rows", *chosen.values()], work=TINY)
    written = json.loads(file.read_text())
    assert {"date", "cpu", "torch", "threads", "load", "model", "step"} <= written.keys()
    shown = capsys.readouterr().out
    for name in chosen.values():
        results = [r for r in written["results"] if r["row"] == name]
        assert [r["contender"] for r in results] == list(compare.ROWS[name].contenders)
        for r in results:
            assert len(r["step_seconds"]) == compare.QUICK.rounds and r["memory_mb"] > 0
            assert f"\n{r['contender']} " in shown
