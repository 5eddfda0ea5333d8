"""31 later: a weight gradient is computed when there is time for it

target: extensions.overlap.linear:WeightGradients
train: distributed.tp_size=2

A queue of (layer, x, dy), whose weight gradients dy^T x are still to be computed. `put` adds one,
and runs the queue at once unless it waits. With `hold` it waits until `run_during_message`, with
`split` (or with both) until what is here is detached and run: then `run_during_message` does
nothing. `detach` returns what is here as a queue of its own, and leaves none here. `run` computes
all that is here, once: layer.add_weight_gradient(x, dy). Gradients must have no graph, wherever
`run` is called.
Read: extensions/overlap/linear.py.

? put and run_during_message run the queue, unless it has to wait longer; run and detach leave it
  empty.
? self.append, self.pop or self.clear, torch.no_grad, layer.add_weight_gradient.
? `waits` is hold or split. put appends, and runs if it does not wait; run_during_message runs if
  there is no split. detach copies the list into a new WeightGradients, and clears this one. run
  takes one after the other out of the list, without gradients.
! 1/3 of a linear's products, the weight gradient's, may be computed at any time before the
  optimizer's step. In production: Megatron-LM's `WeightGradStore`.
"""

import torch

from exercises.exercise import Case, Dice, draw
from exercises.pictures import timeline

BATCHES, ALL = 2, ["da", "da", "db"]  # in each micro-batch: the first layer is used twice
MANY = 40  # entries, none of which may be computed early
HAS_RUN = f"another queue, with hold, split and {MANY} entries, has run"


def cases(dice: Dice) -> list[Case]:
    kinds = ((False, False), (True, False), (False, True), (True, True))
    rows, width = dice.randint(2, 5), dice.randint(3, 6)
    return [Case(1, hold=hold, split=split, rows=rows, width=width) for hold, split in kinds]


def inputs(case: Case, i: int):
    return [draw(case, name, i, shape=(case.rows, case.width)) for name in ("x", "dy")]


def on_rank(rank, case: Case) -> dict:
    linear = rank.course.linear
    weights = [draw(case, name, shape=(case.width, case.width)) for name in "ab"]
    layers = [linear.Linear(torch.nn.Parameter(weight)) for weight in weights]
    queue, other, taken, dxs = linear.WeightGradients(), linear.WeightGradients(), [], []
    entries: list[int] = []
    for name in [name for name in ("hold", "split") if getattr(case, name)]:
        setattr(queue, name, True)  # it begins with neither
    for name, layer in zip("ab", layers, strict=True):
        layer.gradient_arrived = lambda name=name: rank.mark(f"d{name}")
    model = torch.nn.Sequential(layers[0], torch.nn.Tanh(), layers[1], layers[0])
    linear.apply_queue(model, queue)
    other.hold = other.split = True  # of another model: it has a queue of its own
    last = linear.Linear(torch.nn.Parameter(weights[0].clone()))
    for _ in range(MANY):
        other.put(last, *inputs(case, 0))
    for i in range(BATCHES):
        x, dy = inputs(case, i)
        rank.mark(f"B{i}")
        model(x.requires_grad_()).backward(dy)
        dxs.append(x.grad)
        if case.hold:
            rank.mark(f"message{i}")
            queue.run_during_message()
        if case.split:
            taken.append(queue.detach())
            entries.append(len(taken[-1]))
    for i in reversed(range(len(taken))):
        rank.mark(f"W{i}")
        taken[i].run()
    gradients = [layer.weight.grad for layer in layers]
    graph = any(g is not None and g.requires_grad for g in gradients)
    results = {"gradients": gradients, "dx": dxs, "gradients have a graph": graph}
    results["entries of the queues that detach returns"] = entries
    return results | {HAS_RUN: last.weight.grad is not None}


def expected(case: Case) -> list[dict]:
    a, b = (draw(case, name, shape=(case.width, case.width)).requires_grad_() for name in "ab")
    dxs = []
    for i in range(BATCHES):
        x, dy = inputs(case, i)
        ((x.requires_grad_() @ a.T).tanh() @ b.T @ a.T).backward(dy)
        dxs.append(x.grad)
    results = {"gradients": [a.grad, b.grad], "dx": dxs, "gradients have a graph": False}
    results["entries of the queues that detach returns"] = [3] * BATCHES * case.split
    return [results | {HAS_RUN: False}]


def order(case: Case, rank: int, record) -> str | None:
    waits_for = "W" if case.split else "message" if case.hold else "B"
    part, computed = "", {}  # in each part of the step, by its mark
    for event in record.events:
        if event.what in ("da", "db"):
            computed.setdefault(part, []).append(event.what)
        else:
            part = event.what
            if part.startswith(waits_for):
                computed[part] = []
    for part, names in computed.items():
        if not part.startswith(waits_for) or sorted(names) != ALL:
            right = f"each {waits_for} should compute {', '.join(ALL)}, nothing else"
            return f"weight gradients in {part}: {', '.join(sorted(names)) or 'none'}; {right}"


def picture(runs):
    yield from ["da, db: the weight gradients of both layers"]
    for case, records in runs:
        yield f"hold {case.hold!s:5}  split {case.split!s:5}   {timeline(records)[8:]}"


VERSIONS = """
never_waits: Weight gradients are computed at once, also where they should wait: no message and no
    bubble is filled with them.
    if not self.waits: => if True:
always_waits: They wait also where neither hold nor split is set: nothing runs the queue there.
    if not self.waits: => if False:
never_run: During a message the queue does not run: with hold, no weight gradient is computed.
    if not self.split: => if False:
detached_and_kept: detach leaves in the queue what it returns: the next micro-batch detaches it
    again, and it counts twice.
- self.clear()
detached_itself: detach returns the queue itself: the first W computes all, and the others nothing.
    taken = WeightGradients(self) => taken = self
    self.clear() => pass
cleared_what_was_detached: detach clears the very list that it returns: nothing is left for W.
    WeightGradients(self) => self
still_waits: The queue that detach returns keeps `split`, and its run does nothing: run must always
    compute.
    taken = WeightGradients(self) => taken = WeightGradients(self); taken.split = self.split
    while self: => while self and not self.split:
not_removed: run leaves what it has computed in the queue: the next run computes it again.
    while self: => for linear, x, dy in list(self):
    linear, x, dy = self.pop(0) => pass
added_by_hand: run adds to weight.grad itself: add_weight_gradient also reports that the gradient
    has arrived, and subclasses compute it in another way.
- linear.add_weight_gradient(x, dy)
+ total = linear.gradient
+ linear.weight.grad = dy.T @ x if total is None else total + dy.T @ x
removed_in_a_loop: A loop over the queue takes entries out of it: it skips every other one.
    while self: => for linear, x, dy in self:
    linear, x, dy = self.pop(0) => self.pop(0)
with_a_graph: Outside of backward, run gives gradients a graph, which keeps activations alive.
    @torch.no_grad() =>
waits_for_both: It waits only where both hold and split are set: one of them is enough.
    self.hold or self.split => self.hold and self.split
hold_alone_asked: run_during_message runs the queue whenever hold is set, even with split: then it
    must wait for detach.
    if not self.split: => if self.hold:
also_right:
    self.hold or self.split => any((self.hold, self.split))
- if not self.waits:
-     self.run()
+ if not self.hold:
+     self.run_during_message()
- taken = WeightGradients(self)
- self.clear()
+ taken = WeightGradients()
+ taken[:], self[:] = self[:], []
- while self:
-     linear, x, dy = self.pop(0)
-     linear.add_weight_gradient(x, dy)
+ jobs, self[:] = self[::-1], []
+ for linear, *factors in jobs:
+     linear.add_weight_gradient(*factors)
"""
