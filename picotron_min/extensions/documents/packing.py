"""Best-fit packing: rows of whole documents, where slices of the stream would cut them.

    stream      t h e _ c a t E d o g E r a i n E|f o x E     |: from here on held out
    packed     [t h e _ c a t E .|r a i n E d o g E]f o x E     S = 9, a dot: padding

The packed stream is the text in another order, with padding: row r is its tokens r S to r S + S,
and the end of a row is the end of a document. It is not written: every rank finds, from the places
where documents end, how far each span is moved. README.md says what is cut, and what held out.
"""

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import torch

from picotron_min.data import Batch
from picotron_min.extensions.documents.batches import DocumentBatches
from picotron_min.loss import IGNORE_INDEX

PADDING = -(2**62)  # "moved" so far, it is nowhere in the stream


def best_fit(lengths: np.ndarray, S: int) -> tuple[np.ndarray, np.ndarray]:
    """Put each span, longest first, into the fullest row that has room for it.

    `lengths` [spans] are 1 to S. Returns the spans in the order of rows, and where in this order
    each row ends. Rows with equal room are filled together: O(S log S) operations on arrays.
    """
    by_length = np.argsort(-lengths, kind="stable")
    row_of, placed, num_rows = np.empty(len(lengths), np.int64), 0, 0
    rows_with, rooms = defaultdict(list), 0  # by their room; its bit is set where there are any
    for length, count in reversed([*enumerate(np.bincount(lengths).tolist())]):
        while count:
            if fits := rooms >> length:
                room = length + (fits & -fits).bit_length() - 1  # the least that is enough
                rows = rows_with[room].pop()
                rooms ^= (not rows_with[room]) << room
            else:
                room, rows = S, num_rows + np.arange(-(-count // (S // length)))
                num_rows += len(rows)
            each = room // length  # a row stays the fullest until no more fit
            dealt = min(count, each * len(rows))
            row_of[placed : placed + dealt] = np.repeat(rows[: -(-dealt // each)], each)[:dealt]
            placed, count = placed + dealt, count - dealt
            full, rest = divmod(dealt, each)
            left = room - each * length, room - rest * length, room
            for room, some in zip(left, np.split(rows, (full, full + 1)), strict=True):
                if len(some):
                    rows_with[room].append(some)
                    rooms |= 1 << room
    return by_length[np.argsort(row_of, kind="stable")], np.bincount(row_of).cumsum()


def pack(ends: np.ndarray, cut: int, S: int) -> np.ndarray:
    """[2, spans] int64 of the packed stream: how far each was moved, and where it ends there.

    Rows of the documents that end by the cut, then the held-out text, then a row of padding, for
    rows are read with tokens behind them.
    """
    documents = np.append(0, ends[: np.searchsorted(ends, cut, "right")])
    pieces = -(-np.diff(documents) // S)  # of which all but the last have S tokens
    number = np.arange(pieces.sum()) - np.repeat(pieces.cumsum() - pieces, pieces)
    starts = np.repeat(documents[:-1], pieces) + S * number
    lengths = np.minimum(np.repeat(documents[1:], pieces) - starts, S)

    order, rows = best_fit(lengths, S)
    starts, lengths = starts[order], lengths[order]
    room = S - np.add.reduceat(lengths, np.append(0, rows[:-1]))
    held_out = np.append(cut, ends[len(documents) - 1 :])
    starts = np.insert(starts, rows[room > 0], PADDING)
    lengths = np.insert(lengths, rows[room > 0], room[room > 0])
    starts = np.concatenate((starts, held_out[:-1], [PADDING]))
    packed_ends = np.concatenate((lengths, np.diff(held_out), [S])).cumsum()
    moved = np.append(0, packed_ends[:-1]) - starts
    return np.stack((np.where(starts < 0, PADDING, -moved), packed_ends))


class PackedBatches(DocumentBatches):
    def __post_init__(self) -> None:
        super().__post_init__()  # as without packing, and so with the same held-out text
        S, cut, ends = self.seq_length, self.cut, self.ends
        if ends[0] > cut:
            problem = f"the first document has {ends[0]} tokens, and there are {cut} to train on"
            raise ValueError(f'{problem}: use more text, or dataset.packing "wrapped"')
        self.moved, self.ends = pack(ends, cut, S)
        self.cut = int(self.ends[-1]) - S - (len(self.tokens) - cut)
        self.num_sequences = self.cut // S
        self.padding = 1 - ends[np.searchsorted(ends, cut, "right") - 1] / self.cut
        self._eval_starts += self.cut - cut
        self.tokens = _PackedStream(self.tokens, self.moved, self.ends, ends[0] - 1)

    def _read(self, starts: list[int] | np.ndarray) -> Batch:
        batch = super()._read(starts)
        last = np.searchsorted(self.ends, np.add(starts, self.seq_length))  # span of each row
        is_padding = self.moved[last] == PADDING
        begins = np.where(is_padding, self.ends[last - 1] - starts, self.seq_length)
        batch.targets[..., self.positions >= torch.from_numpy(begins)[:, None]] = IGNORE_INDEX
        return batch


@dataclass
class _PackedStream:
    tokens: np.ndarray
    moved: np.ndarray
    ends: np.ndarray
    fill: int  # where in the stream there is an end-of-text, for padding

    def __getitem__(self, where: slice) -> np.ndarray:
        first, last = np.searchsorted(self.ends, (where.start + 1, where.stop))
        lengths = np.diff(self.ends[first:last], prepend=where.start, append=where.stop)
        places = np.arange(where.start, where.stop) + np.repeat(
            self.moved[first : last + 1], lengths
        )
        return self.tokens[np.where(places < 0, self.fill, places)]
