"""Sharded data parallelism (ZeRO): each rank keeps, and updates, only its own part of the model.

Each of n ranks owns some rows of every matrix:

    layer 0, 4 ranks    | q rows 0-7   | k rows 0-1 | ... |    rank 0     a buffer [n, R]:
                        | q rows 8-15  | k rows 2-3 | ... |    rank 1     row r is rank r's,
                        | q rows 16-23 | k rows 4-5 | ... |    rank 2     R elements on each
                        | q rows 24-31 | k rows 6-7 | ... |    rank 3

    gradients   reduce-scatter: each rank gets the sum of its row, and updates its weights
    weights     all-gather: each rank gets all updated rows, a layer's while the one before computes

README.md has what each choice of `sharding` keeps whole, and how often it sends that.
"""

import weakref
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from picotron_min.collectives import Axis, all_gather_single, all_reduce, reduce_scatter_single
from picotron_min.data_parallel import refuse_missing
from picotron_min.extensions.overlap.linear import Linear
from picotron_min.extensions.sharding.rows import Piece, lay_out, shard_of
from picotron_min.mesh import Axes
from picotron_min.model import Head
from picotron_min.placement import Placement


class ShardedUnit:
    """Matrices that are gathered and reduced together: a layer's, an embedding, or lm_head.

    `masters` are this rank's parts: what is initialised, updated and saved. The modules' weights
    are a cache of all ranks' masters, in the dtype to compute with; they are None before `finish`.
    """

    def __init__(
        self,
        modules: Mapping[str, list[nn.Module]],  # by a matrix's saved name, those that use it
        table: Mapping[str, Placement],
        axes: Axes,
        dtype: torch.dtype,
        device: torch.device,
        sharding: str,
        travelling: list[tuple["ShardedUnit", Tensor, dist.Work]],  # reductions of a chunk's units
    ) -> None:
        axis, *then = (axes[name] for name in table[next(iter(modules))].sums)
        self.modules, self.axis, self.then, self.travelling = modules, axis, then, travelling
        self.uses = 1  # chunks of this rank that these matrices are in
        self.frees = sharding == "parameters"  # the weights, after each use
        self.reduces_each = sharding in ("gradients", "parameters")  # of the micro-batches
        shapes = {name: users[0].weight.shape for name, users in modules.items()}
        wide = next(iter(modules.values()))[0].weight.dtype
        shards = {name: shard_of(table[name]) for name in modules}
        self.pieces, R = lay_out(shapes, shards, axis.size)
        self.flat = torch.zeros(R, dtype=wide, device=device)  # all masters
        # Gradients: of all rows while they arrive, and of this rank's row, where sums are kept.
        self.buffer = None if self.reduces_each else self.flat.new_zeros(axis.size, R)
        self.row = self.flat.new_zeros(R) if self.reduces_each else self.buffer[axis.rank]
        self.masters = {name: nn.Parameter(t) for name, t in self._mine(self.flat, shapes).items()}
        for name, gradient in self._mine(self.row, shapes).items():
            self.masters[name].grad = gradient

        this, self.weights = weakref.proxy(self), {}  # for the garbage collector, as in buckets
        for name, users in modules.items():
            of_linear = isinstance(users[0], nn.Linear) and not isinstance(users[0], Head)
            kind = {"dtype": dtype if of_linear else wide, "device": device}  # the ends stay wide
            weight = nn.Parameter(torch.empty(shapes[name], **kind))
            self.weights[name] = weight
            weight.register_post_accumulate_grad_hook(
                lambda weight, name=name: this.arrived(name, weight.grad)
            )
            if isinstance(users[0], Linear):  # gradients may come from a queue, not from autograd
                users[0].add_gradient = lambda dw, name=name: this.arrived(name, dw)
        self.arriving: tuple[Tensor, dist.Work] | None = None
        self.free()
        self.begin(0)

    def _mine(self, row: Tensor, shapes: Mapping[str, Sequence[int]]) -> dict[str, Tensor]:
        """This rank's part of each matrix, as a view of its row; not all have rows here."""
        return {
            name: row[piece.start : piece.start + piece.width].view(-1, shapes[name][1])
            for name, pieces in self.pieces.items()
            for piece in pieces
            if piece.ranks.start <= self.axis.rank < piece.ranks.stop
        }

    # Weights: start, finish, use, and with sharding="parameters" free.

    def start(self) -> None:
        """Begin to gather the weights, unless they are here or arriving."""
        if not self.is_current and not self.arriving:
            buffer = next(iter(self.weights.values())).new_empty(self.axis.size, len(self.flat))
            buffer[self.axis.rank] = self.flat
            self.arriving = buffer, start_all_gather_(buffer, self.axis)

    def finish(self) -> None:
        """Wait for what `start` began; the weights may be used from here on."""
        if not self.arriving:
            return
        buffer, work = self.arriving
        work.wait()
        for name, weight in self.weights.items():
            weight.untyped_storage().resize_(weight.nbytes)
            for piece in self.pieces[name]:
                # Through .data, past autograd's versions: forward has saved this memory, which
                # backward would refuse as modified.
                inside, rows = _views(piece, buffer, weight.data)
                rows.copy_(inside)
            self._set(name, weight)
        self.arriving, self.is_current = None, True

    def free(self) -> None:
        """Give the weights' memory back; the tensors stay, since autograd has saved them."""
        self.is_current = False
        for name, weight in self.weights.items():
            weight.untyped_storage().resize_(0)
            self._set(name, None)  # an early use is an error, not a crash

    def _set(self, name: str, weight: nn.Parameter | None) -> None:
        for module in self.modules[name]:
            module._parameters["weight"] = weight
            if isinstance(module, Linear):
                module.refresh()  # its bytes in FP8

    # Gradients: begin, wait and scale are called as in GradientBuckets.

    def begin(self, num_backwards: int) -> None:
        """Expect `num_backwards` gradients of each matrix a use; the first replaces an old sum."""
        self.num_backwards, self.num_complete = num_backwards * self.uses, 0
        self.arrivals = dict.fromkeys(self.weights, 0)
        if self.reduces_each:
            self.row.zero_()

    def arrived(self, name: str, gradient: Tensor) -> None:
        """Add a weight's gradient to the buffer. A backward's last one may start the reduction.

        From a queue it comes when the weight may have been freed, and wider than that in FP8.
        """
        if self.buffer is None:
            self.buffer = self.row.new_empty(self.axis.size, len(self.row))
        is_first = self.reduces_each or not self.arrivals[name]
        for piece in self.pieces[name]:
            inside, part = _views(piece, self.buffer, gradient)
            # A buffer is never zeroed, which would be another pass over its memory: what nothing is
            # copied to, between pieces, is sent, but not read.
            inside.copy_(part) if is_first else inside.add_(part)
        self.weights[name].grad = None
        self.arrivals[name] += 1
        if min(self.arrivals.values()) > self.num_complete:
            self.num_complete += 1
            if self.reduces_each or self.num_complete == self.num_backwards:
                if self.reduces_each:  # of all units, one buffer travels while another fills
                    self._finish_reductions()
                reduction = start_reduce_scatter_(self.buffer, self.axis)
                self.travelling.append((self, self.buffer, reduction))
                if self.reduces_each:
                    self.buffer = None  # the next backward may begin before this one has arrived

    def _finish_reductions(self) -> None:
        while self.travelling:
            unit, buffer, reduction = self.travelling.pop(0)
            reduction.wait()
            if unit.reduces_each:
                unit.row += buffer[unit.axis.rank]

    def wait(self) -> None:
        """Return when gradients are sums over all axes; RuntimeError if any are missing."""
        refuse_missing({name: self.num_backwards - n for name, n in self.arrivals.items()})
        self._finish_reductions()
        for axis in self.then:  # a tied embedding: the two ends of a pipeline
            all_reduce(self.row, axis)

    def scale(self, factor: float) -> None:
        self.row.mul_(factor)


def _views(piece: Piece, buffer: Tensor, matrix: Tensor) -> tuple[Tensor, Tensor]:
    """A piece in the buffer [n, R] and in its matrix, as views [ranks, width] of both."""
    inside = buffer[piece.ranks, piece.start : piece.start + piece.width]
    return inside, matrix[piece.rows].view(-1, piece.width)


# In place: the rows of a buffer [n, R] are the ranks' own.


def start_all_gather_(rows: Tensor, axis: Axis) -> dist.Work:
    """Begin to fill rows [n, R], of which each rank has made its own."""
    axis.ledger.record("all_gather", rows, axis.share)
    return all_gather_single(rows.flatten(), rows[axis.rank], group=axis.group, async_op=True)


def start_reduce_scatter_(rows: Tensor, axis: Axis) -> dist.Work:
    """Begin to sum rows [n, R]: a rank's own row is the sum, the others hold anything."""
    axis.ledger.record("reduce_scatter", rows, axis.share)
    return reduce_scatter_single(rows[axis.rank], rows.flatten(), group=axis.group, async_op=True)
