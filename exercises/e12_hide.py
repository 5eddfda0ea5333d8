"""12 hide: nothing waits for weight gradients

target: extensions.overlap.boundary:_Enter.backward
train: distributed.tp_size=2

Write the backward of _Enter: it gets the gradients of what each of its linears has computed, and
returns the gradient of their common input, summed over the ranks: the layer below waits for it.
Weight gradients have time. Put each into the queue of the boundary, and let the queue run while the
sum travels, by run_during_message: multiply_scatter has an argument for that.
Read: extensions/overlap/boundary.py, extensions/overlap/linear.py.

? Three things: put what weight gradients need into the queue; begin the sum; run the queue.
? ctx.boundary, ctx.linears, ctx.saved_tensors, which has x alone; boundary.queue.put,
  boundary.queue.run_during_message, boundary.multiply_scatter, linear.input_gradient.
? Put (linear, x, dy) of each linear into the queue. Then multiply and scatter all dys, with the
  input gradients as products and run_during_message as `meanwhile`. Return one value for each
  argument of forward but ctx: None for boundary and linears, which have no gradient.
! 1/2 of a linear's backward, its weight gradient, can hide a message. In production: Megatron-LM's
  `LinearWithGradAccumulationAndAsyncCommunication`.
"""

from itertools import pairwise

from exercises.exercise import Case, Dice, Sent
from exercises.pictures import timeline
from exercises.sublayers import MESSAGE, overlap_problem, run_cut, run_whole, traffic_of

DW = "weight gradients"


def cases(dice: Dice) -> list[Case]:
    sizes = {"batch": 2, "length": 6, "hidden": dice.randint(3, 6), "inner": 12}
    kinds = (("Boundary", False), ("SequenceBoundary", False), ("Boundary", True))
    cases = [Case(2, kind=kind, plan_has_w=w, **sizes) for kind, w in kinds]
    cases[1].keys = 6  # k and v narrower than q
    return cases


def on_rank(rank, case: Case) -> dict:
    return run_cut(rank, case, case.kind, case.plan_has_w)


def expected(case: Case) -> list[dict]:
    return run_whole(case, case.kind)


def traffic(case: Case) -> list[dict[str, Sent]]:
    return traffic_of(case, case.kind)


def order(case: Case, rank: int, record) -> str | None:
    if not case.plan_has_w:
        return overlap_problem(rank, record, case.kind)
    if record.place("mark", DW) < record.place("mark", "W"):
        return f"rank {rank} computes weight gradients in B: the plan has W for them"


def picture(runs):
    about = "backward: a message (begins, ends) and weight gradients dW; with W in the plan"
    yield f"{about}, after B"
    for case, records in runs:
        names = {MESSAGE[case.kind]: "sum", DW: "dW", "all_gather": "gather"}
        for record in records:  # what follows the forward, with one dW for several in a row
            pairs = pairwise(record.events[record.place("mark", "backward") :])
            record.events[:] = [e for before, e in pairs if (before.what, e.what) != (DW, DW)]
        yield from [str(case), timeline(records[:1], names)]


VERSIONS = """
run_last: The sum is awaited, and only then are weight gradients computed: nothing hides it.
    , meanwhile=boundary.queue.run_during_message) => ); boundary.queue.run_during_message()
run_at_once: The queue is run by `run`, not by run_during_message: in a pipeline whose plan has W,
    weight gradients must wait for that.
    run_during_message => run
not_summed: The input's gradient is not summed over the ranks: each has what its own heads
    contribute, and all layers below get only that.
    , meanwhile=boundary.queue.run_during_message) => ); boundary.queue.run_during_message()
    boundary.multiply_scatter => add_products
one_linear_only: The input's gradient comes from one linear: it is the sum of what all linears that
    share the input contribute.
    dys, products => dys[:1], products[:1]
each_linear_summed: Each linear's part of the gradient is summed over the ranks by itself: added up
    before, they need one message.
- dx = boundary.multiply_scatter(dys, products, meanwhile=boundary.queue.run_during_message)
+ run = boundary.queue.run_during_message
+ dx = sum(boundary.multiply_scatter([dy], [p], run) for dy, p in zip(dys, products))
put_last: Weight gradients are put into the queue when the sum is there: they run during another
    sublayer's message, and the lowest sublayer's never.
    boundary.queue.put(linear, x, dy) => pass
- dx = boundary.multiply_scatter(dys, products, meanwhile=boundary.queue.run_during_message)
+ dx = boundary.multiply_scatter(dys, products, meanwhile=boundary.queue.run_during_message)
+ for linear, dy in zip(linears, dys, strict=True):
+     boundary.queue.put(linear, x, dy)
past_the_queue: Weight gradients are computed past the queue: what _Leave has put into it stays.
    boundary.queue.put(linear, x, dy) => pass
- dx = boundary.multiply_scatter(dys, products, meanwhile=boundary.queue.run_during_message)
+ def run():
+     for linear, dy in zip(linears, dys, strict=True):
+         linear.add_weight_gradient(x, dy)
+ dx = boundary.multiply_scatter(dys, products, meanwhile=run)
weight_itself: It multiplies with `weight`: input_gradient knows its copy, in bfloat16 or 8 bits.
    [linear.input_gradient for => [lambda dy, w=linear.weight: dy @ w for
last_weight_for_all: Every product is with the last linear: a lambda looks up its variables when it
    is called, and then the loop is over.
    [linear.input_gradient for linear in => [lambda dy: linear.input_gradient(dy) for _ in
all_linears_sent: Each linear's part of the gradient is sent by itself, all of them at once: added
    up before, they need one message.
- dx = boundary.multiply_scatter(dys, products, meanwhile=boundary.queue.run_during_message)
+ begun = [boundary.start_sum(product(dy)) for dy, product in zip(dys, products)]
+ boundary.queue.run_during_message()
+ dx = sum([part for part, work in begun if work.wait() or True])
also_right:
- dx = boundary.multiply_scatter(dys, products, meanwhile=boundary.queue.run_during_message)
+ dx, work = boundary.start_sum(add_products(dys, products))
+ boundary.queue.run_during_message()
+ work.wait()
"""
