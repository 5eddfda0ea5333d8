"""Which rank sends to which, as the report draws it."""

from collections import Counter
from typing import get_args

from picotron_min.extensions.settings import Layout
from picotron_min.planner.links import ranks_of_axis
from picotron_min.report.rank_traffic import traffic_between
from picotron_min.runtime.metrics import AxisName, Rank, Ranks, Sent
from tests.core.test_collectives import rows_by_hand


def test_rows_of_ranks_are_those_of_the_mesh():
    for layout in (Layout(2, 2, 1, 2), Layout(1, 2, 2, 2, ep=4, etp=2), Layout(4, 1, 2, 1, ep=2)):
        rows = rows_by_hand(layout)
        assert rows.keys() == {*get_args(AxisName)}
        for axis, of_ranks in rows.items():
            for rank, members in enumerate(of_ranks):
                assert ranks_of_axis(layout, axis, rank) == members


def traffic(layout: Layout, *sent: tuple[int, str, str, int]) -> Counter[tuple[int, int]]:
    """Of ranks that have sent so many bytes over an axis by a collective."""
    ranks = [Rank(memory_gb=0, sent={}) for _ in range(layout.world_size)]
    for rank, axis, collective, number in sent:
        ranks[rank].sent.setdefault(axis, {})[collective] = Sent(calls=1, bytes=number)
    return traffic_between(layout, Ranks(step=1, ranks=ranks))


def test_a_ring_sends_to_the_next_and_an_all_to_all_to_all_others():
    layout = Layout(dp=2, tp=4)  # ranks 0 1 2 3 and 4 5 6 7
    for name in ("all_reduce", "all_gather", "reduce_scatter", "shift"):
        assert traffic(layout, (7, "tp", name, 90)) == {(7, 4): 90}
    for name in ("all_to_all", "exchange"):
        assert traffic(layout, (5, "tp", name, 90)) == {(5, 4): 30, (5, 6): 30, (5, 7): 30}
    both = traffic(layout, (1, "dp", "all_reduce", 10), (1, "world", "all_reduce", 5))
    assert both == {(1, 5): 10, (1, 2): 5}


def test_stages_send_activations_on_and_gradients_back():
    layout = Layout(pp=4, tp=2)  # ranks 0 2 4 6 are a pipeline
    sent = [(rank, "pp", "send", 60) for rank in (0, 2, 4, 6)]
    assert traffic(layout, *sent) == {
        (0, 2): 60,
        **{(2, 0): 30, (2, 4): 30},
        **{(4, 2): 30, (4, 6): 30},
        (6, 4): 60,
    }
    # With two chunks a rank, the last sends back to the first: 1 of its 3 messages, the others are
    # gradients of both its chunks.
    layout = Layout(pp=4, pp_engine="interleaved", pp_chunks=2)
    assert traffic(layout, (3, "pp", "send", 60)) == {(3, 0): 20, (3, 2): 40}
    assert traffic(layout, (0, "pp", "send", 60)) == {(0, 1): 40, (0, 3): 20}
