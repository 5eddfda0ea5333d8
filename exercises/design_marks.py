"""Marks for the schedule of design 1, by the simulator of the course's pipelines."""

import re
from collections.abc import Callable

from picotron_min.extensions.schedules.simulator import peak_live, simulate
from picotron_min.pipeline_schedule import Action, Kind
from picotron_min.runtime.draw import draw

RANKS, MICRO_BATCHES, MOST_CHUNKS, MOST_ALIVE = 4, 8, 2, 4.0
Marks = tuple[int, str, str]  # 0 to 3, why, and a picture
BUBBLES = (0.273, 0.20, 0.158)  # of one mark, two, three


def measure_schedule(schedule: Callable[..., list[str]], chunks: int) -> Marks:
    """Marks for a schedule function; whatever it raises is not caught here."""
    if chunks not in range(1, MOST_CHUNKS + 1):
        return 0, f"CHUNKS = {chunks}: use 1 or {MOST_CHUNKS}", ""
    sizes = RANKS, MICRO_BATCHES, chunks
    try:
        plans = [[parse_action(text) for text in schedule(r, *sizes)] for r in range(RANKS)]
        if max(a.chunk for plan in plans for a in plan) >= chunks:
            raise ValueError(f"CHUNKS = {chunks}, but the plan has chunks beyond them")
        timeline = simulate(plans)
    except ValueError as error:
        return 0, str(error), ""
    bubble = timeline.bubble(0)
    # A chunk has 1/chunks of a rank's layers, and of their activations.
    alive = max(map(peak_live, plans)) / chunks
    lines = [f"bubble {bubble:.1%}, at most {alive:g} micro-batches alive on a rank"]
    marks = sum(bubble <= limit + 5e-4 for limit in BUBBLES) if alive <= MOST_ALIVE else 0
    if alive > MOST_ALIVE:
        lines.append(f"no marks for the bubble: more than {MOST_ALIVE} alive")
    elif marks < 3:
        lines.append(f"the next mark: a bubble of at most {BUBBLES[marks]:.1%}")
    else:
        lines += [
            "best known: 15.8%, interleaved with one warm-up forward, not two, for each",
            "rank behind. Our `interleaved` needs 5.5 alive.",
        ]
    return marks, "\n".join(lines), draw(timeline)


def parse_action(text: str) -> Action:
    """F0.1 as an Action; ValueError for all else."""
    found = re.fullmatch(r"([FB])(\d+)(?:\.(\d+))?", str(text))
    if not found:
        raise ValueError(f"{text!r} is no action: use F0, B0, F0.1, B0.1")
    kind, number, chunk = found.groups("0")
    return Action(Kind(kind), int(number), int(chunk))
