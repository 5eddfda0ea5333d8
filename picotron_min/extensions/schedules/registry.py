"""Registry: all schedules by name, the core's and this folder's."""

from picotron_min import pipeline_messages, pipeline_schedule
from picotron_min.extensions.schedules import zero_bubble
from picotron_min.extensions.schedules.interleaved import group_sizes, interleaved
from picotron_min.extensions.schedules.simulator import Timeline, simulate
from picotron_min.pipeline_schedule import Plan, Schedule

SCHEDULES = pipeline_schedule.SCHEDULES | {
    "interleaved": Schedule(
        interleaved,
        lambda rank, p, m, v: min(m * v, (v - 1) * group_sizes(p, m)[0] + 2 * (p - rank) - 1),
        about="1f1b over chunks: bubble (p-1) / (mv + p-1) for m >= p, live activations"
        " (v-1) g + 2 (p - rank) - 1 in groups of g = p, more where p does not divide m",
        chunks=2,
    ),
    "zb_h1": Schedule(
        zero_bubble.zb_h1,
        lambda rank, p, m, v: min(m, p),
        about="1f1b with backward cut in two: bubble (p-1) / (3m + p-1) for m >= p, live"
        " activations min(m, p) on every rank",
        bubble=zero_bubble.bubble,
        fixed_chunks=True,
        splits_backward=True,
    ),
    "zb_v": Schedule(
        zero_bubble.zb_v,
        lambda rank, p, m, v: min(2 * m, 2 * p, m + 1 + rank),
        about="zb_h1 over two chunks in a V: bubble (p-1) / (6m + p-1) for m >= 2p - 1, live"
        " activations 2p, as much as 1f1b's first rank has",
        bubble=zero_bubble.bubble,
        place=zero_bubble.vee,
        chunks=2,
        fixed_chunks=True,
        splits_backward=True,
    ),
}


def chunks_problem(engine: str, chunks: int) -> str | None:
    """Why a schedule cannot have `chunks` chunks a rank; None if it can."""
    fitting = [name for name, s in SCHEDULES.items() if not s.fixed_chunks or s.chunks == chunks]
    if engine in fitting:
        return None
    own, others = SCHEDULES[engine].chunks, " or ".join(fitting)
    has = f"{own} chunk{'s' * (own > 1)}"
    return f"{engine} has {has} a rank, not {chunks}: use {own}, or engine {others}"


def build_plans(
    engine: str, ranks: int, num_micro_batches: int, chunks: int = 1, training: bool = True
) -> list[Plan]:
    """The plans of a schedule by its name; ValueError if it cannot have `chunks` a rank."""
    if problem := chunks_problem(engine, chunks):
        raise ValueError(problem)
    return pipeline_messages.build_plans(
        SCHEDULES[engine], ranks, num_micro_batches, chunks, training
    )


def plan_on_paper(
    engine: str, ranks: int, num_micro_batches: int, chunks: int = 0
) -> tuple[tuple[int, int, int], list[Plan], Timeline]:
    """A schedule's sizes, plans and timeline; `chunks` 0: its usual ones. ValueError for sizes."""
    sizes = p, m, v = ranks, num_micro_batches, chunks or SCHEDULES[engine].chunks
    if min(sizes) < 1 or p * m * v > 20_000:  # which would take minutes
        made = f"{p} ranks x {m} micro-batches x {v} chunks"
        raise ValueError(f"{made}: draw at least one of each, and at most 20000 in all")
    plans = build_plans(engine, *sizes)
    return sizes, plans, simulate(plans, place=SCHEDULES[engine].place)
