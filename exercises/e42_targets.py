"""42 targets: each depth predicts one token further, also where sequences are cut zigzag

target: extensions.multi_token.targets:look_ahead
train: model.num_nextn_predict_layers=2 distributed.cp_size=2

Replace `batches.batch`, in place, by a function that returns a DepthBatch. It has all that the
batch has except for its targets, one int64 tensor [1 + depths, B, S/cp]: the batch's own,
[B, S/cp], and behind them, for each depth j from 1 to `depths`, the token j + 1 places behind each
position. In these, IGNORE_INDEX replaces every token at or behind the first of `ends` that is
behind the position, or at or behind `batches.cut`, where held-out text begins. Both are places in
the stream; without held-out text the cut is the stream's end, as is the last of `ends`. Rows of a
micro-batch begin at `batches._starts(step, batches._places(micro_batch))`; this rank's places in a
row are `batches.positions`, while `batch.positions` may begin anew in each document.
Read: targets.py of extensions/multi_token, data.py.

? The stream is on every rank. Which of its places does a rank need for its positions and a depth?
? batches.tokens[start : stop], batches.positions, np.searchsorted(ends, places, side="right").
? Read S + 1 + depths tokens of each row, up to the cut; take columns positions + 1 + j; put
  IGNORE_INDEX where 1 + j reaches the next end.
! Data that is a function of the position needs 0 messages: Megatron-LM rolls tokens, targets and
  masks by 1 for each depth, and exchanges the borders of both pieces between ranks.
"""

from bisect import bisect_right

import numpy as np
import torch

from exercises.compare import described
from exercises.exercise import Case, Dice

IGNORED = -100
FIRST = 100  # token of the stream, in which they count up


def cases(dice: Dice) -> list[Case]:
    found = [Case(n, size=n, depths=d, held_out=h) for n, d, h in ((2, 2, 1), (3, 1, 1), (1, 3, 0))]
    for case in found:
        case.width = dice.randint(3, 4)
        last = 8 * case.size * case.width  # before the cut: a document that ends there hides it
        case.every = dice.choice([n for n in range(5, 10) if last % n and (last + 1) % n])
    return found


def stream(case: Case) -> tuple[int, int, list[int]]:
    """S, where the text to train on ends, and where documents end."""
    S = 2 * case.size * case.width
    cut = 4 * S + 1  # the last of four rows ends there; behind it, one row is held out
    N = cut + case.held_out * (S + 1)
    return S, cut, [*range(case.every, N, case.every), N]


def on_rank(rank, case: Case) -> dict:
    S, _, ends = stream(case)
    positions = rank.course.context_parallel.zigzag_positions(rank.number, case.size, S)
    options = {"seq_length": S, "seed": 0, "micro_batch_size": 2, "num_micro_batches": 2}
    options |= {"dp_rank": 0, "dp_size": 1, "positions": positions, "eval_batches": case.held_out}
    tokens = np.arange(FIRST, FIRST + ends[-1], dtype=np.uint16)  # as in files

    class InDocuments(rank.course.data.Batches):  # positions begin anew in documents and in rows
        def batch(self, *place):
            batch = super().batch(*place)
            places = batch.tokens - FIRST
            positions = torch.minimum(places % case.every, places % S)
            return batch._replace(positions=positions, extra=("documents",))

    batches, others = InDocuments(tokens, **options), InDocuments(tokens, **options)
    rank.course.targets.look_ahead(batches, case.depths, np.array(ends))
    rows = {"targets of other Batches": described(others.batch(0, 0).targets)}
    for step, when in enumerate(("", " in the next step")):
        both = [batches.batch(step, micro_batch) for micro_batch in (0, 1)]
        own = [others.batch(step, micro_batch).tokens for micro_batch in (0, 1)]
        rows[f"own tokens{when}"] = all(map(torch.equal, own, [x.tokens for x in both]))
        order = torch.cat([batch.tokens[:, 0] for batch in both]).argsort()
        targets = torch.cat([batch.targets for batch in both], -2)[..., order, :]
        rows |= {f"depth {j}{when}": of_depth.tolist() for j, of_depth in enumerate(targets)}
    rows |= {"batch.targets": described(both[0].targets), "batch.extra": both[0].extra}
    rows["batch.num_targets"] = both[0].num_targets.item()
    for key in ("tokens", "positions"):
        rows[f"batch.{key}"] = torch.cat([getattr(batch, key) for batch in both])[order].tolist()
    return rows | {"eval_batch": batches.eval_batch(0, 0).targets.tolist() if case.held_out else []}


def expected(case: Case) -> list[dict]:
    (S, cut, ends), results = stream(case), []

    def target(place: int, depth: int) -> int:
        limit = min(cut, ends[bisect_right(ends, place)]) if depth else ends[-1]
        return FIRST + place + 1 + depth if place + 1 + depth < limit else IGNORED

    for r in range(case.size):
        pieces = r * case.width, (2 * case.size - 1 - r) * case.width
        mine = [first + i for first in pieces for i in range(case.width)]
        rows = {"batch.targets": described(torch.empty(case.depths + 1, 2, len(mine)).long())}
        rows["targets of other Batches"] = described(torch.empty(2, len(mine)).long())
        rows |= {"batch.num_targets": 2 * len(mine), "batch.extra": ("documents",)}
        for j in range(case.depths + 1):
            rows[f"depth {j}"] = [[target(i * S + p, j) for p in mine] for i in range(4)]
            rows[f"depth {j} in the next step"] = rows[f"depth {j}"]
        rows |= {"own tokens": True, "own tokens in the next step": True}
        rows["batch.tokens"] = [[FIRST + i * S + p for p in mine] for i in range(4)]
        rows["batch.positions"] = [
            [min(p, (i * S + p) % case.every) for p in mine] for i in range(4)
        ]
        # Of held-out rows, the second only fills.
        held_out = [FIRST + cut + 1 + p for p in mine], [IGNORED] * len(mine)
        results.append(rows | {"eval_batch": list(held_out) if case.held_out else []})
    return results


def picture(runs):
    case, records = runs[0]
    about = f"targets in the first row, whose documents end every {case.every} tokens; . is none"
    yield from [about, ""]
    for rank, record in enumerate(records):
        for depth in (f"depth {j}" for j in range(case.depths + 1)):
            first = record.values[depth][0]
            row = (str(target) if target != IGNORED else "." for target in first)
            yield f"rank {rank}  {depth}" + "".join(f"{target:>4}" for target in row)


VERSIONS = """
rolled: It shifts the targets within a rank's part: behind a piece comes another, not what follows.
    rows[:, batches.positions + ahead] => np.roll(next_token.targets, 1 - ahead, 1)
rolled_and_ignored: It shifts the targets within a rank's part, and ignores the last of each row:
    the stream has these tokens.
- tokens = np.where(ahead < left, rows[:, batches.positions + ahead], IGNORE_INDEX)
+ tokens = np.roll(next_token.targets, 1 - ahead, 1)
+ tokens[:, 1 - ahead :] = IGNORE_INDEX
+ tokens = np.where((ahead < left) & (places + ahead < cut), tokens, IGNORE_INDEX)
batch_positions: The batch's positions are taken for places in its rows: they begin anew in each
    document, and tokens of other places are read.
    batches.positions.numpy() => next_token.positions.numpy()
    rows[:, batches.positions + ahead] => rows[[[0], [1]], next_token.positions + ahead]
positions_of_rows: The batch gets positions in its rows: its own may begin anew in each document.
    _replace(targets => _replace(positions=batches.positions, targets
row_only: Tokens behind the end of a row are ignored, although the stream goes on there.
    min(start + len(row), cut) => min(start + S + 1, cut)
one_short: Depth 1 predicts what depth 0 does: each depth is one token short.
    range(2, depths + 2) => range(1, depths + 1)
held_out: It trains on tokens behind the cut, on which the run is validated.
    min(start + len(row), cut) => start + len(row)
across: It predicts tokens behind an end, which belong to another document.
    ahead < left => left > 0
at_it_only: The token at the next end is ignored, and those behind it are predicted.
    ahead < left => ahead != left
first_of_document: The first position of a document takes its own place for its next end.
    side="right" => side="left"
end_of_row: The next end is looked up for the start of a row: each position has its own.
    places, side="right")] => starts, side="right")][:, None]
next_token_too: Targets of depth 0 are ignored at the ends of documents, too: they are the batch's.
    [next_token.targets] => []
    range(2, => range(1,
not_a_depth_batch: A plain Batch counts the targets of all depths: a loss is a mean over depth 0's.
    DepthBatch(* => Batch(*
at_the_end: The token at the next end is predicted, too: it begins another document.
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
