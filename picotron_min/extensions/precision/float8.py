"""Float8: numbers in 8 bits, which GPUs multiply twice as fast as bfloat16, in half the bytes.

                exponent   mantissa   largest   for
    bfloat16    8 bits     7 bits     3e38
    E4M3        4          3          448       inputs and weights: more digits
    E5M2        5          2          57344     gradients: a wider range

A tensor's numbers may lie outside of both ranges. So it is scaled before it is rounded, by as much
as its own largest number allows, and the product of two tensors is scaled back:

    amax = max |x|      scale = 448 / amax, down to a power of two      bytes = round(scale x)
    x W^T  =  bytes_x bytes_W^T / (scale_x scale_W)

Source: Micikevicius et al. 2022, "FP8 Formats for Deep Learning".
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SMALLEST_AMAX = 2.0**-100  # so zeros have a scale, too, and no scale exceeds float32's range


class Float8(NamedTuple):
    """A tensor in 8 bits. Its values are about `numbers` times `inverse`."""

    # uint8, because messages take it, and because autograd would round gradients of a float8.
    bytes: Tensor
    inverse: Tensor  # [], or [.., 1] of rows, float32: 1 / scale
    kind: torch.dtype  # E4M3 or E5M2

    @property
    def numbers(self) -> Tensor:
        return self.bytes.view(self.kind)

    def widened(self, dtype: torch.dtype) -> Tensor:  # the values, scaled back
        return self.numbers.to(dtype) * self.inverse.to(dtype)

    def transposed(self) -> "Float8":
        """[.., columns] -> [columns, rows], moved in memory: GPUs multiply only rows with rows."""
        return self._replace(bytes=self.bytes.flatten(0, -2).T.contiguous())

    def of_bytes(self, function: Callable[["Float8"], Tensor]) -> Callable[[Tensor], Tensor]:
        """A function of a Float8, as one of bytes that have this scale, such as a part of these."""
        return lambda part: function(self._replace(bytes=part))


def quantise(
    x: Tensor,
    kind: torch.dtype,
    maximum: Callable[[Tensor], Tensor] = lambda amax: amax,
    dim: int | None = None,
) -> Float8:
    """Round x to 8 bits. `maximum` takes amax over all ranks that have a part of x.

    `dim` -1: a scale for each row, see float8_rows.py; None: one for all of x.
    """
    amax = maximum(largest(x, dim))
    ratio = torch.finfo(kind).max / amax.clamp(min=SMALLEST_AMAX)
    # With a power of two x * scale is exact: a number is rounded only once, and rounding the result
    # again changes nothing. The bits of the exponent alone, without the mantissa, are the power of
    # two below a float32, exactly; exp2(floor(log2(ratio))) can be twice as large, too much.
    scale = (ratio.view(torch.int32) & 0x7F800000).view(torch.float32)
    # An infinite amax has scale 0 and an infinite inverse. 0 times inf is NaN: so is the product,
    # then the gradient's norm, and the step is skipped. The cast alone may turn inf into 448.
    bytes = (x * scale.to(x.dtype)).to(kind).contiguous().view(torch.uint8)
    return Float8(bytes, 1 / scale, kind)


def largest(x: Tensor, dim: int | None = None) -> Tensor:
    """amax = max |x|, [] in float32, or [.., 1] along dim; infinite if any is inf or NaN."""
    if dim is None and not x.numel():  # this rank must still call `maximum`: it is a collective
        return x.new_zeros((), dtype=torch.float32)
    amax = torch.linalg.vector_norm(x, math.inf, dim, keepdim=dim is not None).float()
    return amax.nan_to_num(nan=math.inf, posinf=math.inf)  # a maximum over ranks may lose a NaN


def choose_product(device_type: str, dtype: torch.dtype) -> Callable:
    """How to multiply two Float8: a [.., k], b [n, k] -> a b^T [.., n] in a dtype."""
    # torch's CPU kernel for 8 bits gives the same bits as a product in float32, and is far slower.
    on_gpu = device_type == "cuda" and dtype == torch.bfloat16
    return scaled_product if on_gpu else widened_product


def scaled_product(a: Float8, b: Float8, dtype: torch.dtype) -> Tensor:
    """a b^T in 8 bits, with sums in float32."""
    # With fast accumulation a GPU keeps fewer digits of sums: too few for gradients (E5M2).
    fast = a.kind == b.kind == E4M3
    rows, inverses = a.numbers.flatten(0, -2), (a.inverse, b.inverse)
    y = torch._scaled_mm(rows, b.numbers.T, *inverses, out_dtype=dtype, use_fast_accum=fast)
    return y.view(*a.bytes.shape[:-1], -1)


def widened_product(a: Float8, b: Float8, dtype: torch.dtype) -> Tensor:
    """a b^T in float32, or in float64 if the result is: so layouts can be compared to 1e-10."""
    wide = torch.promote_types(dtype, torch.float32)
    with torch.autocast(a.bytes.device.type, enabled=False):  # it would round sums to bfloat16
        return F.linear(a.widened(wide), b.widened(wide)).to(dtype)
