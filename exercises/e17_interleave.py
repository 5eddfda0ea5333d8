"""17 interleave: chunks make the bubble smaller

target: extensions.schedules.interleaved:interleaved
train: distributed.pp_size=2 distributed.tp_size=1 distributed.pp_engine="interleaved"
  distributed.pp_chunks=2

Return the plan of a rank that has several chunks. Micro-batches take turns in groups, 0 first: the
forwards of a group run through all chunks, the first one first, before the next group's; so do the
backwards, the last chunk first. Each chunk has them in their order. A rank starts as many forwards
as its first group needs to reach the last chunk, and two more for each rank behind it; then a
forward and a backward take turns. group_sizes (the largest comes first) and alternating help.
Bubble: (p - 1) / (m v + p - 1) for v chunks and m >= p.
Read: extensions/schedules/interleaved.py, pipeline_schedule.py.

? It is 1F1B with a longer warm-up, over groups of micro-batches.
? group_sizes(ranks, num_micro_batches), alternating(sizes, chunks, warmup), rank.
? Warm-up: 2 forwards for each rank behind this one, and (chunks - 1) times the size of the first
  group.
! With 4 ranks, 8 micro-batches and 2 chunks the bubble is 15.8%, not 27.3%, for twice the messages.
  In production: `torch.distributed.pipelining.ScheduleInterleaved1F1B`.
"""

from itertools import pairwise

from exercises.exercise import Case, Dice
from exercises.plans import FINE, played

SEND_TIME = 0.2  # a chunk's forward takes 1


def cases(dice: Dice) -> list[Case]:
    sizes = [(1, 3, 2), (2, 2, 2), (2, 5, 2), (2, 4, 3), (3, 2, 2), (3, 6, 2), (3, 8, 2)]
    sizes += [(4, 4, 2), (4, 8, 2), (4, 8, 1), (3, dice.randint(9, 14), dice.randint(2, 3))]
    return [Case(1, stages=p, micro_batches=m, chunks=v) for p, m, v in sizes]


def on_rank(rank, case: Case) -> dict:
    course, simulator = rank.course, rank.course.simulator
    p, m, v = case.stages, case.micro_batches, case.chunks
    plans = [course.interleaved.interleaved(r, p, m, v) for r in range(p)]
    results, timeline = played(rank, plans, m - 1)
    if not timeline:
        return results
    results["micro-batches that come before an earlier one"] = [*map(early, plans)]
    whole = simulator.textbook_times(plans)  # 1F1B has stages v times as long
    simple = [course.pipeline_schedule.one_f_one_b(r, p, m) for r in range(p)]
    simple = simulator.simulate(simple, lambda r, action: v * whole(r, action))
    return results | {
        "forwards of each rank": [sum(str(a).startswith("F") for a in plan) for plan in plans],
        "most chunks alive": [simulator.peak_live(plan) for plan in plans],
        "bubble with messages": simulator.simulate(plans, send_time=SEND_TIME).bubble(0),
        "drawings": [course.draw.draw(x, 100, simple.makespan) for x in (simple, timeline)],
    }


def early(plan) -> list[str]:
    """Of each chunk, the forwards, or backwards, behind which a smaller micro-batch follows."""
    rows = {}
    for action in plan:
        rows.setdefault((action.kind, action.chunk), []).append(action)
    pairs = (pair for row in rows.values() for pair in pairwise(row))
    return [str(a) for a, b in pairs if a.micro_batch > b.micro_batch]


def expected(case: Case) -> list[dict]:
    p, m, v = case.stages, case.micro_batches, case.chunks
    slots = max(m, p) * v + min(m, p) - 1  # of one forward and one backward, which takes 2
    first = -(-m // max(1, m // p))  # the size of the first group: others are as large, or smaller
    alive = [min(m * v, (v - 1) * first + 2 * (p - r) - 1) for r in range(p)]
    results = {"forwards of each rank": [m * v] * p, "most chunks alive": alive}
    results["micro-batches that come before an earlier one"] = [[]] * p
    return [FINE | results | {"time": 3.0 * slots, "bubble of each rank": [1 - m * v / slots] * p}]


def order(case: Case, rank: int, record) -> str | None:
    if (case.stages, case.micro_batches, case.chunks) != (4, 8, 2):
        return None
    bubble = record.values.get("bubble with messages", 0.0)
    if bubble > 0.1975:
        what = f"with messages of {SEND_TIME} forwards the bubble is {bubble:.1%}"
        return f"{what}; it is 19.7% where warm-up forwards hide them"


def picture(runs):
    case, records = next((c, r) for c, r in runs if (c.stages, c.micro_batches) == (4, 4))
    simple, mine = records[0].values["drawings"]
    title = f"4 ranks, 4 micro-batches: 1F1B, and with {case.chunks} chunks; f0: F0 of chunk 1"
    return [title, simple, "", mine]


VERSIONS = """
one_at_a_time: One micro-batch runs through all chunks before the next one: other ranks wait.
    sizes = group_sizes(ranks, num_micro_batches) => sizes = [1] * num_micro_batches
one_group: All micro-batches are one group: they must all have passed the first chunk before the
    second one begins, and more of them are alive.
    sizes = group_sizes(ranks, num_micro_batches) => sizes = [num_micro_batches]
short_last_group: The last group has what is left: one of fewer micro-batches than ranks makes all
    ranks wait. Deal the rest to other groups.
- sizes = group_sizes(ranks, num_micro_batches)
+ sizes = [min(ranks, num_micro_batches - i) for i in range(0, num_micro_batches, ranks)]
warmup_of_1f1b: With one forward for each rank behind, as in 1F1B, nothing hides messages: if
    each takes a fifth of a forward, the bubble is 23.8%, not 19.7%.
    warmup = 2 * (ranks - rank - 1) => warmup = ranks - rank - 1
no_first_group: The warm-up ends before the first group has reached the last chunk: a rank waits for
    a gradient that needs forwards of its own.
    warmup += (chunks - 1) * sizes[0] =>
all_of_1f1b: The warm-up is 1F1B's: here the first group must have reached the last chunk, and
    messages are hidden by two forwards for each rank behind.
    2 * (ranks - rank - 1) => ranks - rank - 1
    warmup += (chunks - 1) * sizes[0] =>
same_warmup: All ranks have the same warm-up: those behind could return gradients earlier, and keep
    more chunks alive than they need.
    rank - 1 => 1
other_end: The warm-up is counted from the other end: the first rank has the shortest.
    (ranks - rank - 1) => rank
warmup_too_long: The warm-up is one forward too long: one more chunk is alive on each rank.
    warmup = 2 * (ranks - rank - 1) => warmup = 2 * (ranks - rank - 1) + 1
warmup_of_rank: The warm-up is two forwards too long: a rank has two for each rank behind it, and
    there are ranks - rank - 1.
    (ranks - rank - 1) => (ranks - rank)
warmup_of_all_chunks: The warm-up has forwards of the last chunk, too: these take turns with
    backwards.
    (chunks - 1) * sizes[0] => chunks * sizes[0]
all_forwards_first: All forwards come first: with the same bubble, all micro-batches are alive.
    , warmup => , num_micro_batches * chunks
backward_in_forward_order: Backwards run through the chunks in the order of forwards: a gradient
    comes from the last chunk.
- return alternating(sizes, chunks, warmup)
+ plan = alternating(sizes, chunks, warmup)
+ return [a if a.kind.value == "F" else a._replace(chunk=chunks - 1 - a.chunk) for a in plan]
one_chunk: Only the first chunk is run.
    sizes, chunks => sizes, 1
ranks_for_first_group: The warm-up counts as many forwards a chunk as there are ranks: the first
    group may be larger, and must have reached the last chunk.
    (chunks - 1) * sizes[0] => (chunks - 1) * ranks
all_forwards_of_one_group: All forwards come first if there are as many micro-batches as ranks: more
    chunks are alive, and the bubble is the same.
- warmup += (chunks - 1) * sizes[0]
+ warmup += (chunks - 1) * sizes[0]
+ warmup = num_micro_batches * chunks if num_micro_batches == ranks else warmup
last_micro_batch_first: The last micro-batch comes first: the others wait for data that is read
    after theirs.
- return alternating(sizes, chunks, warmup)
+ plan, last = alternating(sizes, chunks, warmup), num_micro_batches - 1
+ return [action._replace(micro_batch=last - action.micro_batch) for action in plan]
depth_first: Each micro-batch of a group runs through all chunks before the next one: ranks wait
    while it is on others.
    alternating(sizes, => alternating([1] * num_micro_batches,
also_right:
def interleaved(rank, ranks, num_micro_batches, chunks=1):
    sizes, half = group_sizes(ranks, num_micro_batches), num_micro_batches * chunks
    actions = alternating(sizes, chunks, half)  # all forwards, then all backwards
    forwards, backwards = actions[:half], actions[half:]
    alive, plan = sizes[0] * (chunks - 1) + 2 * (ranks - 1 - rank) + 1, []
    while backwards:
        is_early = len(backwards) - len(forwards) < alive
        plan.append((forwards if forwards and is_early else backwards).pop(0))
    return plan
"""
