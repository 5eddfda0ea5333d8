"""Tables of the page that explore.py writes: layouts of up to 16 ranks, by the trainer's formulas.

    refusals              "pp 4 zb_v", "tp 8": what the check of a config says of these alone
    placed                how a weight is cut, where its gradient is summed, what a rank updates
    plans                 "3B0>1": at slot 3 the backward of micro-batch 0, its result goes to 1
    states, travelling    planner/memory.py: of parameters, and what is whole for a moment
    activations, moments  planner/memory.py: at the fullest, and what of that is of one moment
    summed, moved         planner/traffic.py: gradients and weights; activations
    rings                 the causal triangle in pieces, by rank and hop

A layout joins a row of states with one of activations: a table of all layouts would be ten times as
large. Many layouts have the same rows, so a table holds numbers of rows in a `pool`.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import product

from picotron_min.context_parallel import contiguous_positions, zigzag_positions
from picotron_min.extensions.documents.rectangles import rectangles
from picotron_min.extensions.schedules.registry import SCHEDULES, plan_on_paper
from picotron_min.extensions.schedules.simulator import Timeline
from picotron_min.extensions.settings import Layout, ModelConfig, Workload
from picotron_min.pipeline_schedule import SENDS, Plan
from picotron_min.placement import placements
from picotron_min.planner.memory import (
    Moment,
    moments_of,
    parameter_bytes,
    shares_of_ranks,
    travelling,
)
from picotron_min.planner.parameters import Share, layers_of_ranks
from picotron_min.planner.traffic import planned_traffic
from picotron_min.runtime.config import Config
from picotron_min.runtime.config_checks import problems_of
from picotron_min.runtime.public_models import find_preset

SIZES, MOST_RANKS = (1, 2, 4, 8), 16
WORKLOADS = {
    "tiny": (Workload(256, 8, 1, "float32"), "cpu"),
    "Llama-3.1-8B": (Workload(8192, 1, 1, "bfloat16"), "cuda"),
}
ZERO = ("none", "optimizer", "gradients", "parameters")  # stages 0 to 3
ALIKE = ("1f1b", "interleaved", "zb_v")  # afab and zb_h1 have their layers where 1f1b has them
TABLES = ("stages", "states", "travelling", "activations", "moments", "moved", "summed")
PIECE = 8  # tokens of a piece in the picture of a ring


def layout_of(engine: str, pp: int, **others: object) -> Layout:
    return Layout(pp=pp, pp_engine=engine, pp_chunks=SCHEDULES[engine].chunks, **others)


def problems(name: str, layout: Layout) -> list[str]:
    """What the check of a config says of a layout: whole sentences, with the remedy."""
    work, device = WORKLOADS[name]
    distributed = {f"{axis}_size": size for axis, size in layout.sizes._asdict().items()}
    for setting in ("pp_engine", "pp_chunks", "sequence_parallel", "sharding"):
        distributed[setting] = getattr(layout, setting)
    config = {"distributed": distributed | {"use_cpu": device == "cpu"}}
    sizes = {"seq_length": work.seq_length, "micro_batch_size": work.micro_batch_size}
    config |= {"training": sizes, "model": {"name": name, "dtype": work.dtype}}
    return [*problems_of(Config.model_validate(config))]


def refusals(name: str) -> dict[str, str]:
    """A layout fits if its pipeline alone and its tensor parallelism alone fit."""
    tried = {f"pp {pp} {e}": layout_of(e, pp) for e, pp in product(SCHEDULES, SIZES)}
    tried |= {f"tp {tp}": Layout(tp=tp) for tp in SIZES}
    return {key: found[0] for key, layout in tried.items() if (found := problems(name, layout))}


def weights_of(name: str) -> dict[str, str]:
    """Full names by short ones: of the first layer, and of both ends."""
    names = find_preset(name).parameter_shapes()
    return {n.split(".")[-2]: n for n in names if ".layers." not in n or ".layers.0." in n}


def placed(name: str) -> dict[str, dict[str, list]]:
    """By sequence parallelism, and by whether anything is sharded, which all stages do alike."""
    shapes, found = find_preset(name).parameter_shapes(), {}
    for sp, zero in product((False, True), repeat=2):
        layout = Layout(dp=2, tp=2, sequence_parallel=sp, sharding=ZERO[zero])
        rows = found[f"{sp:d} {zero:d}"] = {}
        for short, full in weights_of(name).items():
            of = placements(shapes, layout, tied=False)[full]
            cuts, owned = ([cut[:2] for cut in some] for some in (of.cuts, of.owned))
            rows[short] = [cuts, *of.sums, owned]
    return found


def schedules() -> dict[str, dict]:
    found = {}
    for engine, of in SCHEDULES.items():
        plans, cut = {}, of.splits_backward
        for pp, m in product(SIZES, repeat=2):
            sizes, actions, timeline = plan_on_paper(engine, pp, m)
            rows = [_row(rank, plan, timeline) for rank, plan in enumerate(actions)]
            live = [of.live_activations(rank, *sizes) for rank in range(pp)]
            plans[f"{pp} {m}"] = [rows, live, timeline.bubble(0)]
        found[engine] = {"about": of.about, "chunks": of.chunks, "plans": plans}
        found[engine]["slots"] = {"F": 1, "B": 2 - cut, "W": 1}
    return found


def _row(rank: int, plan: Plan, timeline: Timeline) -> str:
    """Small letters are of a rank's second chunk."""
    peers, words = {action[:3]: action.peer for action in plan}, []
    for _, action, start, _ in (span for span in timeline.spans if span.rank == rank):
        letter = action.kind.value.lower() if action.chunk else action.kind.value
        peer = peers.get((SENDS.get(action.kind), *action[1:3]))
        to = "" if peer is None else f">{peer}"
        words.append(f"{start:g}{letter}{action.micro_batch}{to}")
    return " ".join(words)


def costs(name: str) -> dict[str, object]:
    """What a layout needs of memory and sends: of the first rank of each stage, which has most."""
    config, (work, device), bad = find_preset(name), WORKLOADS[name], refusals(name)
    found, pool = {table: {} for table in TABLES}, {}

    def add(table: str, key: str, rows: Iterable) -> None:  # of the engine below
        rows = (tuple(int(n) if n == int(n) else n for n in row) for row in rows)
        found[table].setdefault(engine, {})[key] = [pool.setdefault(row, len(pool)) for row in rows]

    for engine, pp, tp, n in product(SCHEDULES, SIZES, SIZES, (*SIZES, MOST_RANKS)):
        if pp * tp * n > MOST_RANKS or {f"pp {pp} {engine}", f"tp {tp}"} & bad.keys():
            continue
        for sp in (False, True) if tp > 1 else (False,):
            layout = layout_of(engine, pp, cp=n, tp=tp, sequence_parallel=sp)
            for m in SIZES if n < MOST_RANKS else ():  # cp goes to 8
                shares = enumerate(shares_of_ranks(config, layout, work.seq_length))
                of = config, layout, replace(work, num_micro_batches=m), device
                ranks = [moments_of(rank, share, *of) for rank, share in shares]
                add("activations", f"{pp} {m} {n} {tp} {sp:d}", ([r[0][1]] for r in ranks))
            if n < MOST_RANKS:  # the same for any m
                add("moments", f"{pp} {n} {tp} {sp:d}", map(_of_a_moment, ranks))
            if engine not in ALIKE:
                continue
            ranks = layers_of_ranks(config, layout, work.seq_length)
            found["stages"][f"{engine} {pp}"] = [[[s.start, s.stop] for s in r] for r in ranks]
            firsts = range(0, layout.world_size, n * tp)
            sent = [planned_traffic(config, layout, work, rank) for rank in firsts]
            rows = ([of.get(axis, 0) for axis in ("pp", "cp", "tp")] for of in sent)
            add("moved", f"{pp} {n} {tp} {sp:d}", rows)
            # Of dp and cp only the product matters here.
            for zero, sharding in enumerate(ZERO if n > 1 else ZERO[:1]):
                sharded = replace(layout, dp=n, cp=1, sharding=sharding)
                shares = shares_of_ranks(config, sharded, work.seq_length)
                key = f"{pp} {n} {tp} {zero}"
                states = (parameter_bytes(share, sharded, work).values() for share in shares)
                add("states", key, states)
                if zero > 1:
                    rows = (_travelling(share, sharded, work) for share in shares)
                    add("travelling", key, rows)
                add("summed", f"{key} {sp:d}", _summed(config, work, sharded))
    return found | {"pool": [*pool], "refusals": bad}


def _of_a_moment(moments: list[Moment]) -> list[float]:
    """[freed by a layer, more activations in its backward than at a loss, bytes of a loss]."""
    layer, *losses = moments
    return [layer.freed] + [n for m in losses for n in (layer.activations - m.activations, m.loss)]


def _travelling(share: Share, layout: Layout, work: Workload) -> list[float]:
    """[gathered weights, buffers] of a layer's backward without lm_head, and those at a loss."""
    at_loss = travelling(share, layout, work, None)
    gathered, buffers = travelling(share, layout, work, math.inf)
    return [gathered, buffers - share.has_head * at_loss[1], *at_loss]


def _summed(config: ModelConfig, work: Workload, layout: Layout) -> Iterator[list[int]]:
    """Bytes of dp_cp: those sent once a step, and those of each micro-batch; bytes of dp_cp_tp.

    One row a stage; or of each of its tp ranks, where these differ: 257 rows are 129 + 128.
    """
    twice, each = replace(work, num_micro_batches=2), layout.dp * layout.tp
    places = layout.tp if config.vocab_size % layout.tp else 1
    for pp, place in product(range(layout.pp), range(places)):
        one, two = (planned_traffic(config, layout, w, pp * each + place) for w in (work, twice))
        a, b = one.get("dp_cp", 0), two.get("dp_cp", 0)
        yield [2 * a - b, b - a, one.get("dp_cp_tp", 0)]


def rings() -> dict[str, list]:
    """By ranks and cut: the rectangles of [rank][hop]."""
    found = {}
    for n in SIZES[1:]:
        S = 2 * n * PIECE
        cuts = {"zigzag": (zigzag_positions, [S]), "in order": (contiguous_positions, [S])}
        cuts["documents"] = zigzag_positions, [S * part // 16 for part in (5, 2, 9)]
        for cut, (positions, lengths) in cuts.items():
            starts = [positions(rank, n, S)[::PIECE].tolist() for rank in range(n)]
            found[f"{n} {cut}"] = [
                [[*_drawn(lengths, starts[rank], starts[rank - hop])] for hop in range(n)]
                for rank in range(n)
            ]
    return found


def _drawn(lengths: list[int], queries: list[int], keys: list[int]) -> Iterator[list]:
    """[first query, first key, queries, keys, is it a causal half] of each rectangle."""
    for rows, columns, is_causal in rectangles(lengths, queries, keys, PIECE):
        q = queries[rows.start // PIECE] + rows.start % PIECE
        k = keys[columns.start // PIECE] + columns.start % PIECE
        yield [q, k, rows.stop - rows.start, columns.stop - columns.start, int(is_causal)]
