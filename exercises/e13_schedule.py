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


def cases(dice: Dice) -> list[Case]:
    # Fewer micro-batches than ranks, as many, and more.
    sizes = [(p, m) for p in (4, 1, 2, 3, 6) for m in (8, 1, 3, 5, dice.randint(9, 16))]
    return [Case(1, stages=p, micro_batches=m) for p, m in sizes]


def on_rank(rank, case: Case) -> dict:
    # On paper: the check needs no ranks.
    p, m, simulator = case.stages, case.micro_batches, rank.course.simulator
    plans = [rank.course.pipeline_schedule.one_f_one_b(r, p, m) for r in range(p)]
    results = {"plans": [[str(action) for action in plan] for plan in plans]}
    timeline = simulator.simulate(plans)  # which refuses plans that cannot run to their end
    results["drawing"] = rank.course.draw.draw(timeline)
    results["bubble of each rank"] = [timeline.bubble(r) for r in range(p)]
    return results | {"most micro-batches alive": [*map(simulator.peak_live, plans)]}


def expected(case: Case) -> list[dict]:
    # By the formulas of the sheet: a plan that is as short, with as few alive, is right.
    p, m = case.stages, case.micro_batches
    results = {"bubble of each rank": [(p - 1) / (m + p - 1)] * p}
    results["most micro-batches alive"] = [min(m, p - rank) for rank in range(p)]
    return [results]


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
warmup_too_short: The warm-up is one forward too short: some rank behind has nothing to do while
    this one waits for a gradient.
    ranks - rank - 1 => max(0, ranks - rank - 2)
"""
