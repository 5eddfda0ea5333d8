"""18 zigzag: an early and a late piece for every rank

target: context_parallel:zigzag_positions
train: distributed.cp_size=2 distributed.tp_size=1

Return where in the sequence the tokens of a rank are, int64 [S/n]. Cut the positions 0 .. S-1 into
2n equal pieces. Every rank gets an early and a late one, so that all have the same work in causal
attention: rank 0 the first and the last, rank 1 the second and the last but one, ... The early
piece comes first; within a piece positions rise. With one rank nothing is cut: return arange(S),
also if 2 does not divide S.
Read: context_parallel.py.

? Two of 2n pieces: one counted from the front, one counted from the back.
? torch.arange(seq_length), Tensor.tensor_split(2 * size), torch.cat.
? Of the list of pieces take number `rank`, and number `rank` of the reversed list. Python counts
  from the back with -1, -2, ...: number 0 from the back is -1.
! Cut in order over 4 ranks, the busiest one has 1.75 times the mean; zigzag, 1.00 times. In
  production: `context_parallel` of torch.distributed.tensor.experimental.
"""

import torch

from exercises.exercise import Case, Dice


def cases(dice: Dice) -> list[Case]:
    # More than one position a piece, of random length.
    some = [Case(1, cp=n, length=2 * n * dice.randint(2, 4)) for n in (2, 3, 4)]
    return [*some, Case(1, cp=4, length=16), Case(1, cp=1, length=7)]


def on_rank(rank, case: Case) -> dict:
    zigzag = rank.course.context_parallel.zigzag_positions
    parts = [zigzag(r, case.cp, case.length) for r in range(case.cp)]
    results = {"positions, by rank": parts}
    # What zigzag is for: equal work for all.
    results["pairs of query and key, by rank"] = [int(x.sum()) + len(x) for x in parts]
    return results | {"dtype": str(parts[0].dtype)}


def expected(case: Case) -> list[dict]:
    # Deal the positions one by one: each looks up which piece it is in, and whose that is.
    ranks, length = [[] for _ in range(case.cp)], case.length
    for position in range(length):
        piece = position * 2 * case.cp // length
        ranks[min(piece, 2 * case.cp - 1 - piece)].append(position)
    results = {"positions, by rank": [torch.tensor(mine) for mine in ranks]}
    results["pairs of query and key, by rank"] = [sum(p + 1 for p in mine) for mine in ranks]
    return [results | {"dtype": "torch.int64"}]


MISTAKES = """
in_order: The sequence is cut in order: the last rank has nearly twice the mean work.
    [rank], pieces[-1 - rank] => [2 * rank], pieces[2 * rank + 1]
strided: Every n-th position belongs to a rank. The work is about equal, but the ring's halves are
    no longer all before or all after another rank's.
    torch.cat((pieces[rank], pieces[-1 - rank])) => torch.arange(seq_length)[rank::size]
late_off_by_one: The late piece is off by one: -rank is 0 on rank 0, which gets the first piece
    twice, and the last piece belongs to rank 1.
    pieces[-1 - rank] => pieces[-rank]
late_same_direction: The late pieces are dealt in the same direction as the early ones: rank 0 has
    the earlier of both, and less work than the last rank.
    pieces[-1 - rank] => pieces[size + rank]
late_first: The late piece comes before the early one: the ring takes the first half of a rank's
    tokens for the early ones.
    [rank], pieces[-1 - rank] => [-1 - rank], pieces[rank]
within_own_part: Each rank counts from 0: these are places in its own part, not in the sequence.
    torch.cat((pieces[rank], pieces[-1 - rank])) => torch.arange(seq_length // size)
"""
