"""27 zero bubble: weight gradients fill the gaps

target: extensions.schedules.zero_bubble:zb_h1
train: distributed.pp_size=2 distributed.tp_size=1 distributed.pp_engine="zb_h1"

Return the plan of a rank in ZB-H1. Backward is cut in two: B, for which the stage before waits, and
W, for which nothing waits until the end of the step. Forwards and B are in the order of 1F1B. W of
micro-batch i comes directly behind B of micro-batch i + rank, so that a rank saves `rank` of its W
for the end, when it would be idle. `_plan` makes a plan of letters: each F, B or W stands for its
next micro-batch. Memory: at most min(m, p) micro-batches alive on every rank, from F to W.
Read: pipeline_schedule.py, extensions/schedules/zero_bubble.py.

? Start from the letters of 1F1B. Behind which B does a W come? How many are left at the end?
? _plan(letters, num_micro_batches), and strings: 'FBW' * number. `_plan` leaves out letters beyond
  the last micro-batch, so a pattern may be too long.
? p - rank - 1 F as a warm-up. Then `rank` times FB, without W. Then FBW until all B are done. Then
  the W that are left.
! With 4 ranks and 8 micro-batches the bubble is 11.1%, not 27.3%. In production:
  `torch.distributed.pipelining.ScheduleZBVZeroBubble`.
"""

from itertools import pairwise

from exercises.exercise import Case, Dice
from exercises.plans import FINE, drawn, played

ABOVE = "micro-batches alive above min(m, p)"


def cases(dice: Dice) -> list[Case]:
    sizes = [(p, m) for p in (1, 2, 3, 4, 5) for m in (1, 2, 3, 4, 6, 8, dice.randint(9, 14))]
    return [Case(1, stages=p, micro_batches=m) for p, m in sizes]


def on_rank(rank, case: Case) -> dict:
    peak_live = rank.course.simulator.peak_live
    p, m = case.stages, case.micro_batches
    plans = [rank.course.zero_bubble.zb_h1(r, p, m) for r in range(p)]
    results, timeline = played(rank, plans, m - 1)
    if timeline:
        results[ABOVE] = [max(0, peak_live(plan) - min(m, p)) for plan in plans]
    return results | orders(results["plans"])


def orders(plans: list[list[str]]) -> dict[str, list[list[str]]]:
    """Both determine the plan together."""
    found = {"order of F and B": [[x for x in plan if x[0] != "W"] for plan in plans]}
    behind = [[f"{w} behind {x}" for x, w in pairwise(plan) if w[0] == "W"] for plan in plans]
    return found | {"what each W is behind": behind}


def plan_of(r: int, p: int, m: int) -> list[str]:
    plan, started = [], 0
    for i in range(m):
        before = min(m, i + p - r)  # forwards before B of i
        plan += [f"F{k}" for k in range(started, before)] + [f"B{i}"]
        plan += [f"W{i - r}"] * (i >= r)
        started = before
    return plan + [f"W{i}" for i in range(max(0, m - r), m)]


def expected(case: Case) -> list[dict]:
    p, m = case.stages, case.micro_batches
    # Of the first rank: 3 m of its own, and p - 1 forwards there and p - 1 B back to wait for, but
    # p - 1 W fill gaps. Few micro-batches leave gaps for which there is no W.
    time = 3.0 * m + max(p - 1, 2 * p - 1 - m)
    right = orders([plan_of(r, p, m) for r in range(p)])
    return [FINE | right | {"time": time, ABOVE: [0] * p}]


def picture(runs):
    return ["4 ranks, 8 micro-batches: the bubble is 11.1%; of 1F1B, 27.3%", drawn(runs, 4, 8)]


VERSIONS = """
w_at_once: Every W comes directly behind its B: it delays what other ranks wait for, and none is
    left for the gap at the end.
    "FB" * rank + "FBW" * (m - rank) + "W" * rank => "FBW" * m
w_at_the_end: All W come at the end: no rank is idle for longer, but all micro-batches are alive.
    "FB" * rank + "FBW" * (m - rank) + "W" * rank => "FB" * m + "W" * m
saved_on_the_wrong_rank: The first rank saves the most W, and the last one none. The last rank is
    the one that starts late and ends its B early.
- letters += "FB" * rank + "FBW" * (m - rank) + "W" * rank
+ letters += "FB" * (ranks - rank - 1) + "FBW" * (m - ranks + rank + 1) + "W" * (ranks - rank - 1)
same_on_all_ranks: All ranks save p - 1 W: the first one has p - 1 forwards more alive than needed.
- letters += "FB" * rank + "FBW" * (m - rank) + "W" * rank
+ letters += "FB" * (ranks - 1) + "FBW" * (m - ranks + 1) + "W" * (ranks - 1)
one_more_saved: One W more is saved than needed: one more micro-batch is alive.
    rank + "FBW" * (m - rank) + "W" * rank => (rank + 1) + "FBW" * (m - rank - 1) + "W" * (rank + 1)
one_fewer_saved: One W fewer is saved than needed: it delays a B that the rank before waits for.
    rank + "FBW" * (m - rank) + "W" * rank => (rank - 1) + "FBW" * (m - rank + 1) + "W" * (rank - 1)
last_w_missing: The W that were saved are missing: weights get no gradient of these micro-batches.
    (m - rank) + "W" * rank => (m - rank)
no_warmup: There is no warm-up: a rank waits for its first gradient before its second forward.
    "F" * (ranks - rank - 1) => ""
warmup_too_long: The warm-up is one forward too long: one more micro-batch is alive on each rank.
    rank - 1 => rank
also_right:
def zb_h1(rank, ranks, num_micro_batches, chunks=1):
    m, plan, warmup = num_micro_batches, [], ranks - rank - 1
    plan += [Action(Kind.FORWARD, i) for i in range(min(m, warmup))]
    for i in range(m):
        if i + warmup < m:
            plan.append(Action(Kind.FORWARD, i + warmup))
        plan.append(Action(Kind.BACKWARD, i))
        if i >= rank:
            plan.append(Action(Kind.WEIGHT, i - rank))
    return plan + [Action(Kind.WEIGHT, i) for i in range(max(0, m - rank), m)]
"""
