"""The arithmetic of the benchmarks of experts and of waits, and one small run of each."""

from types import SimpleNamespace

import pytest
import torch

from benchmarks import experts, waits
from benchmarks.experts import EVEN, Cost, Routed
from benchmarks.waits import Link, Step
from tests.test_compare import TINY

WORK = SimpleNamespace(wait=lambda: None)  # a message that memory has handed over already


@pytest.fixture
def clock(monkeypatch):
    """The CPU time of this thread, as the tests set it."""
    clock = SimpleNamespace(seconds=0.0)
    monkeypatch.setattr(waits.time, "thread_time", lambda: clock.seconds)
    return clock


def test_messages_cross_a_link_one_after_another_while_the_rank_computes(clock):
    link = Link(megabytes_per_second=2)
    first, second = link.carry(WORK, 4e6), link.carry(WORK, 6e6)
    clock.seconds = 1.5  # computed in between
    first.wait()
    assert link.waited == 0.5 and link.now() == 2.0
    clock.seconds = 2.0
    second.wait()
    second.wait()
    assert link.waited == 3.0 and link.now() == 5.0
    link.carry(WORK, 2e6).wait()  # the link has been idle since then
    assert (link.waited, link.busy) == (4.0, 6.0)
    clock.seconds = 9.0
    second.wait()
    assert link.waited == 4.0


def test_the_table_of_rows_has_medians_of_the_mean_of_ranks(monkeypatch):
    monkeypatch.setattr(waits, "LINKS", (100,))
    overlap = [[Step(0.4, 0.1, 1.0), Step(0.4, 0.3, 1.0)], [Step(0.6, 0.3, 3.0)] * 2]
    none = [[Step(0.4, 0.5, 4.0), Step(0.4, 0.5, 2.0)], [Step(0.6, 0.5, 4.0), Step(0.6, 0.5, 2.0)]]
    ranks = [{(100, True): a, (100, False): b} for a, b in zip(overlap, none, strict=True)]
    *_, row = waits.table_of_rows(ranks).splitlines()
    seconds = ["500.0", "ms", "250.0", "ms", "500.0", "ms", "0.50"]
    assert row.split() == ["100", "MB/s", *seconds, "0.750", "(0.625-0.875)"]


def test_the_table_of_weights_leaves_out_gathers_that_do_not_occur():
    once = [[{"a": 0.001}, {"a": 0.003}], [{"a": 0.003}, {"a": 0.003}]]
    twice = [[{"a": 0.001, "a, backward": 0.004}]]
    _, head, *rows = waits.table_of_weights({"once": once, "twice": twice}).splitlines()
    assert head.split() == ["ms", "once", "twice"]
    assert [row.split() for row in rows] == [["a", "2.5", "1.0"], ["a,", "backward", "4.0"]]


def test_imbalance_of_ranks_is_less_than_that_of_their_experts():
    tokens = torch.tensor([[4.0, 0.0, 2.0, 2.0], [4.0, 2.0, 1.0, 1.0]])
    assert experts.rank_imbalance(tokens, ep=2) == (1 + 1.5) / 2
    assert experts.rank_imbalance(tokens, ep=4) == 2
    assert experts.rank_imbalance(tokens, ep=1) == 1


def test_a_step_takes_the_slowest_rank_of_every_stretch(monkeypatch):
    def routed(*stretches):
        return Routed(list(stretches), experts=2.0, ranks=1.5, dropped=0.25)

    ranks = [[routed(1.0, 2.0), routed(1.0, 1.0)], [routed(3.0, 1.0), routed(1.0, 2.0)]]
    assert experts.step_seconds(ranks) == [5.0, 3.0]
    monkeypatch.setattr(experts, "ROUTINGS", {EVEN: {}, "other": {}})
    # Twice the same step, because quartiles need two.
    steps = [{EVEN: 2 * rank[:1], "other": 2 * rank[1:]} for rank in ranks]
    *_, even, other = experts.routing_table("both", steps).splitlines()
    assert even.split()[-2:] == ["1.000", "(1.000-1.000)"]
    assert other.split() == ["other", "2.00", "1.50", "25.0%", "0.600", "(0.600-0.600)"]


def test_the_costs_of_a_layout_are_of_its_ranks(monkeypatch):
    sent = {"ep_etp": 3.0, "edp": 4.0, "dp_cp": 1.0, "tp": 2.0}
    ranks = [Cost(50.0, sent, [1.0, 2.0, 9.0]), Cost(70.0, sent | {"edp": 6.0}, [3.0, 2.0, 1.0])]
    assert experts.layout_columns(ranks).split() == ["70", "3.0", "6.0", "11.0", "4.00"]


def rows_of(capsys) -> list[list[str]]:
    return [row.split() for row in capsys.readouterr().out.splitlines()]


def rows_bytes(rank_tokens: int) -> float:
    """What a rank of two sends for even experts: rows and weights, there and back, twice."""
    leaving = rank_tokens * 2 / 2  # of two pairs for each token a half
    return TINY["model"]["num_hidden_layers"] * leaving * (4 * 32 * 4 + 2 * 4)


def test_the_waits_of_experts_and_of_sharded_weights_are_measured(capsys, monkeypatch):
    monkeypatch.setattr(waits, "WARM_UP", 0)
    monkeypatch.setattr(waits, "LINKS", (1,))  # so slow that little is hidden
    waits.main(["experts", "--rounds", "2"], TINY)
    *_, (_, _, travel, _, exposed, _, without, *_) = rows_of(capsys)
    assert float(travel) == pytest.approx(rows_bytes(rank_tokens=32) / 1e3, rel=0.1)
    assert 0 < float(exposed) < float(without) <= float(travel)

    monkeypatch.setattr(waits, "SHARDINGS", ("parameters",))
    waits.main(["sharding", "--rounds", "1", "--link", "1"], TINY)
    waited = {" ".join(names): float(ms) for *names, ms in rows_of(capsys)[-10:]}
    layers = [f"layers.{i}" for i in range(4)]
    backward = [f"{name}, backward" for name in reversed(layers)]
    assert list(waited) == ["embed_tokens", *layers, "lm_head", *backward]
    assert min(waited.values()) > 0


def test_routings_layouts_and_products_are_compared(capsys, monkeypatch):
    monkeypatch.setattr(experts, "WARM_UP", 0)
    experts.main(["routing", "--rounds", "2"], TINY)
    last = zip(experts.ROUTINGS, rows_of(capsys)[-5:], strict=True)
    dropped = {name: row[-3] for name, row in last}
    assert dropped[EVEN] == dropped["balance 0.001"] == "0.0%" != dropped["capacity 1.25"]

    costs = []
    monkeypatch.setattr(experts, "GRID", {"tp_size": 2, "sequence_parallel": True})
    monkeypatch.setattr(experts, "LAYOUTS", {"ep 2": {"ep_size": 2}})
    monkeypatch.setattr(experts, "layout_columns", costs.extend)
    experts.main(["layouts", "--rounds", "2"], TINY)
    for cost in costs:
        assert 1e6 * cost.sent["ep_etp"] == pytest.approx(rows_bytes(rank_tokens=16), rel=0.2)
        assert cost.sent["edp"] == 0 < cost.sent["tp"] and cost.peak > 0

    monkeypatch.setattr(experts, "SHAPES", {"small": (8, 32, 32, 16, 2)})
    experts.main(["grouped", "--rounds", "2"], TINY)
    *_, (name, rows_each, together, _, loop, *_) = rows_of(capsys)
    assert (name, rows_each) == ("small", "4") and float(together) > 0 and float(loop) > 0
