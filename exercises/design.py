"""Design 1: a pipeline schedule. There is no single right answer: marks are given by measurement.

`design 1` writes exercises/design_1.py to begin with and, once it is there, measures it, as a check
does: in a process of its own (sandbox.py).
"""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from exercises.exercise import FOLDER
from exercises.sandbox import Sandbox
from picotron_min.extensions.schedules.simulator import peak_live, simulate
from picotron_min.pipeline_schedule import Action, Kind
from picotron_min.runtime.draw import draw

RANKS, MICRO_BATCHES, MOST_CHUNKS, MOST_ALIVE = 4, 8, 2, 4.0
BUBBLES = (0.273, 0.20, 0.158)  # of one mark, two, three
TASK = '''\
"""Design 1: a schedule for 4 ranks and 8 micro-batches.

Marks by the bubble: at most 27.3% (as of 1F1B), 20%, 15.8%. At most 4.0 micro-batches' activations
may be alive on any rank; with two chunks, one in a chunk counts half. Chunk c of rank r is stage
r + 4 c. A backward takes twice as long as a forward. Bonus, for another schedule, which may have
5.5 alive and then has no marks: with messages of a fifth of a chunk's forward, at most 19.7%.
"""

CHUNKS = 1  # of a rank: 1 or 2


def schedule(rank: int, ranks: int, num_micro_batches: int, chunks: int) -> list[str]:
    """What a rank does, in order: "F0", "B0"; "F0.1", "B0.1" of its second chunk."""
    forwards = [f"F{i}" for i in range(num_micro_batches)]
    backwards = [f"B{i}" for i in range(num_micro_batches)]
    return forwards + backwards
'''


class Marks(NamedTuple):
    marks: int  # 0 to 3
    text: str
    picture: str = ""


def design(number: int) -> int:
    """A task without a single right answer: three marks by measurement."""
    if number != 1:
        raise ValueError(f"there is no design {number}: use 1")
    path = FOLDER / "design_1.py"
    if not path.exists():
        path.write_text(TASK)
        print(f"Read {path}, change it, then: python -m exercises design 1")
        return 0
    marks, text, picture = measure(path, Sandbox())
    print(*filter(None, (picture, text)), f"{marks} of 3 marks", sep="\n")
    return 0 if marks else 1


def measure(path: Path, sandbox: Sandbox) -> Marks:
    verdict = sandbox.check("design", path)
    marks = {f"marks_{n}": n for n in range(4)}.get(verdict.mistake, 0)
    return Marks(marks, verdict.message, verdict.picture)


def measure_schedule(schedule: Callable[..., list[str]], chunks: int) -> Marks:
    """Marks for a schedule function; whatever it raises is not caught here."""
    if chunks not in range(1, MOST_CHUNKS + 1):
        return Marks(0, f"CHUNKS = {chunks}: use 1 or {MOST_CHUNKS}")
    sizes = RANKS, MICRO_BATCHES, chunks
    try:
        plans = [[parse_action(text) for text in schedule(r, *sizes)] for r in range(RANKS)]
        if max(a.chunk for plan in plans for a in plan) >= chunks:
            raise ValueError(f"CHUNKS = {chunks}, but the plan has chunks beyond them")
        timeline = simulate(plans)
    except ValueError as error:
        return Marks(0, str(error))
    bubble, late = timeline.bubble(0), simulate(plans, send_time=0.2).bubble(0)
    alive = max(map(peak_live, plans)) / chunks
    lines = [f"bubble {bubble:.1%}, at most {alive:g} micro-batches alive on a rank"]
    lines.append(f"with messages of a fifth of a chunk's forward: bubble {late:.1%}")
    if alive <= 5.5 and late <= 0.1974 and chunks > 1:
        lines.append("bonus: these messages are hidden")
    marks = sum(bubble <= limit + 5e-4 for limit in BUBBLES) if alive <= MOST_ALIVE else 0
    if alive > MOST_ALIVE:
        lines.append(f"no marks for the bubble: more than {MOST_ALIVE} alive")
    elif marks < 3:
        lines.append(f"the next mark: a bubble of at most {BUBBLES[marks]:.1%}")
    else:
        lines.append("best known: 15.8%, interleaved with one warm-up forward, not two, for each")
        lines.append("rank behind. Our `interleaved` needs 5.5 alive, and hides messages for it.")
    return Marks(marks, "\n".join(lines), draw(timeline))


def parse_action(text: str) -> Action:
    """F0.1 as an Action; ValueError for all else."""
    number, _, chunk = str(text)[1:].partition(".")
    if text[:1] not in ("F", "B") or not number.isdecimal() or not (chunk or "0").isdecimal():
        raise ValueError(f"{text!r} is no action: use F0, B0, F0.1, B0.1")
    return Action(Kind(text[0]), int(number), int(chunk or 0))
