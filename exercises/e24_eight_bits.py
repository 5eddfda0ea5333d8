"""24 eight bits: round once, with a scale that all ranks share

target: extensions.precision.float8:quantise
train: model.dtype="bfloat16" model.fp8=true

Round x to 8 bits of the format `kind`, and return Float8(bytes, inverse, kind): bytes as uint8, one
after the other in memory; inverse as a float32 of shape []. The scale is the largest power of two
with which no number exceeds the format, and inverse is 1 / scale. `maximum` turns this rank's
largest(x, dim), dim is None, into all ranks' largest. An amax below SMALLEST_AMAX counts as this.
If it is infinite, the scale is 0: then all of a product is NaN, and the step is skipped.
Read: extensions/precision/float8.py.

? Find the scale first: the largest power of two that keeps amax of all ranks in the format.
? maximum(largest(x, dim)), torch.finfo(kind).max, clamp, view(torch.int32), to(kind), contiguous,
  view(torch.uint8).
? Divide the format's largest number by amax. A float32 has 1 bit for the sign, 8 for the exponent
  and 23 for the mantissa: set the last 23 of the ratio to 0. log2 cannot replace that: just below a
  power of two it is rounded up. Multiply x by this scale, in x's dtype, convert to `kind`, and view
  as bytes.
! 1 byte a number, and E4M3 changes each by up to 6%, E5M2 by up to 12%, unless it is far below the
  largest one. In production: `torchao.float8`.
"""

from functools import partial

import torch
import torch.distributed as dist

from exercises.exercise import Case, Dice, Sent, draw

# The largest number of x, in units of the format's; just above 2^-20 the scale is below 2^20.
RANGES = {"small": 1e-9, "large": 1e9, "edge": 2.0**-20 * (1 + 2**-23)}
LARGEST = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}  # of each format


def cases(dice: Dice) -> list[Case]:
    e4, e5 = LARGEST
    # Both formats, and numbers at the edge of what they hold.
    kinds = [(1, e4, "small"), (1, e5, "large"), (1, e4, "zeros"), (2, e4, "small")]
    kinds += [(2, e5, "infinite"), (1, e4, "edge"), (2, e4, "empty")]
    rows, columns = dice.randint(3, 5), dice.randint(6, 9)
    return [Case(n, kind=k, range=r, rows=rows, columns=columns) for n, k, r in kinds]


def part(case: Case, rank: int):
    """x of a rank, transposed in memory. Its largest number is negative, as is the last rank's.

    As in training, what is rounded to E5M2 is bfloat16.
    """
    x = draw(case, "x", rank, shape=(case.columns, case.rows)).float()
    x *= 100.0 ** -torch.arange(case.rows) / 4  # rows of smaller and smaller numbers
    x[0, 0] = -x.abs().max() * (1 + rank)
    if case.range in RANGES:
        largest = RANGES[case.range] * LARGEST[case.kind] / (case.ranks - rank)
        x = (x / x.abs().max() * largest).clamp(-largest, largest)
        x[0, 0] = -largest
    elif case.range == "zeros":
        x.zero_()
    elif case.range == "infinite" and rank == 0:
        x[1, 1] = float("inf")
    elif case.range == "empty" and rank == 1:
        x = x[:, :0]
    return x.T.to(torch.bfloat16 if "e5" in case.kind else torch.float32)


def on_rank(rank, case: Case) -> dict:
    x, kind = part(case, rank.number), getattr(torch, case.kind)
    all_reduce = partial(rank.course.collectives.all_reduce, axis=rank.axis("tp"))
    shared = {"maximum": partial(all_reduce, op=dist.ReduceOp.MAX)} if case.ranks > 1 else {}
    result = rank.course.float8.quantise(x, kind, **shared)
    results = {"numbers": result.numbers.double(), "inverse": result.inverse}
    results["the product with 1"] = result.widened(torch.float64)
    results["bytes and inverse are"] = f"{result.bytes.dtype}, {result.inverse.dtype}"
    return results | {"bytes are contiguous": result.bytes.is_contiguous()}


def expected(case: Case) -> list[dict]:
    kind = getattr(torch, case.kind)
    table = torch.arange(256, dtype=torch.uint8).view(kind).double()  # all numbers of the format
    parts = [part(case, rank).double() for rank in range(case.ranks)]
    amax = max(float(x.abs().max()) for x in parts if x.numel())
    # For zeros it is 2^108: 448 is between 2^8 and 2^9, SMALLEST_AMAX is 2^-100.
    scales = (2.0**exponent for exponent in range(108, -200, -1))
    scale = next((x for x in scales if amax * x <= LARGEST[case.kind]), 0.0)
    results = []
    for x in parts:
        distance = (x[..., None] * scale - table).abs().nan_to_num(nan=float("inf"))
        odd = 1 + torch.arange(256).double() % 2 * 1e-12  # of two as near, it takes the even one
        numbers = table[(distance * odd).argmin(-1)]
        numbers = torch.where((x * scale).isnan(), float("nan"), numbers)
        inverse = torch.tensor(1 / scale if scale else float("inf"))
        result = {"numbers": numbers, "inverse": inverse}
        result["the product with 1"] = numbers * inverse.double()
        result["bytes and inverse are"] = "torch.uint8, torch.float32"
        results.append(result | {"bytes are contiguous": True})
    return results


def traffic(case: Case, rank: int) -> dict[str, Sent]:
    return {"all_reduce": Sent(1, 2 * (case.ranks - 1) / case.ranks * 4)}


MISTAKES = """
any_scale: The scale is no power of two: numbers are rounded when multiplied, and again in 8 bits.
    scale = (ratio.view(torch.int32) & 0x7F800000).view(torch.float32) => scale = ratio
power_above: The power of two is the next one above: the largest numbers exceed the format.
    0x7F800000).view(torch.float32) => 0x7F800000).view(torch.float32) * 2
own_maximum: Each rank scales by its own largest number: parts of one tensor need one scale.
    maximum(largest(x, dim)) => largest(x, dim)
one_format: Every format is scaled to 448, the largest number of E4M3: E5M2 goes to 57344.
    torch.finfo(kind).max => 448.0
no_sign: The largest number is taken, not the largest absolute one: negative ones are too large.
    maximum(largest(x, dim)) => maximum(x.max().float().nan_to_num(nan=math.inf, posinf=math.inf))
infinity_hidden: An infinite amax gets a scale like any other: rows and ranks without an infinite
    number have a finite product, where all of it must be NaN.
    .clamp(min=SMALLEST_AMAX) => .clamp(SMALLEST_AMAX, 3e38)
"""
