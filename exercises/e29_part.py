"""29 part: which slice of a whole a rank reads

target: placement:part

Return which part of a tensor is a rank's: a tuple of one slice(start, stop) a dim, both of them
numbers. A cut divides what the cuts before it have left along cut.dim, among size[cut.axis] ranks,
of which this one is rank[cut.axis]. Pieces are as torch.chunk makes them: all but the last ones
have the length of the largest, rounded up, as 10 rows among 4 ranks: 3, 3, 3, 1; the last ones may
have fewer or none. With a cut.owner, that rank has all, and the others have nothing: a slice that
is empty. Use the standard library alone.
Read: placement.py (`Cut` and the examples at the top), checkpoint.py.

? Begin with whole slices, and let each cut shrink the slice of its dim.
? slice(start, stop) with .start and .stop, min, -(-a // b) for a quotient rounded up, a cut's axis,
  dim and owner.
? A piece has (stop - start) / size elements, rounded up. This rank's begins at start plus rank
  times that; neither its begin nor its end may be beyond stop. With an owner, the slice of that
  rank stays as it is, and any other rank's is slice(start, start).
! 10 rows among 4 ranks: 3, 3, 3, 1, as torch.chunk and DTensor have it. In production:
  `torch.distributed.tensor.Shard`, by which a checkpoint is loaded in any layout.
"""

from itertools import product

import torch

from exercises.exercise import Case, Dice

ROWS, COLUMNS, DP_ROWS = ("tp", 0, None), ("tp", 1, None), ("dp", 0, None)  # axis, dim, owner
CUTS = {"whole": (), "rows over tp": (ROWS,), "columns over tp": (COLUMNS,)}
CUTS |= {"rows over tp, then over dp": (ROWS, DP_ROWS)}
CUTS |= {"columns over tp, then rows over dp": (COLUMNS, DP_ROWS)}
CUTS |= {"owned by dp rank 1": (("dp", 0, 1),)}
CUTS |= {"owned by dp rank 0, then columns over tp": (("dp", 0, 0), COLUMNS)}
CUTS |= {"rows over tp, then owned by dp rank 1": (ROWS, ("dp", 0, 1))}
CUTS |= {"dim 2 over tp": (("tp", 2, None),)}


def cases(dice: Dice) -> list[Case]:
    sizes = [(8, 8, 2, 2), (10, 7, 4, 2), (dice.randint(11, 14), dice.randint(8, 10), 3, 4)]
    sizes += [(5, 3, 4, 3), (2, 9, 3, 2)]
    some = [Case(1, shape=(a, b), tp=tp, dp=dp) for a, b, tp, dp in sizes]
    # Weights of norms are vectors; the weights of all experts are one tensor of three dims.
    return [*some, Case(1, shape=(10,), tp=4, dp=2), Case(1, shape=(4, 6, 5), tp=2, dp=3)]


def cuts_of(case: Case) -> dict[str, tuple]:
    """All cuts of dims that the tensor has."""
    return {k: cuts for k, cuts in CUTS.items() if all(c[1] < len(case.shape) for c in cuts)}


def places(case: Case) -> list[dict[str, int]]:
    """The ranks within tp and dp of all ranks."""
    return [{"tp": t, "dp": d} for t, d in product(range(case.tp), range(case.dp))]


def on_rank(rank, case: Case) -> dict:
    placement, results = rank.course.placement, {name: [] for name in cuts_of(case)}
    for (name, cuts), place in product(cuts_of(case).items(), places(case)):
        cuts = [placement.Cut(*cut) for cut in cuts]
        found = placement.part(case.shape, cuts, place, {"tp": case.tp, "dp": case.dp})
        results[name].append(" ".join(shown(one.start, one.stop) for one in found))
    kind = tuple if isinstance(found, tuple) else type(found)  # a tensor is indexed by it
    return results | {"type of what part returns": kind.__name__}


def shown(start: int, stop: int) -> str:
    """Nothing is the same, wherever it is."""
    if start is None or stop is None:
        return "slice(None)" if start is stop else f"slice({start}, {stop})"
    return f"{start}:{stop}" if start != stop else "nothing"


def expected(case: Case) -> list[dict]:
    results = {name: [] for name in cuts_of(case)}
    for (name, cuts), place in product(cuts_of(case).items(), places(case)):
        left = [torch.arange(n) for n in case.shape]
        for axis, dim, owner in cuts:
            chunks = left[dim].chunk(getattr(case, axis)) if owner is None else [left[dim]]
            index = place[axis] - (owner or 0)
            left[dim] = chunks[index] if 0 <= index < len(chunks) else left[dim][:0]
        texts = (shown(int(x[0]), int(x[-1]) + 1) if len(x) else "nothing" for x in left)
        results[name].append(" ".join(texts))
    return [results | {"type of what part returns": "tuple"}]


def picture(runs):
    (case, records), name = runs[1], "columns over tp, then rows over dp"
    yield f"A matrix {case.shape[0]} x {case.shape[1]}, {name}"
    grid = [["?"] * case.shape[1] for _ in range(case.shape[0])]
    for letter, place, text in zip("ABCDEFGH", places(case), records[0].values[name], strict=True):
        yield f"{letter}: tp {place['tp']} dp {place['dp']}  [{text.replace(' ', ', ')}]"
        if "nothing" not in text:
            (a, b), (c, d) = (map(int, one.split(":")) for one in text.split())
            for row, column in product(range(a, b), range(c, d)):
                grid[row][column] = letter
    yield from map(" ".join, grid)


VERSIONS = """
rounded_down: The length of a piece is rounded down: the last rows belong to no rank.
    each = -(-(stop - start) // size[cut.axis]) => each = (stop - start) // size[cut.axis]
to_the_nearest: A piece's length is rounded to the nearest: rows are left where it is rounded down.
    -(-(stop - start) // size[cut.axis]) => round((stop - start) / size[cut.axis])
last_gets_the_rest: Lengths are rounded down; the last rank gets the rest. torch.chunk rounds up.
    each = -(-(stop - start) // size[cut.axis]) => each = (stop - start) // size[cut.axis]
    min(first + each, stop) => stop if rank[cut.axis] == size[cut.axis] - 1 else first + each
as_even_as_possible: Pieces differ by one row at most: 3, 3, 2, 2, where torch.chunk has 3, 3, 3, 1.
- first = min(start + rank[cut.axis] * each, stop)
+ less, more = divmod(stop - start, size[cut.axis])
+ first = start + rank[cut.axis] * less + min(rank[cut.axis], more)
+ each = less + (rank[cut.axis] < more)
beyond_the_end: The last piece ends beyond the end: 10 rows among 4 ranks would need 12.
    min(first + each, stop) => first + each
negative_length: A rank that has nothing gets a slice that begins behind its end.
    first = min(start + rank[cut.axis] * each, stop) => first = start + rank[cut.axis] * each
start_forgotten: A second cut of a dim counts from the tensor's begin, not from what is left.
    start + rank => rank
always_the_whole: Each cut divides the whole, not what is left: the last cut of a dim wins.
    slices[cut.dim].start, slices[cut.dim].stop => 0, shape[cut.dim]
owner_ignored: An owner is ignored: its matrix is cut among the ranks.
    if cut.owner is not None: => if False:
owner_0_ignored: `if cut.owner` is false for rank 0, too, whose matrix is cut: compare with None.
    if cut.owner is not None: => if cut.owner:
owner_ends_it: A cut with an owner ends the loop: cuts after it are ignored.
    continue => break
all_are_owners: Every rank has all of a matrix with an owner: the others must have nothing.
    stop if rank[cut.axis] == cut.owner else start => stop
first_dim_only: All cuts are along dim 0: o_proj and down_proj are cut by columns.
    for cut in cuts: => for cut in (cut._replace(dim=0) for cut in cuts):
begins_at_0: A second cut of a dim forgets where the first one begins: its slice counts from 0.
    each = -( => start, stop = 0, stop - start; each = -(
into_the_next_part: Pieces are clipped at the end of the tensor, not where the cut before
    has left it: they reach into the next rank's part.
    * each, stop) => * each, shape[cut.dim])
    first + each, stop) => first + each, shape[cut.dim])
without_numbers: A dim that no cut names gets slice(None): two numbers tell how long the part is.
- return tuple(slices)
+ cut_dims = {cut.dim for cut in cuts}
+ return tuple(s if dim in cut_dims else slice(None) for dim, s in enumerate(slices))
also_right:
def part(shape, cuts, rank, size):
    indices = [list(range(length)) for length in shape]
    for axis, dim, owner in cuts:
        left, r = indices[dim], rank[axis]
        if owner is None:
            each = (len(left) + size[axis] - 1) // size[axis]
            indices[dim] = left[r * each : (r + 1) * each]
        elif r != owner:
            indices[dim] = []
    return tuple(slice(i[0], i[-1] + 1) if i else slice(0, 0) for i in indices)
"""
