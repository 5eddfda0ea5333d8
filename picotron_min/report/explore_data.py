"""Tables of the page that explore.py writes: layouts of up to 16 ranks, by the trainer's formulas.

    refusals              "pp 4 zb_v", "tp 8": what the check of a config says of these alone
    placed                how a weight is cut, where its gradient is summed, what a rank updates
    plans                 "3B0>1": at slot 3 the backward of micro-batch 0, its result goes to 1
    states                planner/memory.py: of parameters, and what is whole for a moment
    activations, moments  planner/memory.py: at the fullest, and what of that is of one moment
    summed, moved         planner/traffic.py: gradients and weights; activations
    rings                 which pieces of a sequence a rank has

A layout joins a row of states with one of activations: a table of all layouts would be ten times as
large. Many layouts have the same rows, so a table holds numbers of rows in a `pool`.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import product

from picotron_min.context_parallel import contiguous_positions, zigzag_positions
from picotron_min.extensions.schedules.registry import SCHEDULES, plan_on_paper
from picotron_min.extensions.schedules.simulator import Timeline
from picotron_min.extensions.settings import Layout, ModelConfig, Workload
from picotron_min.pipeline_schedule import SENDS, Plan
from picotron_min.placement import placements
from picotron_min.planner.choices import Request, rule_problems
from picotron_min.planner.memory import (
    Moment,
    moments_of,
    parameter_bytes,
    shares_of_ranks,
    travelling,
)
from picotron_min.planner.parameters import Share
from picotron_min.planner.traffic import planned_traffic
from picotron_min.runtime.hardware import GPUS
from picotron_min.runtime.public_models import find_preset

SIZES, MOST_RANKS = (1, 2, 4, 8), 16
MODELS = {
    name: Request(find_preset(name), gpu, 1, work, 1, name)
    for name, gpu, work in (
        ("tiny", GPUS["H100"], Workload(256, 8, 1, "float32")),
        ("Llama-3.1-8B", GPUS["H100"], Workload(8192, 1, 1, "bfloat16")),
    )
}
ZERO = ("none", "optimizer", "gradients", "parameters")  # stages 0 to 3


def page_data() -> dict[str, object]:
    data = {"axes": Layout().grids[0].axes, "sizes": SIZES, "most": MOST_RANKS}
    data |= {"capacity": MODELS["Llama-3.1-8B"].budget}
    data |= {"schedules": {engine: schedule(engine) for engine in SCHEDULES}, "rings": rings()}
    return data | {"models": {name: model(of) for name, of in MODELS.items()}}


def layout_of(engine: str, pp: int, **others: object) -> Layout:
    return Layout(pp=pp, pp_engine=engine, pp_chunks=SCHEDULES[engine].chunks, **others)


def schedule(engine: str) -> dict[str, object]:
    of, plans = SCHEDULES[engine], {}
    for pp, m in product(SIZES, repeat=2):
        _, actions, timeline = plan_on_paper(engine, pp, m)
        rows = [_row(rank, plan, timeline) for rank, plan in enumerate(actions)]
        plans[f"{pp} {m}"] = [rows, timeline.bubble(0)]
    slots = {"F": 1, "B": 2 - of.splits_backward, "W": 1}
    return {"about": of.about, "chunks": of.chunks, "slots": slots, "plans": plans}


def _row(rank: int, plan: Plan, timeline: Timeline) -> str:
    """Small letters are of a rank's second chunk."""
    peers, words = {action[:3]: action.peer for action in plan}, []
    for _, action, start, _ in (span for span in timeline.spans if span.rank == rank):
        letter = action.kind.value.lower() if action.chunk else action.kind.value
        peer = peers.get((SENDS.get(action.kind), *action[1:3]))
        to = "" if peer is None else f">{peer}"
        words.append(f"{start:g}{letter}{action.micro_batch}{to}")
    return " ".join(words)


def rings() -> dict[str, list]:
    """By ranks and cut: the pieces of a sequence that each rank has."""
    cuts = {"zigzag": (zigzag_positions, 2), "in order": (contiguous_positions, 1)}
    return {
        f"{n} {cut}": [positions(rank, n, each * n).tolist() for rank in range(n)]
        for n, (cut, (positions, each)) in product(SIZES[1:], cuts.items())
    }


def model(of: Request) -> dict[str, object]:
    work, shapes = of.work, of.model_config.parameter_shapes()
    about = (
        f"{sum(map(math.prod, shapes.values())):,} parameters, {work.dtype}, "
        f"{work.micro_batch_size} x {work.seq_length} tokens a micro-batch"
    )
    found = {"about": about, "layers": of.model_config.num_layers, "placed": placed(shapes)}
    found["shapes"] = {short: shapes[full] for short, full in weights_of(shapes).items()}
    return found | costs(of)


def weights_of(names: Iterable[str]) -> dict[str, str]:
    """Full names by short ones: of the first layer, and of both ends."""
    return {n.split(".")[-2]: n for n in names if ".layers." not in n or ".layers.0." in n}


def placed(shapes: dict[str, tuple[int, ...]]) -> dict[str, dict[str, list]]:
    """By sequence parallelism, and by whether anything is sharded, which all stages do alike."""
    found = {}
    for sp, zero in product((False, True), repeat=2):
        layout = Layout(dp=2, tp=2, sequence_parallel=sp, sharding=ZERO[zero])
        table, rows = placements(shapes, layout, tied=False), {}
        for short, full in weights_of(shapes).items():
            cuts, owned = ([c[:2] for c in some] for some in (table[full].cuts, table[full].owned))
            rows[short] = [cuts, *table[full].sums, owned]
        found[f"{sp:d} {zero:d}"] = rows
    return found


def refusals(of: Request) -> dict[str, str]:
    """A layout fits if its pipeline alone and its tensor parallelism alone fit."""
    tried = {f"pp {pp} {e}": layout_of(e, pp) for e, pp in product(SCHEDULES, SIZES)}
    tried |= {f"tp {tp}": Layout(tp=tp) for tp in SIZES}
    problems = {key: rule_problems(of, layout, of.work) for key, layout in tried.items()}
    return {key: found[0] for key, found in problems.items() if found}


def costs(of: Request) -> dict[str, object]:
    """What a layout needs of memory and sends: of the first rank of each stage, which has most."""
    config, work, bad = of.model_config, of.work, refusals(of)
    found, pool = defaultdict(lambda: defaultdict(dict)), {}

    def add(table: str, key: str, rows: Iterable) -> None:  # of the engine below
        rows = (tuple(int(n) if n == int(n) else n for n in row) for row in rows)
        found[table][engine][key] = [pool.setdefault(row, len(pool)) for row in rows]

    for engine, pp, tp, n in product(SCHEDULES, SIZES, SIZES, (*SIZES, MOST_RANKS)):
        if pp * tp * n > MOST_RANKS or {f"pp {pp} {engine}", f"tp {tp}"} & bad.keys():
            continue
        for sp in (False, True) if tp > 1 else (False,):
            layout = layout_of(engine, pp, cp=n, tp=tp, sequence_parallel=sp)
            shares = shares_of_ranks(config, layout, work.seq_length)
            for m in SIZES if n < MOST_RANKS else ():  # cp goes to 8
                given = config, layout, replace(work, num_micro_batches=m), "cuda"
                ranks = [moments_of(rank, share, *given) for rank, share in enumerate(shares)]
                add("activations", f"{pp} {m} {n} {tp} {sp:d}", ([r[0][1]] for r in ranks))
            if n < MOST_RANKS:  # the same for any m
                add("moments", f"{pp} {n} {tp} {sp:d}", map(_of_a_moment, ranks))
            if engine != "1f1b" and layout.pp_chunks == 1:  # it has its layers where 1f1b has them
                continue
            stages = [[[layers.start, layers.stop] for layers in share.stages] for share in shares]
            found["stages"][engine][pp] = stages
            firsts = range(0, layout.world_size, n * tp)
            sent = [planned_traffic(config, layout, work, rank) for rank in firsts]
            rows = ([axes.get(axis, 0) for axis in ("pp", "cp", "tp")] for axes in sent)
            add("moved", f"{pp} {n} {tp} {sp:d}", rows)
            # Of dp and cp only the product matters here.
            for zero, sharding in enumerate(ZERO if n > 1 else ZERO[:1]):
                sharded = replace(layout, dp=n, cp=1, sharding=sharding)
                shares = shares_of_ranks(config, sharded, work.seq_length)
                key = f"{pp} {n} {tp} {zero}"
                add("states", key, (_of_parameters(share, sharded, work) for share in shares))
                add("summed", f"{key} {sp:d}", _summed(config, work, sharded))
    return found | {"pool": [*pool], "refusals": bad}


def _of_a_moment(moments: list[Moment]) -> list[float]:
    """[freed by a layer, more activations in its backward than at a loss, bytes of a loss]."""
    layer, *losses = moments
    return [layer.freed] + [n for m in losses for n in (layer.activations - m.activations, m.loss)]


def _of_parameters(share: Share, layout: Layout, work: Workload) -> list[float]:
    """[weights, gradients, optimizer, gathered weights, buffers, and the last two at a loss].

    What is gathered or in a buffer of a layer's backward is whole for a moment, from ZeRO 2 on.
    """
    at_loss = travelling(share, layout, work, None)
    gathered, buffers = travelling(share, layout, work, math.inf)
    whole = gathered, buffers - share.has_head * at_loss[1], *at_loss
    return [*parameter_bytes(share, layout, work).values(), *whole]


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
