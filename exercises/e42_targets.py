"""42 targets: each depth predicts one token further, also where sequences are cut zigzag

target: extensions.multi_token.targets:look_ahead
train: model.num_nextn_predict_layers=2 distributed.cp_size=2

Replace `batches.batch`, in place, by a function that returns a DepthBatch: its targets are those of
the batch, [B, S/cp], and behind them, for each depth j from 1 to `depths`, the token j + 1 places
behind each position, in one tensor [1 + depths, B, S/cp]. IGNORE_INDEX stands for a token at or
behind the position's next one of `ends` (places in the stream, up to its last), or behind
`batches.cut`, where held-out text begins. Rows of a micro-batch begin at
`batches._starts(step, batches._places(micro_batch))`.
Read: targets.py of extensions/multi_token, data.py.

? The stream is on every rank. Which places of it does a rank need for its positions and a depth?
? batches.tokens[start : stop], batches.positions, np.searchsorted(ends, places, side="right").
? Read S + 1 + depths tokens of each row, up to the cut; take columns positions + 1 + j; put
  IGNORE_INDEX where 1 + j reaches the next end.
! Data that is a function of the position needs 0 messages: Megatron-LM rolls tokens, targets and
  masks by 1 for each depth, and exchanges the borders of both pieces between ranks.
"""

from bisect import bisect_right

import numpy as np

from exercises.exercise import Case, Dice

IGNORED = -100


def cases(dice: Dice) -> list[Case]:
    sizes = [(2, 2, dice.randint(3, 5)), (3, 1, dice.randint(3, 5)), (1, 3, 4), (2, 1, 4)]
    return [Case(n, size=n, depths=d, width=w, every=dice.randint(5, 9)) for n, d, w in sizes]


def stream(case: Case) -> tuple[int, int, list[int]]:
    """S, the number of tokens, and where documents end; each token is its own place."""
    S = 2 * case.size * case.width
    N = 4 * S + 2  # the last of three rows ends at the held-out text
    return S, N, [*range(case.every, N, case.every), N]


def on_rank(rank, case: Case) -> dict:
    S, N, ends = stream(case)
    positions = rank.course.context_parallel.zigzag_positions(rank.number, case.size, S)
    options = {"seq_length": S, "seed": 0, "micro_batch_size": 3, "num_micro_batches": 1}
    options |= {"dp_rank": 0, "dp_size": 1, "positions": positions, "eval_batches": 1}
    batches = rank.course.data.Batches(np.arange(N), **options)
    rank.course.targets.look_ahead(batches, case.depths, np.array(ends))
    batch = batches.batch(0, 0)
    order = batch.tokens[:, 0].argsort()
    return {f"depth {j}": targets[order].tolist() for j, targets in enumerate(batch.targets)}


def expected(case: Case) -> list[dict]:
    # Place by place. A tenth of the text is held out, or one row and a token if that is more.
    (S, N, ends), results = stream(case), []
    cut = N - max(N // 10, S + 1)

    def target(place: int, depth: int) -> int:
        limit = min(cut, ends[bisect_right(ends, place)]) if depth else N
        return place + 1 + depth if place + 1 + depth < limit else IGNORED

    for r in range(case.size):
        pieces = r * case.width, (2 * case.size - 1 - r) * case.width
        mine = [first + i for first in pieces for i in range(case.width)]
        rows = {
            j: [[target(start + p, j) for p in mine] for start in (0, S, 2 * S)]
            for j in range(case.depths + 1)
        }
        results.append({f"depth {j}": of_depth for j, of_depth in rows.items()})
    return results


def picture(runs):
    case, records = runs[0]
    about = f"targets in the first row, whose documents end every {case.every} tokens; . is none"
    yield from [about, ""]
    for rank, record in enumerate(records):
        for depth, rows in record.values.items():
            row = (str(target) if target != IGNORED else "." for target in rows[0])
            yield f"rank {rank}  {depth}" + "".join(f"{target:>4}" for target in row)


VERSIONS = """
rolled: It shifts the targets within a rank's part: behind a piece comes another, not what follows.
    rows[:, batches.positions + ahead] => np.roll(next_token.targets, 1 - ahead, 1)
one_short: Depth 1 predicts what depth 0 does: each depth is one token short.
    range(2, depths + 2) => range(1, depths + 1)
held_out: It trains on tokens behind the cut, on which the run is validated.
    min(start + len(row), cut) => start + len(row)
across: It predicts tokens behind an end, as those of another document.
    ahead < left => left > 0
at_the_end: The first token behind an end is at the distance `left`: it is predicted, too.
    ahead < left => ahead <= left
also_right:
- left = ends[np.searchsorted(ends, places, side="right")] - places
+ left = [[ends[ends > place][0] - place for place in row] for row in places.tolist()]
    ahead < left => ahead < np.array(left)
- known = batches.tokens[start : min(start + len(row), cut)]
- row[: len(known)] = known
+ for column, place in enumerate(range(start, min(start + len(row), cut))):
+     row[column] = batches.tokens[place]
"""
