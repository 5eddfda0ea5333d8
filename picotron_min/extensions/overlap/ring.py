"""Ring boundary: tensor parallelism whose messages travel while it multiplies.

With sequence parallelism a sublayer begins with an all-gather and ends with a reduce-scatter, and
neither has anything to hide behind. But rows of a product need only the same rows of its input. So
both are cut into n parts, which are sent one by one. Rank 1 of 4, x2 being rank 2's rows of x:

    gather, multiply     multiply     x1 W    x0 W    x3 W    x2 W
                         receive      x0      x3      x2              from rank 0, in a ring

    multiply, scatter    multiply     x2 W    x3 W    x0 W    x1 W
                         send                 to 2    to 3    to 0    each straight to its owner

It sends the bytes of the two collectives, (n-1)/n b each. README.md has what that hides.
"""

from collections.abc import Callable, Sequence
from functools import reduce

from torch import Tensor

from picotron_min.collectives import Shift, ring
from picotron_min.extensions.overlap.boundary import Products, SequenceBoundary, add_products
from picotron_min.loss import wide


class RingBoundary(SequenceBoundary):
    """A SequenceBoundary that sends parts, [B, S/tp, E] each, while it multiplies others."""

    def gather_multiply(self, x: Tensor, products: Products) -> tuple[Tensor, list[Tensor]]:
        n, wholes = self.axis.size, []
        for rank, part in ring(x.contiguous(), self.axis):
            # Backward needs all of x, and attention all of each product: parts are joined.
            parts = [part, *(product(part) for product in products)]  # [B, S/n, ..] each
            wholes = wholes or [t.new_empty(len(t), n, *t.shape[1:]) for t in parts]
            for whole, t in zip(wholes, parts, strict=True):
                whole[:, rank] = t
        x, *ys = (whole.flatten(1, 2) for whole in wholes)
        return x, ys

    def multiply_scatter(
        self, xs: Sequence[Tensor], products: Products, meanwhile: Callable = lambda: None
    ) -> Tensor:
        axis, n = self.axis, self.axis.size

        def part(rank: int) -> Tensor:  # what this rank contributes to a rank's rows of the sum
            return add_products([x.chunk(n, dim=1)[rank] for x in xs], products)

        shifts = []
        for distance in range(1, n):  # all ranks send equally far: each receives one part at a time
            shifts.append(Shift(part((axis.rank + distance) % n), axis, distance))
        own = part(axis.rank)  # last, because it does not travel: it hides the message before it
        meanwhile()
        # From this rank - 1, from this rank - 2, ..., and its own, as if from this rank - n.
        arrived = [*(shift.wait() for shift in shifts), own]
        # Added in the order of ranks, and in float32: a reduce-scatter rounds after each addition.
        in_order = (arrived[(axis.rank - rank - 1) % n] for rank in range(n))
        return reduce(Tensor.add_, map(wide, in_order)).to(own.dtype)
