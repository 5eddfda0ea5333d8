"""Expert parallelism: the experts of a layer lie on different ranks, and tokens travel to them.

    rank 0   experts 0 1     its tokens, sorted by expert   | to rank 0 | to rank 1 |
    rank 1   experts 2 3                                    | to rank 0 | to rank 1 |
                                 all-to-all, experts compute, all-to-all back, weighted sums

The ranks of a stage are on a second grid, not (dp, cp, tp) but (edp, ep, etp): see README.md. etp
ranks have parts of the same experts, as in tensor parallelism: a token goes to all of them, and its
sender adds what comes back. Each rank brings tokens of its own, so gradients are summed over edp.

Bytes that all ranks of ep_etp together send for a layer and a micro-batch. A row has b bytes, its
weight w (4 or 8); r rows leave their rank, of n tokens about n k etp (1 - 1/(ep etp)):

    alltoall     forward 2 r b + r w, backward the same; and counts of rows, 8 bytes each
    allgather    forward for each token 2 (ep etp - 1) (b + k w / 2) and its choices,
                 8 k (ep etp - 1), backward the first again

Source of the two grids: Liu et al. 2025, "MoE Parallel Folding".
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from picotron_min import collectives
from picotron_min.collectives import Axis, Conjugate, all_gather, all_reduce, all_to_all
from picotron_min.extensions.experts.moe import Dispatch, Limit, Pairs, mixtures, on_device
from picotron_min.extensions.experts.router import count
from picotron_min.mesh import Axes
from picotron_min.model import Llama


def keep_experts(model: Llama, axis: Axis) -> None:
    """Delete, in place, the experts of other ranks. What is left keeps its names."""
    for moe in mixtures(model):
        each = len(moe.experts) // axis.size
        for name in list(moe.experts):
            if int(name) // each != axis.rank:
                del moe.experts[name]


def apply_expert_parallel(model: Llama, axes: Axes, engine: str, sequence_parallel: bool) -> None:
    """Let the tokens of a model travel to their experts, in place."""
    for moe in mixtures(model):
        if axes.ep_etp.size > 1:
            kind = {"alltoall": AllToAllDispatch, "allgather": GatherDispatch}[engine]
            moe.dispatch = kind(moe.limit, axes)
        if axes.tp.size > 1 and not sequence_parallel:  # else each rank has its own tokens already
            whole = partial(all_gather, axis=axes.tp, dim=1)

            def own(x: Tensor) -> Tensor:  # [B, S, E] -> [B, S/tp, E]
                return x.chunk(axes.tp.size, dim=1)[axes.tp.rank].contiguous()

            # What is whole, and its gradient, are the same on all ranks: so backward sums nothing.
            # torch.compile cannot look into messages.
            moe.split = torch.compiler.disable(partial(Conjugate.apply, own, whole))
            moe.join = torch.compiler.disable(partial(Conjugate.apply, whole, own))
        moe.gate.sum_over_sequences = partial(all_reduce, axis=axes.cp_tp)
        moe.gate.sum_over_batch = partial(all_reduce, axis=axes.dp)


class AllToAllDispatch(Dispatch):
    """Each pair (token, expert) travels to the ranks that have the expert, and back."""

    def __init__(self, limit: Limit, axes: Axes) -> None:
        super().__init__(limit)
        self.axis, self.ep, self.etp = axes.ep_etp, axes.ep.size, axes.etp.size

    def __call__(
        self, x: Tensor, weights: Tensor, experts: Tensor, run: Callable, meanwhile: Callable
    ) -> tuple[Tensor, Tensor | None]:
        # How many rows of each expert leave for each rank, and arrive from it: [ep etp, X/ep].
        rows_each, shape = self.limit.rows_each(len(x)), (self.ep, 1, self.num_experts // self.ep)
        if rows_each:
            leaving = arriving = [[rows_each] * shape[-1]] * self.axis.size
        else:
            counts = count(experts, self.num_experts)[:-1].view(shape)
            counts = counts.expand(-1, self.etp, -1).flatten(0, 1)
            both = torch.stack([counts, all_to_all(counts, self.axis, 0, 0).view_as(counts)])
            leaving, arriving = both.tolist()  # the only place where the host waits for a GPU
        to_each, from_each = [sum(row) for row in leaving], [sum(row) for row in arriving]
        sizes = [sum(column) for column in zip(*arriving, strict=True)]
        if not rows_each:
            self.limit.check_rows(sizes, len(x) * self.axis.size)

        lengths = to_each[:: self.etp]  # of chunks, one for each rank of ep
        pairs = Pairs(experts, sum(lengths), rows_each)
        # Of rows and of their weights, which differ in dtype and width.
        there, there_too = (Exchange(self.axis, to_each, from_each) for _ in range(2))
        x = there.start(repeat_chunks(pairs.spread(x), lengths, self.etp))
        weights = there_too.start(repeat_chunks(pairs.sort(weights), lengths, self.etp))
        shared = meanwhile()  # computed while the rows travel
        x, weights = there.wait(x), there_too.wait(weights)

        # Rows arrive rank by rank, and from each rank expert by expert: so they are sorted again.
        numbers = torch.arange(len(sizes), device=x.device).repeat(self.axis.size)
        repeats = on_device(arriving, x.device).flatten()
        arrived = numbers.repeat_interleave(repeats, output_size=sum(sizes))
        by_expert = Pairs(arrived[:, None], len(arrived))
        out = by_expert.collect(run(by_expert.spread(x), sizes, by_expert.sort(weights)))
        back = Exchange(self.axis, from_each, to_each)
        out = back.wait(back.start(out))
        return pairs.collect(add_chunks(out, lengths, self.etp)), shared


def repeat_chunks(rows: Tensor, lengths: list[int], times: int) -> Tensor:
    """Chunks of rows, each several times: a b c, twice -> a a b b c c."""
    if times == 1:
        return rows
    return torch.cat([x.repeat(times, *[1] * (x.ndim - 1)) for x in rows.split(lengths)])


def add_chunks(rows: Tensor, lengths: list[int], times: int) -> Tensor:
    """The reverse: the copies of a chunk become their sum."""
    if times == 1:
        return rows
    chunks = rows.split([times * length for length in lengths])
    return torch.cat([x.unflatten(0, (times, -1)).sum(0) for x in chunks])


class Exchange:
    """Rows that travel between `start` and `wait`; in backward their gradients travel back.

    The first to_each[0] rows go to rank 0, the next to_each[1] to rank 1, ...; from_each[0] rows
    arrive from rank 0, ... What `start` gives is empty, and only tells autograd that `wait`
    follows: `wait`'s backward starts the reverse message, `start`'s backward waits for it.
    """

    def __init__(self, axis: Axis, to_each: list[int], from_each: list[int]) -> None:
        self.axis, self.there, self.back = axis, (to_each, from_each), (from_each, to_each)

    def start(self, rows: Tensor) -> Tensor:
        """[rows that leave, ..] -> [0], for `wait`"""
        return Conjugate.apply(partial(self._start, *self.there), self._wait, rows)

    def wait(self, started: Tensor) -> Tensor:
        """[0] -> [rows that arrive, ..]"""
        return Conjugate.apply(self._wait, partial(self._start, *self.back), started)

    def _start(self, to_each: list[int], from_each: list[int], rows: Tensor) -> Tensor:
        self.sent = rows.contiguous()  # alive until it has left
        self.arriving = rows.new_empty(sum(from_each), *rows.shape[1:])
        self.axis.ledger.record("exchange", self.sent[to_each[self.axis.rank] :])  # what leaves
        self.work = dist.all_to_all_single(
            self.arriving, self.sent, from_each, to_each, group=self.axis.group, async_op=True
        )
        return rows.new_empty(0)

    def _wait(self, started: Tensor) -> Tensor:
        self.work.wait()
        arriving = self.arriving
        del self.sent, self.arriving, self.work  # which would keep both until backward
        return arriving


class GatherDispatch(Dispatch):
    """Every rank gets all tokens, and computes what its experts contribute to each."""

    def __init__(self, limit: Limit, axes: Axes) -> None:
        super().__init__(limit)
        self.axis, self.ranks = axes.ep_etp, axes.ep_etp.size
        self.num_experts //= axes.ep.size
        self.first = axes.ep.rank * self.num_experts

    def __call__(
        self, x: Tensor, weights: Tensor, experts: Tensor, run: Callable, meanwhile: Callable
    ) -> tuple[Tensor, Tensor | None]:
        gather = partial(all_gather, axis=self.axis, dim=0)  # [n, ..] -> [n ranks, ..]
        add = partial(collectives.reduce_scatter, axis=self.axis, dim=0)  # the sum of all ranks'
        x, weights = Conjugate.apply(gather, add, x), Conjugate.apply(gather, add, weights)
        mine = gather(experts) - self.first
        is_here = (mine >= 0) & (mine < self.num_experts)
        mine = mine.where(is_here, self.num_experts)  # others are as if dropped
        out, shared = super().__call__(x, weights, mine, run, meanwhile)
        return Conjugate.apply(add, gather, out), shared
