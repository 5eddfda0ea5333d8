"""Which rank sends how much to which: a step's bytes, by axis and by pair of ranks.

Bytes are algorithmic, as in collectives.py: those of the ring form. So the picture shows who has to
be near whom, whatever the backend does in fact:

    all-reduce, all-gather, reduce-scatter, shift    to the next rank of the axis
    all-to-all, exchange                             to all others of the axis alike
    send                                             to the ranks of the neighbouring stages

An exchange depends on where tokens find their experts: here the ranks share it out evenly.
"""

from collections import Counter
from itertools import product

from picotron_min.extensions.schedules.registry import build_plans
from picotron_min.extensions.settings import Layout
from picotron_min.runtime.run_log import Ranks

# The coordinates that vary along an axis; see mesh.py. Experts have a grid of their own.
GRID, EXPERT_GRID = ("pp", "dp", "cp", "tp"), ("pp", "edp", "ep", "etp")
VARY = {axis: (axis,) for axis in (*GRID, *EXPERT_GRID)}
VARY |= {"dp_cp": ("dp", "cp"), "dp_cp_tp": ("dp", "cp", "tp"), "world": GRID}
VARY |= {"ep_etp": ("ep", "etp"), "cp_tp": ("cp", "tp"), "ends": ("pp",)}


def ranks_of_axis(layout: Layout, axis: str, rank: int) -> list[int]:
    """The row of ranks along an axis that has this rank in it, as in mesh.build_axes."""
    names = GRID if set(VARY[axis]) <= set(GRID) else EXPERT_GRID
    sizes = layout.axis_sizes
    stride, place, row = layout.world_size, rank, [0]
    for name in names:
        stride //= sizes[name]
        here, place = divmod(place, stride)
        choices = range(sizes[name]) if name in VARY[axis] else [here]
        row = [start + stride * choice for start, choice in product(row, choices)]
    if axis == "ends":  # the first and the last stage
        ends = sorted({row[0], row[-1]})
        row = ends if rank in ends else [rank]
    return row


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
