"""Batches of rows that know where documents end: README.md shows one.

DocumentBatches: the rows, and their order, are as in a run without `document_mask`. So a document
that a row cuts begins again at position 0 in another row.

PackedBatches, by best fit: rows of whole documents, where slices of the stream would cut them.

    stream      t h e _ c a t E d o g E r a i n E|f o x E     |: from here on held out
    packed     [t h e _ c a t E .|r a i n E d o g E]f o x E     S = 9, a dot: padding

The packed stream is the text in another order, with padding: row r is its tokens r S to r S + S,
and the end of a row is the end of a document. It is not written: every rank finds, from the places
where documents end, how far each span is moved. README.md says what is cut, and what held out.
"""

from collections import defaultdict
from dataclasses import KW_ONLY, dataclass, fields

import numpy as np
import torch

from picotron_min.data import Batch, Batches
from picotron_min.extensions.documents.rectangles import Documents
from picotron_min.loss import IGNORE_INDEX

PADDING = -(2**62)  # the start of its spans: negative, so it is no place in the text


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


class PackedBatches(DocumentBatches):
    def __post_init__(self) -> None:
        super().__post_init__()
        same = {field.name: getattr(self, field.name) for field in fields(self)}
        self.eval_batch = DocumentBatches(**same).eval_batch  # as without packing: losses compare
        ends = self.ends[: np.searchsorted(self.ends, self.cut, "right")]  # not held out
        if not len(ends):
            documents = f"the first document has {self.ends[0]} tokens"
            problem = f"{documents}, and there are {self.cut} to train on"
            raise ValueError(f'{problem}: use more text, or dataset.packing "wrapped"')
        self.end_of_text = int(self.tokens[ends[0] - 1])
        self.tokens = _PackedStream(self.tokens, *pack(ends, self.seq_length))
        self.ends, self.cut = self.tokens.ends, int(self.tokens.ends[-1]) - 1
        self.num_sequences = self.cut // self.seq_length
        self.padding = 1 - ends[-1] / self.cut

    def _read(self, starts: list[int] | np.ndarray) -> Batch:
        batch = super()._read(starts)
        batch.tokens[batch.tokens == IGNORE_INDEX] = self.end_of_text
        return batch


def pack(ends: np.ndarray, S: int) -> tuple[np.ndarray, np.ndarray]:
    """The spans of the packed stream, for documents that end in the text at `ends` [documents].

    Returns [spans] twice: a span's place in the text minus its place in the packed stream (with
    it, places of padding are negative), and where it ends in the packed stream.
    """
    begins = np.append(0, ends[:-1])
    pieces = -(-(ends - begins) // S)  # of which all but the last have S tokens
    number = np.arange(pieces.sum()) - np.repeat(pieces.cumsum() - pieces, pieces)
    starts = np.repeat(begins, pieces) + S * number
    lengths = np.minimum(np.repeat(ends, pieces) - starts, S)

    order, rows = best_fit(lengths, S)
    starts, lengths = starts[order], lengths[order]
    room = S - np.add.reduceat(lengths, np.append(0, rows[:-1]))
    room[-1] += 1  # since rows are read with the token behind them
    starts = np.insert(starts, rows[room > 0], PADDING)
    lengths = np.insert(lengths, rows[room > 0], room[room > 0])
    packed_ends = lengths.cumsum()
    return starts + lengths - packed_ends, packed_ends


def best_fit(lengths: np.ndarray, S: int) -> tuple[np.ndarray, np.ndarray]:
    """Put each span, longest first, into the fullest row that has room for it.

    `lengths` [spans] are 1 to S. Returns the spans in the order of rows, and where in this order
    each row ends. Rows with equal room are filled together: O(S log S) operations on arrays.
    """
    by_length = np.argsort(-lengths, kind="stable")
    row_of, placed, num_rows = np.empty(len(lengths), np.int64), 0, 0
    rows_with = defaultdict(list)  # rows, by how many tokens they have room for
    rooms = 0  # a set of these numbers, as bits: the least that suffices is the lowest bit
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


@dataclass
class _PackedStream:
    """The text in its new order, read span by span; `moves` and `ends` as `pack` returns them."""

    tokens: np.ndarray  # of the text
    moves: np.ndarray
    ends: np.ndarray

    def __len__(self) -> int:
        return int(self.ends[-1])

    def __getitem__(self, where: slice | int | np.ndarray) -> np.ndarray:
        """Tokens in int64, at places from 0 on; padding is IGNORE_INDEX, and so never a target."""
        if isinstance(where, slice):
            where = np.arange(*where.indices(len(self)))
        places = where + self.moves[np.searchsorted(self.ends, where, "right")]
        return np.where(places < 0, IGNORE_INDEX, self.tokens[places.clip(0)].astype(np.int64))
