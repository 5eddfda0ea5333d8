"""41 rectangles: no document sees another, and no mask is needed

target: extensions.documents.rectangles:rectangles
no training: the files that it would read are so long that no row has the border of a document.

`lengths` are of the documents in a row; `query_starts` and `key_starts` say where in the row
the pieces of one rank and of another start, each piece `width` tokens long. Yield what is to be
computed, as (slice of queries, slice of keys, is_causal), for every pair of pieces and every
document that reaches into both. The slices count within the rank's own tokens: piece 0 is [0,
width), piece 1 is [width, 2 width). Where both are the same piece, attention is causal; keys of a
later piece are not seen; never yield an empty slice.
Read: rectangles.py of extensions/documents.

? Three loops: pieces of queries, pieces of keys, documents. What do two intervals share?
? accumulate(lengths, initial=0), pairwise, max of the begins, min of the ends, slice.
? A document [begin, end) has queries max(begin, q) to min(end, q + width); its keys likewise with
  k. Take q off to count from the piece's start, and add the pieces before it: i * width.
! A boolean mask for 32k tokens is 1 GB; the lengths of the documents say the same in a few numbers.
  In production: `flash_attn_varlen_func`, FlexAttention.
"""

from itertools import pairwise, product

from exercises.exercise import Case, Dice


def cases(dice: Dice) -> list[Case]:
    some = [Case(1, size=n, width=dice.randint(3, 5)) for n in (2, 3)]
    for case in some:
        S = 2 * case.size * case.width
        borders = sorted({0, 1, S, *dice.sample(range(2, S), case.size + 1)})
        case.lengths = [end - begin for begin, end in pairwise(borders)]
    # Some documents of one token, some longer than a piece.
    some += [Case(1, size=2, width=4, lengths=[5, 2, 9])]
    some += [Case(1, size=2, width=2, lengths=[1, 1, 1, 5])]
    return [*some, Case(1, size=1, width=3, lengths=[6])]


def pieces(case: Case, rank: int) -> list[int]:
    return [rank * case.width, (2 * case.size - 1 - rank) * case.width]


def places(case: Case, rank: int) -> list[int]:
    """Of a rank's own tokens, in the row."""
    return [begin + i for begin in pieces(case, rank) for i in range(case.width)]


def by_place(case: Case, found: list[tuple]) -> dict[str, list]:
    """Rectangles, each (rank, whose keys, queries, keys, is_causal), by where their keys lie."""
    wheres = "in the same piece", "in an earlier piece", "in a later piece"
    results = {"empty slices": [], "slices behind a rank's tokens": []}
    results |= {f"{what} {where}": [] for where in wheres for what in ("slices", "is_causal")}
    for mine, other, ours, theirs, is_causal in found:
        ends = (ours, pieces(case, mine)), (theirs, pieces(case, other))
        q, k = (starts[part.start >= case.width] for part, starts in ends)
        where = wheres[(k < q) + 2 * (k > q)]
        is_empty = any(part.start >= part.stop for part in (ours, theirs))
        is_behind = max(ours.stop, theirs.stop) > 2 * case.width
        kind = "empty slices" if is_empty else "slices behind a rank's tokens" if is_behind else ""
        text = f"queries {ours.start}:{ours.stop} of rank {mine}, keys {theirs.start}:{theirs.stop}"
        results[kind or f"slices {where}"].append(f"{text} of rank {other}")
        results[f"is_causal {where}"] += [] if kind else [is_causal]
    return {n: sorted(set(some) if "is_causal" in n else some) for n, some in results.items()}


def on_rank(rank, case: Case) -> dict:
    found = []
    for mine, other in product(range(case.size), repeat=2):
        starts = pieces(case, mine), pieces(case, other)
        each = rank.course.rectangles.rectangles(case.lengths, *starts, case.width)
        found += [(mine, other, *rectangle) for rectangle in each]
    return by_place(case, found) | {"all": found}


def expected(case: Case) -> list[dict]:
    # Token by token: what each query sees of each piece and document, put together.
    document = [i for i, length in enumerate(case.lengths) for _ in range(length)]
    found = []
    for mine, other in product(range(case.size), repeat=2):
        seen, tokens = {}, (enumerate(places(case, rank)) for rank in (mine, other))
        for (a, q), (b, k) in product(*tokens):
            if document[q] == document[k] and k <= q:
                here = a // case.width, b // case.width, document[q]
                queries, keys = seen.setdefault(here, ([], []))
                queries.append(a), keys.append(b)
        for (i, j, _), both in seen.items():
            slices = (slice(min(part), max(part) + 1) for part in both)
            found.append((mine, other, *slices, (mine, i) == (other, j)))
    return [by_place(case, found)]


def picture(runs):
    case, records = runs[2]
    S = 2 * case.size * case.width
    cells = [["." for _ in range(S)] for _ in range(S)]
    for mine, other, q, k, causal in records[0].values["all"]:
        rows, columns = places(case, mine)[q], places(case, other)[k]
        for a, row in enumerate(rows):
            for column in columns[: a + 1] if causal else columns:
                cells[row][column] = "AB"[mine]
    yield from ["documents of 5, 2 and 9 tokens: row: query, column: key, letter: rank", ""]
    yield from (" ".join(row) for row in cells)


VERSIONS = """
no_borders: Documents are not kept apart: every query sees all tokens before it in the row.
    accumulate(lengths, initial=0) => accumulate([sum(lengths)], initial=0)
first_left_out: The borders begin with the end of the first document, which is left out.
    accumulate(lengths, initial=0) => accumulate(lengths)
later_keys: Keys of later pieces are seen: the first token of a document sees its end.
    documents if k <= q else () => documents
never_causal: The own piece is not causal: a query sees the tokens behind it in its document.
    q == k => False
always_causal: All rectangles are causal. Between different pieces every query sees every key.
    q == k => True
causal_by_index: The first pieces of two ranks are taken for the same piece, and so are the second.
    q == k => i == j
causal_by_rank: A rank's own keys are all causal: its late piece sees all of its early one.
    q == k => query_starts == key_starts
later_by_index: Pieces are compared by their index: a first piece of one rank can be behind the
    first of another.
    k <= q => j <= i
one_document: Only the first document of a piece is yielded: a piece can have several.
    q == k => q == k; break
in_the_row: Slices count from the start of the row, not within the rank's own tokens.
    slice(i * width + first, i * width + last) => slice(q + first, q + last)
    slice(j * width + left, j * width + right) => slice(k + left, k + right)
within_a_piece: Slices count within a piece: the late piece's are taken for the early one's.
    slice(i * width + first, i * width + last) => slice(first, last)
    slice(j * width + left, j * width + right) => slice(left, right)
whole_pieces: Of a document that begins or ends inside a piece all of the piece's keys are taken.
    max(begin, k) - k, min(end, k + width) - k => 0, width
past_the_piece: A document that is longer than the piece of queries is not cut at its end.
    min(end, q + width) - q => end - q
empty_keys: Documents that begin where a piece of keys ends are yielded with an empty slice of keys:
    compare its ends by <, not by <=.
    left < right => left <= right
outside_the_keys: Documents that do not reach into a piece of keys are yielded, with an empty slice.
    left < right => True
keys_not_cut: A document that began before a piece of keys is not cut at the piece's start.
    max(begin, k) - k, min(end => begin - k, min(end
    left < right => max(left, 0) < right
also_right:
def rectangles(lengths, query_starts, key_starts, width):
    found, begin = [], 0
    for length in lengths:
        mine, begin = range(begin, begin + length), begin + length
        for i, q in enumerate(query_starts):
            for j, k in enumerate(key_starts):
                rows = [p - q + i * width for p in mine if q <= p < q + width]
                columns = [p - k + j * width for p in mine if k <= p < k + width]
                if rows and columns and k <= q:
                    ours, theirs = slice(rows[0], rows[-1] + 1), slice(columns[0], columns[-1] + 1)
                    found.append((ours, theirs, k == q))
    return found
"""
