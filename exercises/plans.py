"""Plans of a student's schedule, played by the course's simulator: for exercises 14, 17, 27."""

from exercises.ranks import Rank
from exercises.world import Deadlock
from picotron_min.extensions.schedules.simulator import Timeline
from picotron_min.pipeline_schedule import Plan


def played(rank: Rank, plans: list[Plan]) -> tuple[Timeline | None, str]:
    """The timeline, or None and what is wrong with the plans; Deadlock has the circle of ranks."""
    try:
        return rank.course.simulator.simulate(plans), ""
    except ValueError as error:
        if "deadlock" in str(error):
            raise Deadlock(str(error).removeprefix("deadlock, ")) from None
        return None, str(error)
