"""Float8 rows: a mixture's experts multiply in 8 bits, with a scale for each row of both factors.

    y[r, n]  =  bytes_x[r] bytes_W[n] / (scale_x[r] scale_W[n])        x [r, k]    W [n, k]

The scale of a whole tensor, as in float8.py, would depend on which tokens the router sends to a
rank. A row's depends on the row alone: however tokens and experts are spread, the bytes are the
same, and N ranks train what one rank does. etp ranks have parts of the rows of down's input, and of
the gradients of gate and up. Each part has a scale of its own, finer than the row's: no message.

W is rounded twice, since dx = dy W has other rows: those of W^T. All is E4M3, the only format that
GPUs multiply in groups; within a row it spans 2^18, and a row of gradients needs no more.

In production: Transformer Engine's grouped linear, torchao's training of mixtures.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from picotron_min.extensions.precision.float8 import (
    E4M3,
    Float8,
    choose_product,
    quantise,
    scaled_product,
    widened_product,
)


class RowProducts:
    """Products of rounded rows x [r, k], sorted by expert, with w [X, n, k] -> [r, n]."""

    def __init__(self, device_type: str, dtype: torch.dtype) -> None:
        on_gpu = choose_product(device_type, dtype) is scaled_product
        self.dtype, self.product = dtype, scaled_rows if on_gpu else widened_product

    def quantise(self, x: Tensor) -> Float8:
        """Round x [.., k], with a scale for each row."""
        return quantise(x, E4M3, dim=-1)

    def in_groups(self, x: Float8, w: Float8, ends: Tensor) -> Tensor:
        """One kernel for all experts, given where the rows of each end."""
        inverses = x.inverse[:, 0], w.inverse[..., 0]
        factors = x.numbers, w.numbers.mT  # the kernel aligns only k and n, to 16
        return torch._scaled_grouped_mm(*factors, *inverses, offs=ends, out_dtype=self.dtype)

    def one_by_one(self, x: Float8, w: Float8, sizes: Sequence[int]) -> Tensor:
        """A product for each expert, given how many rows each has."""
        rows = zip(x.bytes.split(sizes), x.inverse.split(sizes), strict=True)
        weights = zip(w.bytes, w.inverse, strict=True)
        pairs = (
            (Float8(*a, x.kind), Float8(*b, w.kind)) for a, b in zip(rows, weights, strict=True)
        )
        return torch.cat([self.product(*pair, self.dtype) for pair in pairs])


def scaled_rows(a: Float8, b: Float8, dtype: torch.dtype) -> Tensor:
    """a [r, k], b [n, k] -> a b^T, in 8 bits."""
    inverses = a.inverse, b.inverse.T
    return torch._scaled_mm(a.numbers, b.numbers.T, *inverses, out_dtype=dtype)
