"""Targets of depths: every position of a batch knows the tokens that follow it.

    stream      t h e   c a t E ...
    tokens      t h e _                S = 4, D = 2
    targets     h e _ c                of depth 0: the next token
                e _ c a                of depth 1
                _ c a t                of depth 2: rows are read D tokens further

They are read by their place in the stream, and nothing is rolled: so a context-parallel rank needs
no message, however the sequence is cut.
"""

import numpy as np
import torch

from picotron_min.data import Batch, Batches
from picotron_min.loss import IGNORE_INDEX


class DepthBatch(Batch):
    """A batch with targets [1 + D, B, S/cp], depth 0 first."""

    @property
    def num_targets(self) -> torch.Tensor:  # the loss of a step is a mean over these
        return (self.targets[0] != IGNORE_INDEX).sum()


def look_ahead(batches: Batches, depths: int, ends: np.ndarray) -> None:
    """Let batches to train on have the targets of each depth, in place; evaluation needs none.

    A target is ignored from the next of `ends` [documents] on, the places just after each document,
    and in held-out text.
    """
    of_next_token, S, cut = batches.batch, batches.seq_length, batches.cut

    def batch(step: int, micro_batch: int) -> DepthBatch:
        next_token = of_next_token(step, micro_batch)
        starts = np.array(batches._starts(step, batches._places(micro_batch)))
        rows = np.full((len(starts), S + 1 + depths), IGNORE_INDEX)
        for row, start in zip(rows, starts, strict=True):
            known = batches.tokens[start : min(start + len(row), cut)]
            row[: len(known)] = known
        places = starts[:, None] + batches.positions.numpy()  # in the stream, [B, S/cp]
        left = ends[np.searchsorted(ends, places, side="right")] - places  # until the next end
        targets = [next_token.targets]
        for ahead in range(2, depths + 2):
            tokens = np.where(ahead < left, rows[:, batches.positions + ahead], IGNORE_INDEX)
            targets.append(torch.from_numpy(tokens))
        return DepthBatch(*next_token._replace(targets=torch.stack(targets)))

    batches.batch = batch
