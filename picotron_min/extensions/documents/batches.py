"""Batches of rows that know where documents end: README.md shows one.

The rows, and their order, are as in a run without `document_mask`. So a document that a row cuts
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
        batch, S = super()._read(starts), self.seq_length
        inside = torch.from_numpy(self._inside(starts, S + 1))
        batch.targets[inside[:, self.positions + 1] == 0] = IGNORE_INDEX  # it begins another one
        documents = Documents(tuple(tuple(self._lengths(start, S).tolist()) for start in starts))
        return batch._replace(positions=inside[:, self.positions], extra=(documents,))

    def _lengths(self, start: int, tokens: int) -> np.ndarray:
        """Lengths of the documents, or parts of documents, in `tokens` tokens from `start` on."""
        first, last = np.searchsorted(self.ends, (start + 1, start + tokens))
        return np.diff(self.ends[first:last], prepend=start, append=start + tokens)

    def _inside(self, starts: list[int] | np.ndarray, tokens: int) -> np.ndarray:
        """[rows, tokens]: the place of each token in its document, or in the part in this row."""
        rows = [self._lengths(start, tokens) for start in starts]
        begins = [np.repeat(lengths.cumsum() - lengths, lengths) for lengths in rows]
        return np.arange(tokens) - np.stack(begins)

    def attended_length(self, step: int) -> float:
        """The length of rows whose attention costs as much as the global batch's documents do."""
        starts = self._starts(step, range(self.global_batch))
        lengths = np.concatenate([self._lengths(start, self.seq_length) for start in starts])
        return (lengths.astype(float) ** 2).sum() / lengths.sum()
