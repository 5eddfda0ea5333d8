"""08 shard: gradients arrive, are summed, and each rank keeps its row

target: extensions.sharding.units:ShardedUnit.arrived
train: distributed.dp_size=2 distributed.tp_size=1 distributed.sharding="gradients"

The gradient of a unit's weight has arrived, a whole matrix. Copy or add it to self.buffer [n, R],
whose row r is rank r's, and set self.weights[name].grad to None: autograd would add the next one to
it. When all matrices have one, in any order, a backward is complete: it may be time to sum the
buffer over the ranks, by a reduce-scatter in place that is only begun here. Others end it, with
what is put in self.travelling: a tuple of this unit, the buffer and the work.
With self.reduces_each, the buffer is summed after each backward, and each has a new one: allocate
it when it is needed, and release it when it travels. Before it travels, end the reductions that
travel already, of all units: so at most two buffers exist. Otherwise there is one buffer for ever,
which adds up all self.num_backwards of a step, and is summed once. It is never set to zero: the
first gradient of a step replaces what is there.
Read: extensions/sharding/units.py (`begin`, `_finish_reductions`, `wait`) and its collectives.py.

? Allocate; copy or add each piece; count; and, when all matrices have arrived, send.
? self.row.new_empty, _views(piece, self.buffer, gradient) of each of self.pieces[name],
  self.arrivals, self.num_complete, self._finish_reductions(), self.travelling,
  start_reduce_scatter_(self.buffer, self.axis).
? _views gives the places of a piece in the buffer and in the gradient: copy the second to the first
  if buffers are summed each time, or if this name has not arrived in this step; else add it. Add 1
  to self.arrivals[name]. Once all arrivals exceed self.num_complete, add 1 to that; send the buffer
  if buffers are summed each time, or if this was the last backward.
! A rank keeps 1/n of the gradients; a step sends m times as much as with whole ones. In production:
  `torch.distributed.fsdp.fully_shard`.
"""

from itertools import product

import torch

from exercises.compare import SumOf
from exercises.exercise import Case, Dice, Sent, draw
from exercises.memory import storage_bytes

COLUMNS, STEPS, NAMES = 2, 2, "abcd"


def cases(dice: Dice) -> list[Case]:
    rows = [dice.randint(4, 7) for _ in range(3)]
    rows.append(5)  # two ranks have 3 and 2, three have 2, 2 and 1
    sizes = [("gradients", 2, 3, "float64"), ("optimizer", 3, 3, "float64")]
    sizes += [("gradients", 3, 1, "float64"), ("optimizer", 2, 3, "bfloat16")]
    return [
        Case(n, sharding=what, micro_batches=m, rows=rows, dtype=dtype)
        for what, n, m, dtype in sizes
    ]


def gradient_of(case: Case, rank: int, step: int, micro_batch: int, name: str):
    shape = case.rows[NAMES.index(name)], COLUMNS
    return draw(case, "gradient", rank, step, micro_batch, name, shape=shape).to(dtype_of(case))


def dtype_of(case: Case) -> torch.dtype:
    """Of the weights, and of gradients from autograd; masters and buffers are in float64."""
    return getattr(torch, case.dtype)


def on_rank(rank, case: Case) -> dict:
    course, kind = rank.course, {"bias": False, "device": "meta", "dtype": torch.float64}
    shard = course.placement.Cut("dp_cp", 0)
    placement = course.placement.Placement((), copies=(), sums=("dp_cp",), further=(shard,))
    modules = {
        n: [torch.nn.Linear(COLUMNS, rows, **kind)]
        for n, rows in zip(NAMES, case.rows, strict=True)
    }
    axes, device = rank.axes(course.settings.Layout(dp=case.ranks)), torch.device("cpu")
    table, args = dict.fromkeys(NAMES, placement), (axes, dtype_of(case), device, case.sharding, [])
    unit, results, peak = course.units.ShardedUnit(modules, table, *args), {}, 0
    for step in range(STEPS):
        unit.begin(case.micro_batches)
        for micro_batch, name in product(range(case.micro_batches), reversed(NAMES)):
            weight = unit.weights[name]
            new = gradient_of(case, rank.number, step, micro_batch, name)
            weight.grad = new if weight.grad is None else weight.grad + new  # as autograd does
            rank.mark(name)
            unit.arrived(name, weight.grad)
            buffers = [] if unit.buffer is None else [unit.buffer]
            buffers += [buffer for _, buffer, _ in unit.travelling]
            peak = max(peak, storage_bytes(buffers))
        rank.mark("|")
        unit.wait()
        gradients = {name: master.grad.clone() for name, master in unit.masters.items()}
        results |= {f"gradient of {name}, step {step}": g for name, g in gradients.items()}
    return results | {"peak": peak}


def expected(case: Case) -> list[dict]:
    results = [{} for _ in range(case.ranks)]
    for step, name in product(range(STEPS), NAMES):
        parts = []  # of each rank's sum over its micro-batches
        for rank in range(case.ranks):
            every = [gradient_of(case, rank, step, i, name) for i in range(case.micro_batches)]
            parts.append(torch.stack(every).double().sum(0).chunk(case.ranks))
        for place, of_ranks in enumerate(zip(*parts, strict=True)):  # the last may have no rows
            results[place][f"gradient of {name}, step {step}"] = SumOf(of_ranks)
    return results


def buffer_bytes(case: Case) -> int:
    return case.ranks * sum(-(-rows // case.ranks) * COLUMNS * 8 for rows in case.rows)


def traffic(case: Case, rank: int) -> dict[str, Sent]:
    times = STEPS * (case.micro_batches if case.sharding == "gradients" else 1)
    size = times * (case.ranks - 1) / case.ranks * buffer_bytes(case)
    return {"reduce_scatter": Sent(times, size)}


def memory(case: Case, rank: int, record) -> str | None:
    most = 2 * buffer_bytes(case)
    if (peak := record.values["peak"]) > most:
        return f"rank {rank} has buffers of {peak} bytes; {most} are enough for two of them"


def order(case: Case, rank: int, record) -> str | None:
    begun, now = set(), ""  # since the last mark: another gradient, or the end of backward
    for event in record.events:
        if event.kind == "mark":
            begun, now = set(), event.what
        elif event.kind == "start":
            # It may be awaited from the next call on.
            begun.add(event.number)
        elif event.number in begun:
            return f"rank {rank} waits for a reduction in the call that begins it"
        elif case.sharding == "optimizer" and now != "|":
            return f"rank {rank} waits for a reduction in backward, and no buffer needs it"


MISTAKES = """
never_replaced: A step's first gradient is added to what the step before has left in the buffer.
    self.reduces_each or not self.arrivals[name] => self.reduces_each
always_replaced: Each gradient replaces the one before: earlier micro-batches' are lost.
    inside.copy_(part) if is_first else inside.add_(part) => inside.copy_(part)
gradient_not_freed: weight.grad is not set to None: autograd adds the next gradient to it, and
    earlier ones count twice.
    self.weights[name].grad = None => pass
sent_too_early: The buffer is sent when the first of its matrices has a gradient, not the last.
    min(self.arrivals.values()) => max(self.arrivals.values())
buffer_kept: The buffer travels, and the next backward writes into it: it needs a new one.
    self.buffer = None => pass
earlier_ones_not_ended: Reductions that travel are not ended before the next one: all buffers of a
    step are alive at the same time.
    self._finish_reductions() => pass
"""
