"""14 alive: backward needs the graph, not the output

target: pipeline_parallel:Pipeline._forward
train: distributed.pp_size=2 distributed.tp_size=1

Run one micro-batch forward through a chunk: batch = self.read(i).to(self.device). The first stage
begins with its tokens; other stages take what has arrived, by self._arrived(kind, i, c), whose
gradient is needed later. Call model(x, batch.positions, targets, *batch.extra), and nothing that
waits, within self.watch(action), with targets on the last stage and else None. The last stage adds
its loss and batch.num_targets to self.totals; others put what is to be sent into self.leaving. Keep
in self.live what backward needs, the input and the end of the graph, not the output:
get_gradient_edge(out). In evaluation, without gradients, nothing is kept. See _backward and _send
for the keys.
Read: pipeline_parallel.py.

? Four things: where x comes from, the model, where the result goes, what is kept.
? Kind.RECEIVE_ACTIVATION, requires_grad_, torch.is_grad_enabled, detach, Kind.SEND_ACTIVATION,
  get_gradient_edge.
? What has arrived becomes a leaf that requires a gradient, if gradients are enabled. What is to
  leave is detached, under the key (Kind.SEND_ACTIVATION, i, c). live[i, c] is (x, the edge of the
  output), so that the output's values can be released once they are sent.
! 1 output a chunk is alive, that which is being sent, however many micro-batches wait for their
  backward. In production: `deallocate_output_tensor` of Megatron-LM.
"""

import weakref
from contextlib import nullcontext
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from exercises.exercise import Case, Dice, draw
from picotron_min.extensions.schedules.registry import SCHEDULES

B, S, E = 2, 3, 5


def cases(dice: Dice) -> list[Case]:
    return [
        Case(2, engine="afab", micro_batches=8, chunks=1, training=True),
        # An evaluation: nothing may be kept for a backward.
        Case(dice.choice((2, 3)), engine="interleaved", micro_batches=4, chunks=2, training=False),
        Case(3, engine="1f1b", micro_batches=4, chunks=1, training=True),
        Case(1, engine="1f1b", micro_batches=3, chunks=1, training=True),  # first and last stage
    ]


def weight_of(case: Case, stage: int) -> Tensor:
    return draw(case, "weight", stage, shape=(E, E)).requires_grad_(case.training)


def batch_of(case: Case, i: int) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, ...]]:
    """Tokens, targets, positions, and what the model gets beside them."""
    tokens, targets = (draw(case, "tokens", i, shape=(2, B, S)) * 1000).long() % E
    targets[0, : i % S] = -100  # another number of targets in each micro-batch
    return tokens, targets, torch.arange(S), (draw(case, "extra", i, shape=(S, 1)),)


def forward(weight: Tensor, x: Tensor, positions: Tensor, targets, extra: Tensor) -> Tensor:
    x = x if x.is_floating_point() else F.one_hot(x, E).double()
    x = (x @ weight + positions[:, None] / 10 + extra).tanh()
    return x if targets is None else F.cross_entropy(x.mT, targets, reduction="sum")


class PartOfModel(nn.Module):
    """Notes how many of its outputs are alive, at most, when a forward begins."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight, self.outputs, self.most_alive = nn.Parameter(weight), [], 0

    def forward(self, x: Tensor, positions: Tensor, targets, *extra: Tensor) -> Tensor:
        self.most_alive = max(self.most_alive, sum(one() is not None for one in self.outputs))
        out = forward(self.weight, x, positions, targets, *extra)
        self.outputs.append(weakref.ref(out))
        return out


def on_rank(rank, case: Case) -> dict:
    course, p, v = rank.course, case.ranks, case.chunks
    axis, parallel, chunks = rank.axis("pp"), course.pipeline_parallel, []
    schedule = course.registry.SCHEDULES[case.engine]
    # Parts of a tiny model.
    for stage in parallel.my_stages([1] * (p * v), schedule, axis):
        chunks.append(parallel.Chunk(stage, PartOfModel(weight_of(case, stage.layers.start))))
    empty = partial(torch.empty, B, S, E, dtype=torch.float64)
    pipeline = parallel.Pipeline(chunks, axis, torch.device("cpu"), empty)
    build = course.pipeline_messages.build_plans
    plan = build(schedule, p, case.micro_batches, v, training=case.training)[rank.number]
    with torch.set_grad_enabled(case.training):
        totals = pipeline.run(plan, lambda i: course.data.Batch(*batch_of(case, i)), nullcontext)
    results = {"[loss, number of targets]": totals.detach()}
    results["gradients"] = [chunk.model.weight.grad for chunk in chunks]
    results["the totals have a graph"] = totals.requires_grad
    results["outputs alive"] = max(chunk.model.most_alive for chunk in chunks)
    return results | {"left in self.live": len(pipeline.live)}


def expected(case: Case) -> list[dict]:
    last, place = case.ranks * case.chunks - 1, SCHEDULES[case.engine].place
    weights = [weight_of(case, stage) for stage in range(last + 1)]
    total, number, results = torch.zeros((), dtype=torch.float64), 0, []
    # All stages one after the other, in one process.
    for i in range(case.micro_batches):
        x, targets, positions, extra = batch_of(case, i)
        for stage, mine in enumerate(weights):
            x = forward(mine, x, positions, targets if stage == last else None, *extra)
        total, number = total + x, number + int((targets >= 0).sum())
    if case.training:
        total.backward()
    totals = torch.tensor([total.item(), number], dtype=torch.float64)
    for rank in range(case.ranks):
        stages = [stage for stage in range(last + 1) if place(stage, case.ranks)[0] == rank]
        gradients = [weights[stage].grad for stage in stages]
        mine = {"[loss, number of targets]": totals * (last in stages), "gradients": gradients}
        results.append(mine | {"the totals have a graph": False, "left in self.live": 0})
    return results


def memory(case: Case, rank: int, record) -> str | None:
    if (alive := record.values["outputs alive"]) > 1:
        what = f"rank {rank} keeps {alive} outputs of earlier forwards of a chunk alive"
        return f"{what}; at most one is needed, which is on its way"


MISTAKES = """
output_kept: The output itself is kept until backward: that needs the graph behind it, not its
    values. With 8 forwards first, 7 outputs are kept for nothing.
    get_gradient_edge(out) => out
loss_with_graph: The loss is added with its graph: the totals keep the graphs of all micro-batches.
    self.totals[0] += out.detach() => self.totals[0] += out
no_leaf: The input in self.live has no gradient to send back: it must be a leaf that requires one.
    x.requires_grad_(torch.is_grad_enabled()) => pass
micro_batches_counted: Micro-batches are counted, and not targets: each has another number of them.
    batch.num_targets => 1
last_loss: The loss replaces what is in the totals: of all micro-batches only the last one counts.
    self.totals[0] += out => self.totals[0] = out
kept_in_evaluation: Inputs are kept in self.live in evaluation, too: no backward takes them out.
    if torch.is_grad_enabled(): => if True:
    get_gradient_edge(out) => get_gradient_edge(out) if out.requires_grad else None
"""
