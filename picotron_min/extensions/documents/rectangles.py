"""Rectangles: which queries of a rank see which keys, when no document sees another.

Within a document attention is causal. Between a piece of a row and an earlier piece, at most one
document reaches into both. So a rank computes causal squares where both pieces are the same, and
full rectangles elsewhere. With 2 ranks, pieces of 4 and documents of 5, 2 and 9 tokens:

    keys of rank 0     0-3  12-15        keys of rank 1     4-7  8-11
    queries    0-3      ◣                queries    0-3
             12-15      .    ◣                    12-15      #    #
    queries    4-7      #                queries    4-7      ◣
              8-11      .                          8-11      #    ◣

◣: the same piece, a causal square for each document in it. #: some of these queries see some of
these keys. A dot: no document is in both. Blank: later keys. Standard library only.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, groupby, pairwise
from typing import NamedTuple


@dataclass(frozen=True)
class Documents:
    """The lengths of the documents in each row of a micro-batch; together S in every row."""

    # A class, not a plain tuple: torch.compile would compile again for the numbers of each batch.
    lengths: tuple[tuple[int, ...], ...]

    def alike(self) -> list[tuple[slice, tuple[int, ...]]]:
        """Rows that follow each other and have the same lengths, with these lengths."""
        found, first = [], 0
        for lengths, rows in groupby(self.lengths):
            found.append((slice(first, first := first + len([*rows])), lengths))
        return found


class Rectangle(NamedTuple):
    ours: tuple[slice, ...]  # in queries [B, Q, S/n, D]
    theirs: tuple[slice, ...]  # in another rank's keys and values [2, B, K, S/n, D]
    is_causal: bool  # then it is a square


def rectangles(
    lengths: Sequence[int], query_starts: Sequence[int], key_starts: Sequence[int], width: int
) -> Iterator[tuple[slice, slice, bool]]:
    """(queries, keys, is_causal) of each rectangle of a row, between pieces of `width` tokens.

    The slices are places in a rank's own pieces, which lie one behind the other.
    """
    documents = list(pairwise(accumulate(lengths, initial=0)))  # where each begins and ends
    for i, q in enumerate(query_starts):
        for j, k in enumerate(key_starts):
            for begin, end in documents if k <= q else ():
                first, last = max(begin, q) - q, min(end, q + width) - q
                left, right = max(begin, k) - k, min(end, k + width) - k
                if first < last and left < right:  # torch's kernel crashes on empty keys
                    queries = slice(i * width + first, i * width + last)
                    yield queries, slice(j * width + left, j * width + right), q == k


@lru_cache(maxsize=256)  # for all layers, of the micro-batches that are alive
def ring_plan(
    documents: Documents, rank: int, size: int, width: int
) -> tuple[tuple[Rectangle, ...], ...]:
    """For each rank of a ring, cut zigzag, the rectangles of its keys; causal ones come first."""

    def starts(rank: int) -> tuple[int, int]:
        return rank * width, (2 * size - 1 - rank) * width

    plan, every = [], slice(None)
    for source in range(size):
        found = [
            Rectangle((rows, every, queries), (every, rows, every, keys), is_causal)
            for rows, lengths in documents.alike()
            for queries, keys, is_causal in rectangles(lengths, starts(rank), starts(source), width)
        ]
        plan.append(tuple(sorted(found, key=lambda rectangle: not rectangle.is_causal)))
    return tuple(plan)
