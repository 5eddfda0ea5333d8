"""38 grouped: the gradients of all experts as one tensor

target: extensions.experts.grouped:joined_view
train: model.num_local_experts=4 model.num_experts_per_tok=2 model.moe_intermediate_size=64

Return one tensor [X, ...] that has the memory of X tensors of one shape and one stride, or None
where there is no such tensor: if one of them is None; if they lie in several storages; if the
distances from each to the next are not equal, or go backwards; and of a single one, which needs no
group. Nothing is copied: what is added to the result must arrive in the tensors.
Read: extensions/experts/grouped.py.

? Return None where it must be None; else a view of the first tensor with one more dim.
? untyped_storage().data_ptr(), storage_offset(), pairwise, as_strided(size, stride).
? The new dim comes first; its stride is the distance from one tensor to the next, in elements. All
  others are as in the first tensor, and so is where it begins.
! 1 addition for the gradients of all experts, in place of X kernels. In production:
  `torch.nn.functional.grouped_mm`; Megatron-LM's `GroupedMLP`.
"""

import torch

from exercises.exercise import Case, Dice, draw

# Where each tensor begins in its buffer, in sizes of a tensor (of a row, if they are columns of one
# matrix); None: it has none.
PLACES = {"side by side": [0, 1, 2], "with gaps": [1, 3, 5, 7], "uneven": [0, 1, 3]}
PLACES |= {"uneven at the end": [0, 1, 2, 4], "backwards": [4, 2, 0], "alone": [1]}
PLACES |= {"one is missing": [0, None, 2], "two buffers": [0, 1, 2]}
PLACES |= {"two buffers at the end": [0, 1, 2, 3], "no views": [0, 1, 2]}
PLACES |= {"all are missing": [None, None], "transposed": [0, 2, 4], "a pair": [2, 5]}
PLACES |= {"columns of a matrix": [0, 1, 2]}
FINE = ("side by side", "with gaps", "a pair", "transposed", "no views", "columns of a matrix")


def cases(dice: Dice) -> list[Case]:
    rows, columns = dice.randint(2, 3), dice.randint(4, 5)
    return [Case(1, lies=lies, rows=rows, columns=columns) for lies in PLACES]


def tensors_of(case: Case) -> list:
    """The tensors, in their buffers; the last of two buffers begins as the first one does."""
    stride = (1, case.rows) if case.lies == "transposed" else (case.columns, 1)
    size, numel, tensors = (case.rows, case.columns), case.rows * case.columns, []
    unit = numel
    if case.lies == "columns of a matrix":
        stride, unit = (3 * case.columns, 1), case.columns
    buffers = [draw(case, "buffer", i, shape=(9 * numel,)) for i in (0, 1)]
    for i, place in enumerate(PLACES[case.lies]):
        is_last = i == len(PLACES[case.lies]) - 1
        buffer = buffers["two buffers" in case.lies and is_last]
        # Without the graph of a view there is no `_base`: the storage alone tells.
        buffer = buffer.data if case.lies == "no views" else buffer
        tensors.append(None if place is None else buffer.as_strided(size, stride, place * unit))
    return tensors


def on_rank(rank, case: Case) -> dict:
    tensors = tensors_of(case)
    joined = rank.course.grouped.joined_view(tensors)
    before = None if joined is None else joined.clone()
    if joined is not None:
        joined += draw(case, "addend", shape=(len(tensors), case.rows, case.columns))
    return {"joined": before, "tensors, after something is added to it": tensors}


def expected(case: Case) -> list[dict]:
    tensors, before = tensors_of(case), None
    if case.lies in FINE:
        before = torch.stack(tensors)
        tensors = list(before + draw(case, "addend", shape=before.shape))
    return [{"joined": before, "tensors, after something is added to it": tensors}]


def picture(runs):
    yield from ["where tensors lie in a buffer, and whether they are one tensor"]
    for case, records in runs:
        row = ["."] * 9
        if case.lies == "columns of a matrix":  # a row of each in turn
            row = [*"abcabcabc"]
        for i, place in enumerate(PLACES[case.lies]):
            if place is not None:
                row[place] = "abcd"[i]
        verdict = "no" if records[0].values["joined"] is None else "yes"
        more = "    the last in another buffer" if "two buffers" in case.lies else ""
        yield f"{case.lies:23} {' '.join(row)}   {verdict}{more}"


VERSIONS = """
copied: The tensors are stacked: that is a copy, and what is added to it does not reach them.
- return first.as_strided((len(tensors), *first.shape), (*distances, *first.stride()))
+ return torch.stack(tensors)
side_by_side_always: The next tensor is taken to begin where one ends: others may lie between.
    *distances => first.numel()
from_the_beginning: The result begins where the buffer does: it must begin at the first tensor.
    *first.stride()) => *first.stride()), 0
contiguous_always: Each tensor is taken to be contiguous: it has strides of its own.
    *first.stride() => first.shape[1], 1
several_buffers: Tensors of several storages are joined by their offsets: some of what comes out is
    other memory of the first storage.
    len(buffers) > 1 or None => None
three_compared: Only the first three tensors are compared: a later one may lie elsewhere.
    tensor.storage_offset() for tensor in tensors] => t.storage_offset() for t in tensors[:3]]
base_for_storage: `_base` is taken for the storage: tensors of one storage may have none.
    t.untyped_storage().data_ptr() => id(t if t._base is None else t._base)
uneven_distances: The first distance is taken for all: uneven ones cannot be one stride.
    in pairwise(places) => in [places[:2]]
backwards: Tensors that lie backwards are not refused: torch has no negative strides.
    1 or min(distances) < 0 => 1
missing_left_out: Missing tensors are left out, and the others joined: the result has too few.
    buffers = { => tensors = [t for t in tensors if t is not None]; buffers = {
missing_not_refused: That all are missing is not noticed: None has no offset.
    1 or None in buffers => 1
one_alone: A single tensor is not refused: it has no distance to a next one.
    (tensors) < 2 or len(buffers) => (buffers)
overlap_refused: Tensors whose distance is below their size are taken to overlap: columns of one
    matrix lie between one another, and have a view in common.
    min(distances) < 0 => min(distances) < first.numel()
sorted: Tensors are sorted by where they lie: the result has them in another order than was given.
- first, places = tensors[0], [tensor.storage_offset() for tensor in tensors]
+ tensors = sorted(tensors, key=lambda tensor: tensor.storage_offset())
+ first, places = tensors[0], [tensor.storage_offset() for tensor in tensors]
ends_compared: Only the first and the last tensor are looked at: distances between them can be
    uneven.
- distances = {after - before for before, after in pairwise(places)}
+ distance, rest = divmod(places[-1] - places[0], len(places) - 1)
+ distances = {distance, distance + rest}
also_right:
def joined_view(tensors):
    if len(tensors) < 2 or any(t is None for t in tensors):
        return None
    first, second = tensors[:2]
    step = (second.data_ptr() - first.data_ptr()) // first.element_size()
    lie = [(t.untyped_storage().data_ptr(), t.storage_offset()) for t in tensors]
    if step < 0 or lie != [(lie[0][0], lie[0][1] + i * step) for i in range(len(tensors))]:
        return None
    return first.as_strided([len(tensors), *first.shape], [step, *first.stride()])
"""
