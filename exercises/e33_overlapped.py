"""33 overlapped: rows are sent while the next ones are multiplied

target: extensions.overlap.ring:RingBoundary.multiply_scatter
train: distributed.tp_size=2 distributed.sequence_parallel=true distributed.tp_overlap=true

Each rank has xs, some [B, S, ..], and a product for each of them. Sum what add_products makes of
them over all ranks, and return this rank's rows of the sum, [B, S/n, ..]: rank r's rows are the
r-th of n chunks of S. Nothing is computed for all S at once. Multiply the rows of another rank,
begin to send the result straight to it (a Shift over some distance), and multiply the next rank's
meanwhile; this rank's own rows last. Call meanwhile(), and only then wait.
Add the n contributions in the order of their ranks, 0 first, whichever rank adds them, and in
float32 (`wide`); return the sum in the dtype of the products.
Read: extensions/overlap/ring.py, collectives.py.

? n-1 times multiply and send, then this rank's own rows, meanwhile(), and the sum of n parts.
? x.chunk(n, dim=1), add_products, Shift(tensor, axis, distance), shift.wait, wide.
? For distances 1 to n-1, the rows belong to rank + distance, and what arrives by that Shift is
  of rank - distance, both modulo n. Collect the Shifts in a list, and wait for all of them at the
  end. Then put the n parts in the order of their ranks, make them wide, and add them.
! n-1 messages, each behind the next one's product, have the bytes of 1 reduce-scatter. In
  production: `torch.ops.symm_mem.fused_matmul_reduce_scatter`.
"""

from functools import partial

import torch

from exercises.exercise import Case, Dice, Sent, draw
from exercises.pictures import timeline

B, E, LENGTH = 2, 3, 2  # LENGTH: of each rank's rows


def cases(_: Dice) -> list[Case]:
    kinds = ((1, "float64"), (2, "float64"), (3, "float64"), (4, "float64"), (3, "bfloat16"))
    some = [Case(ranks, inputs=3, dtype=dtype) for ranks, dtype in kinds]
    # The contributions of two ranks cancel each other.
    return some + [Case(4, inputs=2, dtype="float64", cancels=two) for two in ((0, 1), (1, 2))]


def parts(case: Case, rank: int):
    """What a rank contributes to all rows, a tensor for each input, and these inputs."""
    dtype, shape = getattr(torch, case.dtype), (B, case.ranks * LENGTH, E)
    xs = [draw(case, "x", rank, i, shape=shape).to(dtype) for i in range(case.inputs)]
    weights = [draw(case, "w", rank, i, shape=(E,)).to(dtype) for i in range(case.inputs)]
    cancels = getattr(case, "cancels", ())
    if rank in cancels:  # so large that another order gives another sum
        xs = [torch.full_like(x, (-1) ** cancels.index(rank) * 2.0**60) for x in xs]
        weights = [torch.ones_like(weight) for weight in weights]
    return xs, weights


def on_rank(rank, case: Case) -> dict:
    course, rows = rank.course, []
    xs, weights = parts(case, rank.number)
    xs = [x.double() for x in xs]  # the dtype is of the products

    def multiply(x, weight=weights[0]):  # so small a product is the same for some rows as for all
        if weight is weights[0]:
            rank.mark("multiply")
            rows.append(x.shape[1])
        return x.to(weight.dtype) * weight

    boundary = course.ring.RingBoundary(rank.axis("tp"), course.linear.WeightGradients())
    products = [partial(multiply, weight=weight) for weight in weights]
    y = boundary.multiply_scatter(xs, products, lambda: rank.mark("meanwhile"))
    return {"y": y, "dtype": str(y.dtype), "rows of each product": rows}


def expected(case: Case) -> list[dict]:
    wholes, dtype = [], getattr(torch, case.dtype)
    for rank in range(case.ranks):
        xs, weights = parts(case, rank)
        whole = sum(map(torch.mul, xs, weights))  # rounded to the dtype, as a linear's result is
        wholes.append(whole.to(torch.promote_types(dtype, torch.float32)))
    results = {"dtype": str(dtype), "rows of each product": [LENGTH] * case.ranks}
    places = [slice(r * LENGTH, (r + 1) * LENGTH) for r in range(case.ranks)]
    return [{"y": sum(wholes)[:, place].to(dtype)} | results for place in places]


def traffic(case: Case) -> list[dict[str, Sent]]:
    others, size = case.ranks - 1, B * LENGTH * E * (8 if case.dtype == "float64" else 2)
    return [{"send as shift": Sent(others, others * size)}] * case.ranks


def order(case: Case, rank: int, record) -> str | None:
    if record.count("mark", "meanwhile") != 1:
        return f"rank {rank} calls meanwhile() {record.count('mark', 'meanwhile')} times, not 1"
    if (n := record.count("mark", "multiply")) != case.ranks:
        return f"rank {rank} multiplies {n} times, not {case.ranks}"
    if case.ranks == 1:
        return None
    n, last = case.ranks - 1, record.place("mark", "multiply", case.ranks - 1)
    if late := sum(record.place("start", "send", i) > last for i in range(n)):
        return f"rank {rank} begins {late} of its {n} messages after its last product"
    ends = "send", "receive"
    if any(record.count("wait", what) < n for what in ends):
        return f"rank {rank} does not wait for both ends of its messages: Shift.wait does"
    wait = min(record.place("wait", what) for what in ends)
    if wait < last:
        return f"rank {rank} waits for a message before its last product"
    if wait < record.place("mark", "meanwhile"):
        return f"rank {rank} waits for a message before it calls meanwhile()"
    if record.place("start", "send", n - 1) > record.place("mark", "meanwhile"):
        return f"rank {rank} calls meanwhile() before all of its messages have begun"
    for i in range(n):
        if record.place("start", "send", i) > record.place("mark", "multiply", i + 1):
            return f"rank {rank} begins message {i} after product {i + 1}, which could hide it"


def picture(runs):
    names = {"send": "s", "receive": "r", "multiply": "xW"}
    about = "xW: one rank's rows are multiplied; (s0: they begin to travel; s0): that is awaited;"
    about += " r: what arrives"
    return [about, timeline(runs[2][1], names)]


VERSIONS = """
own_first: This rank's own rows are multiplied first: then nothing hides the last message.
    shifts = [] => shifts, own = [], part(axis.rank)
    own = part(axis.rank) =>
rows_of_another: The rows do not belong to the rank that gets them, but to one on the other side.
    (axis.rank + distance) % n => (axis.rank - distance) % n
one_hop: Every message goes to the next rank: rows must go straight to the rank they are of.
    axis, distance => axis
own_left_out: This rank's own contribution is left out of the sum.
    for shift in shifts), own] => for shift in shifts), own * 0]
added_in_bfloat16: What has arrived is added in the dtype of the products: each addition is rounded.
    map(wide, in_order) => in_order
all_rows_at_once: All rows are multiplied at once, and then cut: no product hides a message.
    shifts = [] => shifts, whole = [], add_products(xs, products).chunk(n, dim=1)
    add_products([x.chunk(n, dim=1)[rank] for x in xs], products) => whole[rank].contiguous()
added_as_arrived: Contributions are added from the own one on, in the order of distances: each rank
    adds in another order, and rounds differently.
    (axis.rank - rank - 1) % n => rank - 1
last_rank_first: Contributions are added from the last rank down to the first: the order begins with
    0.
    for rank in range(n)) => for rank in reversed(range(n)))
own_one_last: What arrives is added first, this rank's own contribution last: each rank adds in
    another order.
    (axis.rank - rank - 1) % n => rank
one_place_off: The order is one place off: the last rank's contribution comes first, not rank 0's.
    (axis.rank - rank - 1) % n => (axis.rank - rank) % n
sums_in_a_ring: Sums go from neighbour to neighbour, and each rank adds to them: the order of
    additions differs between ranks, and each message waits for the one before.
- shifts.append(Shift(part((axis.rank + distance) % n), axis, distance))
+ y = part((axis.rank - distance) % n)
+ shifts = [Shift(shifts[0].wait().add(y) if shifts else y, axis)]
    (arrived[(axis.rank - rank - 1) % n] for rank in range(n)) => arrived
sources_the_wrong_way: What arrives over a distance is taken to be of rank + distance. It is of rank
    - distance: so contributions are not added in the order of ranks.
    (axis.rank - rank - 1) % n => (rank - axis.rank - 1) % n
strided_rows: Rows are dealt like cards, every n-th to a rank: they must be one chunk of S.
    x.chunk(n, dim=1)[rank] => x[:, rank::n]
also_right:
- for distance in range(1, n):
-     shifts.append(Shift(part((axis.rank + distance) % n), axis, distance))
+ for other in [*range(axis.rank + 1, n), *range(axis.rank)]:
+     shifts.append(Shift(part(other), axis, (other - axis.rank) % n))
    reduce(Tensor.add_, map(wide, in_order)) => sum(map(wide, in_order))
"""
