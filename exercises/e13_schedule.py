"""13 schedule: backward early, so that few micro-batches are alive

target: pipeline_schedule:one_f_one_b
train: distributed.pp_size=2 distributed.tp_size=1

Return the plan of a rank: all its forwards and backwards, in an order in which forwards and
backwards take turns as soon as there are gradients. Of p ranks the last one begins with F0 B0 F1 B1
...; a rank before it starts some forwards earlier, its warm-up. `alternating` makes such a plan.
The bubble is AFAB's, (p - 1) / (m + p - 1), but at most p - rank micro-batches alive, not all m.
`chunks` is 1 here, and is passed on to `alternating`: other schedules have several stages a rank.
Read: pipeline_schedule.py.

? How many forwards must a rank start before the gradient of its first one can be back?
? alternating([num_micro_batches], chunks, warmup=...), with rank and ranks.
? One forward for each rank behind this one, so that all of them have something to do.
! With 4 ranks and 8 micro-batches: a bubble of 27.3%, and at most 4 micro-batches alive, not 8. In
  production: `torch.distributed.pipelining.Schedule1F1B`.
"""

from exercises.exercise import Case, Dice
from exercises.plans import FINE, played


def cases(dice: Dice) -> list[Case]:
    sizes = [(p, m) for p in (4, 1, 2, 3, 6) for m in (8, 1, 2, 3, 4, 5, 12, dice.randint(13, 20))]
    return [Case(1, stages=p, micro_batches=m) for p, m in sizes]


def on_rank(rank, case: Case) -> dict:
    p, m = case.stages, case.micro_batches
    plans = [rank.course.pipeline_schedule.one_f_one_b(r, p, m) for r in range(p)]
    results, timeline = played(rank, plans, m - 1)
    if timeline:
        results["most micro-batches alive"] = [*map(rank.course.simulator.peak_live, plans)]
    return results


def expected(case: Case) -> list[dict]:
    p, m = case.stages, case.micro_batches
    results = FINE | {"bubble of each rank": [(p - 1) / (m + p - 1)] * p}
    results["most micro-batches alive"] = [min(m, p - rank) for rank in range(p)]
    return [results | {"time": 3.0 * (m + p - 1)}]  # F takes 1 and B takes 2


MISTAKES = """
warmup_too_long: The warm-up is one forward too long: each rank keeps one more micro-batch alive,
    and is not done any sooner.
    rank - 1 => rank
same_warmup: All ranks have the same warm-up. The last one could return its first gradient at once,
    and all others wait for it: with 4 ranks and 8 micro-batches the bubble is 65%.
    rank - 1 => 1
no_warmup: No rank has a warm-up: each waits for the gradient of a micro-batch before it starts the
    next. With 4 ranks and 8 micro-batches the bubble is 75%.
    ranks - rank - 1 => 0
other_end: The warm-up is counted from the other end: the first rank has none, and the last one
    waits for forwards that the first one does only after its gradient.
    ranks - rank - 1 => rank
all_forwards_first: All forwards come first. The bubble is the same, but all micro-batches are
    alive: with 4 ranks and 8 micro-batches 8, not 4.
    ranks - rank - 1 => num_micro_batches
twice_the_warmup: The warm-up is twice as long as needed, as with interleaved stages: one forward
    for each rank behind is enough.
    ranks - rank - 1 => 2 * (ranks - rank - 1)
warmup_too_short: The warm-up is one forward too short: some rank behind has nothing to do while
    this one waits for a gradient.
    ranks - rank - 1 => max(0, ranks - rank - 2)
no_minimum: Where there are fewer micro-batches than ranks behind, the warm-up has forwards of
    others, which do not exist.
- return alternating([num_micro_batches], chunks, warmup=ranks - rank - 1)
+ F, B, m, w = Kind.FORWARD, Kind.BACKWARD, num_micro_batches, ranks - rank - 1
+ turns = [Action(kind, i - w * (kind is B)) for i in range(w, m) for kind in (F, B)]
+ return [*(Action(F, i) for i in range(w)), *turns, *(Action(B, i) for i in range(m - w, m))]
newest_first: A backward follows the forward of the same micro-batch, and the warm-up's come
    last: the newest gradient is not there yet.
- return alternating([num_micro_batches], chunks, warmup=ranks - rank - 1)
+ m, w = num_micro_batches, min(num_micro_batches, ranks - rank - 1)
+ plan = alternating([m], chunks, w)
+ new = [a._replace(micro_batch=(a.micro_batch + w) % m) for a in plan]
+ return [b if a.kind is Kind.BACKWARD else a for a, b in zip(plan, new, strict=True)]
stack: Backwards take the newest micro-batch first, as from a stack: its gradient comes last, and
    the rank waits for it.
- return alternating([num_micro_batches], chunks, warmup=ranks - rank - 1)
+ plan, alive = alternating([num_micro_batches], chunks, ranks - rank - 1), []
+ for i, a in enumerate(plan):
+     alive += [a.micro_batch] * (a.kind is Kind.FORWARD)
+     plan[i] = a if a.kind is Kind.FORWARD else a._replace(micro_batch=alive.pop())
+ return plan
no_cool_down: There is no cool-down: as many backwards as the warm-up has forwards are missing.
- return alternating([num_micro_batches], chunks, warmup=ranks - rank - 1)
+ m, w = num_micro_batches, min(num_micro_batches, ranks - rank - 1)
+ return alternating([m], chunks, w)[: 2 * m - w]
as_many_as_micro_batches: The warm-up is counted from the micro-batches: it depends on the ranks
    behind, however many micro-batches follow.
    ranks - rank - 1 => max(0, num_micro_batches - rank - 1)
warmup_not_cut: Where there are fewer micro-batches than ranks behind, the warm-up has forwards of
    micro-batches that do not exist; the backwards are right.
- return alternating([num_micro_batches], chunks, warmup=ranks - rank - 1)
+ plan, w = alternating([num_micro_batches], chunks, ranks - rank - 1), ranks - rank - 1
+ return [Action(Kind.FORWARD, i) for i in range(w)] + plan[min(num_micro_batches, w) :]
one_backward_missing: The cool-down begins one backward too late: the first of its gradients is
    never sent on.
- return alternating([num_micro_batches], chunks, warmup=ranks - rank - 1)
+ plan, m = alternating([num_micro_batches], chunks, ranks - rank - 1), num_micro_batches
+ first = Action(Kind.BACKWARD, max(0, m - (ranks - rank - 1)))
+ return [action for action in plan if rank == ranks - 1 or action != first]
groups_of_ranks: Micro-batches come in groups of as many as there are ranks, as with interleaved
    stages: those that are left over are never run.
    [num_micro_batches] => [ranks] * (num_micro_batches // ranks)
cool_down_from_a_stack: The cool-down takes the newest micro-batch first, as from a stack: its
    gradient comes last, and the rank waits for it.
- return alternating([num_micro_batches], chunks, warmup=ranks - rank - 1)
+ plan, w = alternating([num_micro_batches], chunks, ranks - rank - 1), ranks - rank - 1
+ begin = len(plan) - min(num_micro_batches, w)
+ return plan[:begin] + plan[begin:][::-1]
"""
