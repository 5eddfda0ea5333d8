"""02 deal: no messages, arithmetic says who trains on what

target: data:Batches._places
train: distributed.dp_size=2 distributed.tp_size=1 training.gradient_accumulation_steps=2

Return the places in the global batch whose sequences this rank takes in a micro-batch, in order, as
a numpy array. The global batch is laid out micro-batch by micro-batch; within one, rank by rank;
each rank has `micro_batch_size` places there.
Read: data.py.

? Consecutive places; how many come before the first of them?
? self.dp_size, self.dp_rank, self.micro_batch_size, np.arange(start, stop).
? Every earlier micro-batch has a block of micro_batch_size places for each of dp_size ranks; in
  this one the blocks of the lower ranks come first. Count the blocks before this rank's: `start` is
  their number times micro_batch_size.
! 0 bytes are sent to agree on a batch. In production: `torch.utils.data.DistributedSampler`.
"""

import numpy as np
import torch

from exercises.exercise import Case, Dice


def cases(dice: Dice) -> list[Case]:
    # More micro-batches than ranks, and fewer: one cannot stand for the other.
    sizes, rows = [(1, 3), (2, 1), (2, 3), (3, 2), (4, 2)], dice.randint(3, 5)
    return [Case(1, dp=dp, micro_batches=m, rows=rows) for dp, m in sizes]


def on_rank(rank, case: Case) -> dict:
    tokens, sizes = np.zeros(1000, dtype=np.uint16), {"seq_length": 4, "dp_size": case.dp}
    sizes |= {"micro_batch_size": case.rows, "num_micro_batches": case.micro_batches}
    places, order = [], np.arange(1000)
    for dp_rank in range(case.dp):
        batches = rank.course.data.Batches(tokens, seed=case.seed, dp_rank=dp_rank, **sizes)
        # Used as `_starts` does: a list cannot be added to, a float is no index.
        parts = [order[0 + batches._places(i)] for i in range(case.micro_batches)]
        places.append(torch.tensor(np.concatenate(parts)))
    return {"places, by dp rank": places}


def expected(case: Case) -> list[dict]:
    dealt = torch.arange(case.micro_batches * case.dp * case.rows)  # as cards, `rows` at a time
    parts = dealt.view(case.micro_batches, case.dp, case.rows).unbind(1)
    return [{"places, by dp rank": [part.flatten() for part in parts]}]


MISTAKES = """
ranks_alike: All ranks read the same sequences: the batch has them dp times, and lacks the others.
    (micro_batch * self.dp_size + self.dp_rank) => micro_batch * self.dp_size
micro_batches_alike: All micro-batches have the same sequences: a step trains on the first's alone.
    (micro_batch * self.dp_size + self.dp_rank) => self.dp_rank
ranks_overlap: Each rank begins one place after the one before it, not micro_batch_size places.
    + self.dp_rank) * self.micro_batch_size => ) * self.micro_batch_size + self.dp_rank
micro_batches_overlap: A micro-batch begins after the places of one rank, not of all dp ranks.
    * self.dp_size + => +
rank_by_rank: Each place is dealt once, but all micro-batches of a rank lie together: the global
    batch is laid out micro-batch by micro-batch, and then rank by rank.
    micro_batch * self.dp_size + self.dp_rank => self.dp_rank * self.num_micro_batches + micro_batch
dealt_like_cards: Places are dealt one by one, but a rank has micro_batch_size of them side by side.
- return np.arange(first, first + self.micro_batch_size)
+ first = micro_batch * self.dp_size * self.micro_batch_size + self.dp_rank
+ return first + self.dp_size * np.arange(self.micro_batch_size)
"""
