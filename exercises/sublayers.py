"""Two sublayers of tensor parallelism, forward and backward, and the same two in one process.

    parts of x -> sum -> x += sublayer(norm(x)) -> x += sublayer(norm(x)) -> loss

The first is like attention, with q, k, v and o, the second an MLP, with gate, up and down. Both mix
the positions of a sequence: each adds up those before it. So it matters which way a tensor is cut.
"""

import math
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from exercises.exercise import Case, Sent, draw
from exercises.memory import SavedTensors
from exercises.ranks import Rank, Record
from picotron_min.extensions.overlap.linear import Linear

LINEARS = ("q", "k", "v", "o"), ("gate", "up", "down")  # of each sublayer; the last one ends it
MESSAGE = {"Boundary": "all_reduce", "SequenceBoundary": "reduce_scatter"}  # of a sum, by kind


class Sublayer(nn.Module):
    """What `put_around` of boundary.py expects."""

    def __init__(self, linears: dict[str, Linear]) -> None:
        super().__init__()
        for name, linear in linears.items():
            self.add_module(name, linear)
        *self.first, self.last = linears.values()

    def project(self, x: Tensor) -> list[Tensor]:
        return [linear(x) for linear in self.first]

    def forward(self, x: Tensor) -> Tensor:
        return self.last(mixed(*self.project(x)))


def mixed(first: Tensor, *others: Tensor) -> Tensor:
    """Of q, k, v, or of gate, up; k and v may be narrower, as with fewer key heads."""
    width = first.shape[-1]
    repeated = (x.repeat_interleave(width // x.shape[-1], -1) for x in others)
    return F.silu(first.cumsum(1)) * math.prod(repeated)


def dtype_of(case: Case) -> torch.dtype:
    return getattr(torch, getattr(case, "dtype", "float64"))


def data(case: Case) -> tuple[Tensor, Tensor, list[dict[str, Tensor]]]:
    """The parts of x, one a rank, [n, B, S, E]; the gradient of the loss; all weights."""
    B, S, E = case.batch, case.length, case.hidden
    shapes = dict.fromkeys(("q", "gate", "up"), (case.inner, E))
    shapes |= dict.fromkeys(("k", "v"), (getattr(case, "keys", case.inner), E))
    shapes |= dict.fromkeys(("o", "down"), (E, case.inner))

    def drawn(*key: object, shape: tuple[int, ...]) -> Tensor:
        return draw(case, *key, shape=shape).to(dtype_of(case))

    weights = [{k: drawn(k, shape=shapes[k]) / 2 for k in names} for names in LINEARS]
    return drawn("x", shape=(case.ranks, B, S, E)), drawn("upstream", shape=(B, S, E)), weights


def part(name: str, weight: Tensor, rank: int, n: int) -> Tensor:
    return weight.chunk(n, 1 if name in ("o", "down") else 0)[rank]


def norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:])


def run_cut(rank: Rank, case: Case, kind: str) -> dict[str, Any]:
    """What a rank has of the result and of all gradients; `kind` of boundary.

    Marks "backward", and "weight gradients" where these are computed.
    """
    course, axis, n = rank.course, rank.axis("tp"), case.ranks
    queue = course.linear.WeightGradients()
    queue.hold = True
    boundary = getattr(course.boundary, kind)(axis, queue)
    ends = course.tensor_parallel.Ends(axis, sequence_parallel=kind == "SequenceBoundary")
    own_largest = 2.0 + rank.number * (kind == "SequenceBoundary")
    largest = boundary.maximum(torch.tensor(own_largest, dtype=torch.float64))
    x, upstream, weights = data(case)
    mine = x[rank.number].clone().requires_grad_()
    sublayers, kept = [], 0
    for whole in weights:
        parts = {k: part(k, weight, rank.number, n).clone() for k, weight in whole.items()}
        linears = {k: course.linear.Linear(nn.Parameter(own)) for k, own in parts.items()}
        for linear in linears.values():
            linear.gradient_arrived = partial(rank.mark, "weight gradients")
        sublayers.append(Sublayer(linears))
        enter = partial(course.boundary._Enter.apply, boundary)
        leave = partial(course.boundary._leave, boundary)
        *first, last = linears
        course.boundary.put_around(sublayers[-1], first, last, enter, leave)
    out = ends.leave(mine)
    for sublayer in sublayers:
        with SavedTensors() as saved:
            normed = norm(out)
        kept += saved.bytes
        out = out + sublayer(normed)
    if kind == "SequenceBoundary":
        upstream = upstream.chunk(n, 1)[rank.number]
    rank.mark("backward")
    out.backward(upstream)
    results = {"output": out.detach(), "gradient of the input": mine.grad}
    results["what maximum returns"] = largest.item()
    named = (pair for sublayer in sublayers for pair in sublayer.named_children())
    results |= {f"gradient of {name}": linear.weight.grad for name, linear in named}
    return results | {"kept by norms": kept}


def run_whole(case: Case, kind: str) -> list[dict[str, Any]]:
    """What every rank must have: by autograd, in one process; no result in bfloat16 is exact."""
    x, upstream, weights = data(case)
    leaf = x.sum(0).requires_grad_()
    leaves = [{k: w.requires_grad_() for k, w in whole.items()} for whole in weights]
    out = leaf
    for whole in leaves:
        *first, last = whole.values()
        x = norm(out)
        out = out + F.linear(mixed(*(F.linear(x, w) for w in first)), last)
    out.backward(upstream)
    results, cuts_sequence = [], kind == "SequenceBoundary"
    for rank in range(case.ranks):
        y = out.detach().chunk(case.ranks, 1)[rank] if cuts_sequence else out.detach()
        results.append({"output": y, "gradient of the input": leaf.grad})
        # Where each rank has all positions, all have the same largest value.
        results[-1]["what maximum returns"] = 1.0 + case.ranks if cuts_sequence else 2.0
        for k, w in (pair for whole in leaves for pair in whole.items()):
            results[-1][f"gradient of {k}"] = part(k, w.grad, rank, case.ranks)
    return results if y.dtype == torch.float64 else [{}] * case.ranks


def traffic_of(case: Case, kind: str) -> list[dict[str, Sent]]:
    """Sums of [B, S, E]: of the input, and of 2 sublayers, there and back."""
    n, share = case.ranks, (case.ranks - 1) / case.ranks
    size = 5 * share * dtype_of(case).itemsize * case.batch * case.length * case.hidden
    if kind == "Boundary":
        return [{"all_reduce": Sent(5, 2 * size)}] * n
    sent = {"all_gather": Sent(5, size), "reduce_scatter": Sent(5, size)}
    return [sent | {"all_reduce": Sent(1, 2 * share * 8)}] * n  # of the largest value


def overlap_problem(rank: int, record: Record, kind: str) -> str | None:
    """What is wrong with the order in backward: start of a message, weight gradients, its end."""
    operation = MESSAGE[kind]
    events = record.events[record.place("mark", "backward") :]
    words = [e.kind for e in events if e.what in (operation, "weight gradients")]
    if "start" not in words:
        return f"rank {rank} starts no {operation} in backward, which weight gradients could hide"
    if "wait" not in words:
        return f"rank {rank} does not wait for its {operation}: the sum may not be there yet"
    for before, after in pairwise(words):
        if (before, after) == ("start", "wait"):
            what = f"rank {rank} waits for its {operation} before weight gradients are computed"
            return f"{what}: nothing hides the message"
        if (before, after) == ("mark", "start"):
            what = f"rank {rank} computes weight gradients before it starts its {operation}"
            return f"{what}: the rank below waits for both"
