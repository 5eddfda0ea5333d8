"""Design 1: a pipeline schedule. There is no single right answer: marks are given by measurement.

`design 1` writes exercises/design_1.py to begin with and, once it is there, measures it, as a check
does: in a process of its own (sandbox.py).
"""

from exercises.exercise import FOLDER
from exercises.sandbox import Sandbox

TASK = '''\
"""Design 1: a schedule for 4 ranks and 8 micro-batches.

Marks by the bubble: at most 27.3% (as of 1F1B), 20%, 15.8%. At most 4.0 micro-batches' activations
may be alive on any rank; with two chunks, one in a chunk counts half. Chunk c of rank r is stage
r + 4 c. A backward takes twice as long as a forward.
"""

CHUNKS = 1  # of a rank: 1 or 2


def schedule(rank: int, ranks: int, num_micro_batches: int, chunks: int) -> list[str]:
    """What a rank does, in order: "F0", "B0"; "F0.1", "B0.1" of its second chunk."""
    forwards = [f"F{i}" for i in range(num_micro_batches)]
    backwards = [f"B{i}" for i in range(num_micro_batches)]
    return forwards + backwards
'''


def design(number: int) -> int:
    """A task without a single right answer: three marks by measurement."""
    if number != 1:
        raise ValueError(f"there is no design {number}: use 1")
    path = FOLDER / "design_1.py"
    if not path.exists():
        path.write_text(TASK)
        print(f"Read {path}, change it, then: python -m exercises design 1")
        return 0
    verdict = Sandbox().check("design", path)
    print(*filter(None, (verdict.picture, verdict.message)), sep="\n")
    return int(not verdict.passed)
