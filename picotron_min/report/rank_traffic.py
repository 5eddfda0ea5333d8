"""Traffic between ranks: the bytes of a step, by sender and receiver.

Bytes are of the ring form, as in collectives.py. So the picture shows which ranks have to be
near each other, whatever the backend really does:

    all-reduce, all-gather, reduce-scatter, shift    to the next rank of the axis
    all-to-all, exchange                             to all others of the axis alike
    send                                             to the ranks of the neighbouring stages

An exchange depends on where tokens find their experts: here it is spread evenly over the ranks.
"""

from collections import Counter

from picotron_min.extensions.schedules.registry import build_plans
from picotron_min.extensions.settings import Layout
from picotron_min.planner.links import ranks_of_axis
from picotron_min.runtime.metrics import Ranks


def traffic_between(layout: Layout, measured: Ranks) -> Counter[tuple[int, int]]:
    """Bytes of a step, by sender and receiver."""
    traffic, neighbours = Counter(), _sends_by_peer(layout)
    for rank, of_rank in enumerate(measured.ranks):
        for axis, collectives in of_rank.sent.items():
            row = ranks_of_axis(layout, axis, rank)
            place = row.index(rank)
            for name, sent in collectives.items():
                if name == "send":
                    shares = neighbours[place]
                elif name in ("all_to_all", "exchange"):
                    shares = {peer: 1 for peer in range(len(row)) if peer != place}
                else:
                    shares = {(place + 1) % len(row): 1}
                for peer, share in shares.items():
                    traffic[rank, row[peer]] += sent.bytes * share / sum(shares.values())
    return traffic


def _sends_by_peer(layout: Layout) -> list[Counter[int]]:
    """How many messages, all of one size, a micro-batch makes each pipeline rank send to which."""
    plans = build_plans(layout.pp_engine, layout.pp, 1, layout.pp_chunks)
    return [Counter(a.peer for a in plan if a.kind.value.startswith("send ")) for plan in plans]
