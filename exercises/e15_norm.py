"""15 norm: every element of the gradient counts once

target: optimizer:measure_gradient
train: distributed.tp_size=2

Return what this rank counts of the whole model's gradient, as two numbers in float64: the sum of
squares, and how many elements are 0 (with `count_zeros`; else 0). train.py adds these up over all
ranks and takes the root: send nothing here, and do not wait for a GPU: the numbers stay on the
parameters' device, as a tensor. `placements[name].copies` names the axes of the mesh along which
ranks hold the same part of a parameter, and `ranks[axis]` is this rank's place on one.
Read: optimizer.py, placement.py.

? Of all ranks that hold the same part, exactly one may count it. Choose it without a message.
? parameter.grad, placements[name].copies, ranks, torch.nn.utils.get_total_norm, count_nonzero.
? Collect the gradients of those parameters for which this rank is 0 on all axes of their copies. A
  rank may have none. Square the norm of them all, in float64, count their zeros, and stack both
  numbers.
! 2 numbers a rank give the norm of the whole gradient, however large the model is. In production:
  `torch.nn.utils.get_total_norm` of DTensors.
"""

import torch
from torch import Tensor, nn

from exercises.exercise import Case, Dice, Sent, draw


def cases(dice: Dice) -> list[Case]:
    sizes = {"vocab": 4 * dice.randint(2, 4) + 1, "hidden": 4 * dice.randint(1, 3)}
    # Copies over tp, over dp, none, and of a tied embedding at both ends of a pipeline.
    layouts = [(4, {"pp": 2, "tp": 2}), (4, {"dp": 2, "tp": 2})]
    layouts += [(3, {"dp": 3, "sharding": "optimizer"}), (4, {"pp": 2, "dp": 2})]
    some = [Case(n, layout=x, zeros=i != 1, **sizes, spike=0) for i, (n, x) in enumerate(layouts)]
    # The square of an odd number from 4097 to 5791 has 25 bits: one more than float32 has.
    spike = 4097 + 2 * dice.randint(0, 800)
    return [*some, Case(4, layout=layouts[0][1], zeros=True, **sizes, spike=spike)]


def shapes(case: Case, stage: int | None = None) -> dict[str, tuple[int, ...]]:
    """Of a small model with tied embeddings, or of one of two stages, which both have these."""
    E, found = case.hidden, {"model.embed_tokens.weight": (case.vocab, case.hidden)}
    for layer in (0, 1) if stage is None else (stage,):
        prefix = f"model.layers.{layer}"
        found[f"{prefix}.input_layernorm.weight"] = (E,)
        found[f"{prefix}.mlp.gate_proj.weight"] = (2 * E, E)
        found[f"{prefix}.mlp.down_proj.weight"] = (E, 2 * E)
    return found


def gradient(case: Case, name: str) -> Tensor:
    """Of the whole parameter, some 0, or nearly; a spike: float32 with one number on each rank."""
    numbers = draw(case, name, shape=shapes(case)[name])
    if not case.spike:
        return numbers.where(numbers.abs() > 0.2, 0) * numbers.where(numbers.abs() > 0.4, 1e-12)
    numbers = numbers.float().zero_()
    if name.endswith("layers.0.mlp.gate_proj.weight"):  # rank 0 has its first row, 1 the last
        numbers[0, 0] = numbers[-1, -1] = case.spike
    return numbers


def on_rank(rank, case: Case) -> dict:
    course, layout = rank.course, rank.course.settings.Layout(**case.layout)
    axes = rank.axes(layout)
    table = course.placement.placements(shapes(case), layout, tied=True)
    parameters, parts = {}, {}
    for name, shape in shapes(case, axes.pp.rank if layout.pp > 1 else None).items():
        mine = course.placement.part(shape, table[name].owned, axes.ranks, axes.sizes)
        parts[name] = gradient(case, name)[mine]
        parameters[name] = nn.Parameter(torch.empty_like(parts[name]))
        parameters[name].grad = parts[name].clone()
    share = course.optimizer.measure_gradient(parameters, table, axes.ranks, case.zeros)
    total = course.collectives.all_reduce(share.clone(), axes.world)
    changed = [name for name, part in parts.items() if not parameters[name].grad.equal(part)]
    return {"[squares, zeros] of all ranks": total, "gradients that it has changed": changed}


def expected(case: Case) -> list[dict]:
    # Of whole parameters, each once.
    whole = torch.cat([gradient(case, name).flatten().double() for name in shapes(case)])
    zeros = (whole == 0).sum() if case.zeros else torch.zeros(())
    total = torch.stack([(whole**2).sum(), zeros]).double()
    right = {"[squares, zeros] of all ranks": total}
    return [right | {"gradients that it has changed": []}] * case.ranks


def traffic(case: Case, rank: int) -> dict[str, Sent]:
    return {"all_reduce": Sent(1, 2 * (case.ranks - 1) / case.ranks * 2 * 8)}


MISTAKES = """
copies_counted: Every rank counts all that it holds: what several ranks hold counts several times.
    if all(ranks[axis] == 0 for axis in placements[name].copies) => if True
norms_counted_tp_times: Tensor-parallel ranks hold the same norm weights, and each counts them.
    in placements[name].copies => in placements[name].copies if axis != "tp"
tied_counted_twice: A tied embedding is on the first and on the last stage, and both count it.
    in placements[name].copies => in placements[name].copies if axis != "ends"
rank_0_only: Only the first rank counts anything: the parts that other ranks hold are left out.
    if all(ranks[axis] == 0 for axis in placements[name].copies) => if ranks["world"] == 0
norms_added: The norm is returned, not its square: norms do not add up. (3, 4) has 5, not 7.
    .square() =>
squared_in_float32: Where the gradient is float32, it is squared in float32, and loses digits before
    anything is float64: convert first.
    to(device, torch.float64).square() => square().to(device, torch.float64)
"""
