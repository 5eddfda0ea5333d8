"""Batches of rows that know where documents end: README.md shows one.

The rows, and their order, are those of a run without `document_mask`. So a document that a row cuts
begins again at position 0 in another row.
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
    ends: np.ndarray  # int64, [documents]: the place in the stream just after each one's E

    def _read(self, starts: list[int] | np.ndarray) -> Batch:
        batch = super()._read(starts)
        rows = [self._lengths(start, self.seq_length + 1) for start in starts]
        begins = [np.repeat(np.cumsum(lengths) - lengths, lengths) for lengths in rows]
        in_document = torch.arange(self.seq_length + 1) - torch.from_numpy(np.stack(begins))
        begins_another = in_document[:, self.positions + 1] == 0  # the next token does
        batch.targets[begins_another] = IGNORE_INDEX
        rows = (self._lengths(start, self.seq_length).tolist() for start in starts)
        documents = Documents(tuple(map(tuple, rows)))
        return batch._replace(positions=in_document[:, self.positions], extra=(documents,))

    def _lengths(self, start: int, tokens: int) -> np.ndarray:
        """Of the documents, or parts of them, in so many tokens from `start` on."""
        first, last = np.searchsorted(self.ends, (start + 1, start + tokens))
        return np.diff(self.ends[first:last], prepend=start, append=start + tokens)

    def _rows(self, step: int) -> list[np.ndarray]:
        starts = self._starts(step, range(self.global_batch))
        return [self._lengths(start, self.seq_length) for start in starts]

    def attended_length(self, step: int) -> float:
        """The length of rows whose attention costs as much as the global batch's documents do."""
        lengths = np.concatenate(self._rows(step)).astype(float)
        return (lengths**2).sum() / lengths.sum()

    def ring_imbalance(self, step: int, size: int) -> float:
        """Work of a ring's busiest rank to the mean, averaged over the step's micro-batches.

        It follows from the lengths, which every rank knows: no message.
        """
        rows = [np.concatenate([np.arange(n) + 1 for n in row]) for row in self._rows(step)]
        keys = np.stack(rows)  # that each query sees
        width = self.seq_length // (2 * size)
        pieces = keys.reshape(-1, self.micro_batch_size, 2 * size, width).sum((1, 3))
        ranks = (pieces + pieces[:, ::-1])[:, :size]  # zigzag: piece r and 2 size - 1 - r
        return (ranks.max(1) / ranks.mean(1)).mean()
