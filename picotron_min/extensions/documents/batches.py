"""Batches of rows that know where documents end.

    stream       t h e   c a t E a   d o g E r a i n E        S = 8
    a row       [t h e _ c a t E]a
    positions    0 1 2 3 4 5 6 7      from 0 in each document
    targets      h e _ c a t E .      none for the end of a document

A document that a row cuts begins again at position 0 in the next row. The rows themselves are those
of a run without `document_mask`, and so is their order.
"""

from dataclasses import KW_ONLY, dataclass

import numpy as np
import torch

from picotron_min.data import Batch, Batches
from picotron_min.extensions.documents.rectangles import Documents
from picotron_min.loss import IGNORE_INDEX


@dataclass(eq=False)
class DocumentBatches(Batches):
    _: KW_ONLY
    ends: np.ndarray  # int64, [documents]: where in the stream each one ends, its E included

    def _read(self, starts: list[int] | np.ndarray) -> Batch:
        batch, rows = super()._read(starts), [self._lengths(start) for start in starts]
        positions = torch.from_numpy(_positions(rows))  # [B, S + 1]
        batch.targets[positions[:, self.positions + 1] == 0] = IGNORE_INDEX  # another's first token
        for lengths in rows:
            lengths[-1] -= 1  # the row itself has S tokens
        documents = Documents(tuple(tuple(row[row > 0].tolist()) for row in rows))
        return batch._replace(positions=positions[:, self.positions], extra=(documents,))

    def _lengths(self, start: int) -> np.ndarray:
        """Of the documents, or parts of them, in the S + 1 tokens from `start` on."""
        stop = start + self.seq_length + 1
        first, last = np.searchsorted(self.ends, (start + 1, stop))
        return np.diff(self.ends[first:last], prepend=start, append=stop)

    def attended(self, step: int, cp: int) -> tuple[float, float]:
        """Of a step: the length of rows whose attention costs as much, and a ring's imbalance.

        The imbalance is the work of the busiest of `cp` ranks to the mean, over micro-batches. Both
        follow from the lengths in the global batch, which every rank knows: no message.
        """
        rows = [self._lengths(start) for start in self._starts(step, range(self.global_batch))]
        seen = _positions(rows)[:, :-1] + 1  # keys of each query
        pieces = seen.reshape(-1, self.micro_batch_size, 2 * cp, self.seq_length // (2 * cp))
        pieces = pieces.sum((1, 3))  # [micro-batches of all ranks, pieces]: zigzag has two a rank
        ranks = (pieces + pieces[:, ::-1])[:, :cp]
        return 2 * seen.mean() - 1, (ranks.max(1) / ranks.mean(1)).mean()


def _positions(rows: list[np.ndarray]) -> np.ndarray:
    """[rows, tokens]: from 0 in each document."""
    begins = [np.repeat(np.cumsum(lengths) - lengths, lengths) for lengths in rows]
    return np.arange(len(begins[0])) - np.stack(begins)
