"""Both ends of a sublayer, called twice as a layer calls them: for exercises 10 and 11.

x -> gather_multiply -> x A, x B        u, v -> multiply_scatter -> u C + v D, of all ranks
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from exercises.compare import SumOf
from exercises.counts import order_problem
from exercises.exercise import Case, Sent, draw
from exercises.memory import storage_bytes
from exercises.ranks import Rank, Record

SEQUENCE = "SequenceBoundary"
# Two: the second call shows what the first has left in the boundary.
CALLS = 2


def whole_x(case: Case, call: int) -> Tensor:
    return draw(case, "x", call, shape=(case.batch, case.length, case.hidden))


def first_weights(case: Case, rank: int) -> list[Tensor]:
    return [draw(case, k, rank, shape=(case.hidden, case.inner)) for k in "AB"]


def last_products(case: Case, rank: int, call: int) -> list[tuple[Tensor, Tensor]]:
    """u and C, v and D of a rank."""
    shape = case.batch, case.length, case.inner
    inputs = [draw(case, k, rank, call, shape=shape) for k in "uv"]
    weights = [draw(case, k, rank, shape=(case.inner, case.hidden)) for k in "CD"]
    return list(zip(inputs, weights, strict=True))


def product(weight: Tensor, x: Tensor) -> Tensor:
    """In another order in memory: a message needs it contiguous."""
    return (x @ weight).mT.contiguous().mT


def on_rank(rank: Rank, case: Case) -> dict[str, Any]:
    """What a rank has of both ends; marks where `meanwhile` is called."""
    boundary = getattr(rank.course.boundary, case.kind)(rank.axis("tp"), None)
    results = {"maximum": boundary.maximum(torch.tensor(2.0 + rank.number)).item()}
    for call in range(CALLS):
        x = mine = whole_x(case, call)
        if case.kind == SEQUENCE:
            mine = x.chunk(case.ranks, 1)[rank.number].contiguous()
        firsts = [partial(product, weight) for weight in first_weights(case, rank.number)]
        x, products = boundary.gather_multiply(mine, firsts)
        xs, weights = zip(*last_products(case, rank.number, call), strict=True)
        # The forward of a sublayer's end has nothing to do meanwhile.
        meanwhile = {} if call else {"meanwhile": partial(rank.mark, "meanwhile")}
        y = boundary.multiply_scatter(xs, [partial(product, w) for w in weights], **meanwhile)
        results |= {f"x of call {call}": x, f"products of call {call}": products}
        results |= {f"sum of call {call}": y, "bytes": storage_bytes([y])}
    return results


def expected(case: Case) -> list[dict[str, Any]]:
    results, cuts = [{} for _ in range(case.ranks)], case.kind == SEQUENCE
    for call in range(CALLS):
        x = whole_x(case, call)
        parts = [sum(a @ b for a, b in last_products(case, r, call)) for r in range(case.ranks)]
        for rank, result in enumerate(results):
            mine = [part.chunk(case.ranks, 1)[rank] for part in parts] if cuts else parts
            result |= {f"x of call {call}": x, f"sum of call {call}": SumOf(mine)}
            result[f"products of call {call}"] = [x @ w for w in first_weights(case, rank)]
            # Where each rank has all positions, all have the same largest value.
            result["maximum"] = 1.0 + case.ranks if cuts else 2.0 + rank
    return results


def traffic(case: Case, rank: int) -> dict[str, Sent]:
    """A sum of [B, S, E] in each call."""
    share = (case.ranks - 1) / case.ranks
    size = CALLS * share * 8 * case.batch * case.length * case.hidden
    if case.kind != SEQUENCE:
        return {"all_reduce": Sent(CALLS, 2 * size)}
    sent = {"all_gather": Sent(CALLS, size), "reduce_scatter": Sent(CALLS, size)}
    return sent | {"all_reduce": Sent(1, 2 * share * 4)}  # of the largest value


def order(case: Case, rank: int, record: Record) -> str | None:
    """The sum of a sublayer's end travels while `meanwhile` is called."""
    message = "reduce_scatter" if case.kind == SEQUENCE else "all_reduce"
    rows = (
        (f"start {message}", 1, 1, "meanwhile", "the rank below waits for the sum, too"),
        (f"wait {message}", 0, 0, "meanwhile", "nothing hides the message"),
    )
    return order_problem(rows, case, rank, record)
