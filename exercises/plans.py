"""Plans of a student's schedule, played by the course's simulator: for exercise 13."""

from typing import Any

from exercises.ranks import Rank
from exercises.world import Deadlock
from picotron_min.extensions.schedules.simulator import Timeline
from picotron_min.pipeline_schedule import Plan

PROBLEM = "what is wrong with the plans"
FINE = {PROBLEM: "nothing"}


def played(rank: Rank, plans: list[Plan], last: int) -> tuple[dict[str, Any], Timeline | None]:
    """Results that all schedules have, and the timeline; `last`: the largest micro-batch.

    Deadlock has the circle of ranks.
    """
    results = FINE | {"plans": [[str(action) for action in plan] for plan in plans]}
    for r, action in ((r, action) for r, plan in enumerate(plans) for action in plan):
        if not 0 <= action.micro_batch <= last:  # the simulator would miss the rest
            problem = f"rank {r} has '{action}', but the last micro-batch is {last}"
            return results | {PROBLEM: problem}, None
    # The simulator expects that every rank has something to do.
    if idle := [r for r, plan in enumerate(plans) if not plan]:
        return results | {PROBLEM: f"rank {idle[0]} has nothing to do"}, None
    try:
        timeline = rank.course.simulator.simulate(plans)
    except ValueError as error:
        if "deadlock" in str(error):
            raise Deadlock(str(error).removeprefix("deadlock, ")) from None
        return results | {PROBLEM: str(error)}, None
    results |= {"time": timeline.makespan, "drawing": rank.course.draw.draw(timeline)}
    results["bubble of each rank"] = [timeline.bubble(r) for r in range(len(plans))]
    return results, timeline
