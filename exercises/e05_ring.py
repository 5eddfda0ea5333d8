"""05 ring: n-1 hops, and the next one is on its way while you compute

target: collectives:ring
train: distributed.cp_size=4 distributed.tp_size=1

Yield (rank, tensor) for every rank of the axis: first this rank and its own tensor, then the
previous rank's, then the one before's, and so on. A tensor moves by `Shift`, one hop to the
next rank at a time. Begin a hop before you yield, so that it travels while the caller computes.
Read: collectives.py.

? n ranks need n-1 hops. In each hop a rank passes on the tensor that came in the hop before.
? Shift(tensor, axis), shift.wait(), axis.rank, axis.size; % axis.size for the sources.
? In a loop over hop = 0 .. n-2: begin to shift the tensor; yield it with its source, the rank
  axis.rank - hop, modulo n; then replace it with what arrives. After the loop yield the last one,
  without a shift.
! n-1 hops bring every tensor to every rank, and 2 tensors exist on each at a time. In production:
  `torch.distributed.tensor.experimental.context_parallel`.
"""

import weakref

from exercises.exercise import Case, Dice, Sent, draw


def cases(dice: Dice) -> list[Case]:
    # One rank has no hop; two do not show in which direction the ring turns.
    return [Case(ranks, numbers=dice.randint(3, 6)) for ranks in (1, 2, 3, 4)]


def on_rank(rank, case: Case) -> dict:
    tensor = draw(case, rank.number, shape=(case.numbers,))
    seen, given, alive = [], [], 0
    for source, arrived in rank.course.collectives.ring(tensor, rank.axis("cp")):
        rank.mark("compute")
        seen.append((source, arrived.clone()))
        # A weak reference keeps nothing alive.
        given += [weakref.ref(arrived)] if len(seen) > 1 else []  # the first is the caller's
        alive = max(alive, len({id(one()) for one in given if one() is not None}))
    return {"sources": [s for s, _ in seen], "tensors": [t for _, t in seen], "alive": alive}


def expected(case: Case) -> list[dict]:
    tensors = [draw(case, rank, shape=(case.numbers,)) for rank in range(case.ranks)]
    orders = [[(r - hop) % case.ranks for hop in range(case.ranks)] for r in range(case.ranks)]
    return [{"sources": order, "tensors": [tensors[s] for s in order]} for order in orders]


def traffic(case: Case, rank: int) -> dict[str, Sent]:
    hops = case.ranks - 1
    return {"send as shift": Sent(hops, hops * 8 * case.numbers)}


def memory(case: Case, rank: int, record) -> str | None:
    if (alive := record.values["alive"]) > 2:
        return f"rank {rank} keeps {alive} tensors of other ranks alive; what was used can go"


def order(case: Case, rank: int, record) -> str | None:
    # A tensor that skips ranks arrives as well, but over links that a ring does not use.
    for event in record.events:
        if event.what == "send" and event.peer not in (None, (rank + 1) % case.ranks):
            return f"rank {rank} sends to rank {event.peer}, which is not the next one"
    return record.hop_problem(rank, case.ranks - 1)


MISTAKES = """
sent_after_use: A hop begins after the tensor was used: nothing travels while the rank computes.
    shift = Shift(tensor, axis) => pass
    % axis.size, tensor => % axis.size, tensor; shift = Shift(tensor, axis)
n_hops: There are n hops, one more than needed: the last one brings your own tensor back.
    range(axis.size - 1) => range(axis.size)
    yield axis.next, tensor  # after n-1 hops the tensor is the next rank's => return
sources_below_0: Before rank 0 comes the last one, not rank -1: take sources modulo axis.size.
    (axis.rank - hop) % axis.size => axis.rank - hop
    yield axis.next, => yield axis.rank - axis.size + 1,
not_awaited: A tensor is yielded before it has arrived: its buffer holds anything.
    tensor = shift.wait() => tensor = shift.arriving
own_passed_on: Every hop sends this rank's own tensor again: what has arrived must be passed on.
    shift = Shift(tensor => mine = mine if hop else tensor; shift = Shift(mine
"""
