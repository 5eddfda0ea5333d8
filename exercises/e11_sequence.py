"""11 sequence: the same bytes, and less memory

target: extensions.overlap.boundary:SequenceBoundary
train: distributed.tp_size=2 distributed.sequence_parallel=true

Write the ends of a sublayer for sequence parallelism: outside, a rank has x [B, S/tp, E]. `whole`
returns all of the sequence. `start_sum` begins to sum [B, S, E] over the ranks, and returns a
rank's own part of the sum and the work to wait for. `maximum`, which only FP8 uses, returns the
largest amax of all ranks. The other methods are Boundary's.
Read: extensions/overlap/boundary.py, collectives.py.

? An all-reduce is a reduce-scatter, after which each rank has its part, and an all-gather.
? collectives.all_gather(tensor, axis, dim), collectives.start_reduce_scatter(tensor, axis, dim);
  for `maximum`, _all_reduce(amax, self.axis, op=dist.ReduceOp.MAX).
? Gather along the sequence, dim 1, in `whole`; begin to reduce and scatter along it in `start_sum`.
  What one does forward, the other does in backward: nothing else is needed.
! 1 / tp of the memory between sublayers, for the bytes of plain tensor parallelism. In production:
  `torch.distributed.tensor.parallel.SequenceParallel`.
"""

from exercises.boundaries import SEQUENCE, expected, on_rank, order, traffic  # noqa: F401
from exercises.exercise import Case, Dice


def cases(dice: Dice) -> list[Case]:
    sizes = {"length": 12, "hidden": dice.randint(3, 6), "inner": 4, "kind": SEQUENCE}
    batch = dice.randint(2, 3)
    # A batch of one does not show in which order parts of several are gathered.
    return [Case(ranks, batch=n, **sizes) for ranks, n in ((2, batch), (4, batch), (2, 1))]


def memory(case: Case, rank: int, record) -> str | None:
    part = 8 * case.batch * case.length * case.hidden / case.ranks
    if (kept := record.values.get("bytes", part)) != part:
        return f"rank {rank} keeps {kept} bytes of a sum; its part of the sequence needs {part:g}"


MISTAKES = """
all_reduced: `start_sum` computes the whole sum on every rank, which then keeps its part: right, but
    an all-reduce sends twice the bytes.
- return collectives.start_reduce_scatter(y, self.axis, dim=1)
+ y = y.contiguous()
+ return y.chunk(self.axis.size, 1)[self.axis.rank], collectives.start_all_reduce(y, self.axis)
not_summed: `start_sum` takes this rank's part of its own tensor: nothing is summed over the ranks.
- return collectives.start_reduce_scatter(y, self.axis, dim=1)
+ return y.chunk(self.axis.size, 1)[self.axis.rank], type('Done', (), {'wait': lambda self: None})()
awaited_at_once: `start_sum` waits until the sum is there: weight gradients are computed only then.
    return collectives.start_reduce => begun = collectives.start_reduce
    y, self.axis, dim=1) => y, self.axis, dim=1); begun[1].wait(); return begun
own_maximum: `maximum` returns this rank's own value: all need the largest of all ranks.
- return _all_reduce(amax, self.axis, op=dist.ReduceOp.MAX)
+ return amax
one_after_the_other: What is gathered lies rank by rank, and is taken for sequences: with several in
    a batch they are mixed.
    x, self.axis, dim=1) => x, self.axis, dim=0).view(len(x), -1, x.shape[-1])
"""
