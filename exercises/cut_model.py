"""A model of one layer whose matrices are cut by a placement table, and the same model, whole.

Where there is no model, gradients are made up: the table sums them and puts them together.
"""

import torch
from torch import Tensor, nn

from exercises.exercise import Case, draw
from exercises.ranks import Rank
from picotron_min.mesh import Axes
from picotron_min.model import Llama
from picotron_min.model_config import ModelConfig


def model_config(case: Case) -> ModelConfig:
    return ModelConfig(case.vocab, 2 * case.heads, case.inner, 1, case.heads, case.heads // 2)


def run_cut(
    rank: Rank, case: Case, axes: Axes, parts: dict[str, tuple[slice, ...]]
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of this rank's part of the model, and the gradients of its parameters."""
    course = rank.course
    model = course.model.Llama(model_config(case))
    for name, parameter in list(model.named_parameters()):
        mine = draw(case, name, shape=parameter.shape)[parts[name]].clone()
        model.get_submodule(name.removesuffix(".weight")).weight = nn.Parameter(mine)
    sequence_parallel = case.layout.get("sequence_parallel", False)
    course.tensor_parallel.apply_tensor_parallel(model, axes.tp, sequence_parallel)
    return _run(model, case)


def run_whole(case: Case) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of the whole model in one process, and its gradients."""
    model = Llama(model_config(case)).double()
    for name, parameter in model.named_parameters():
        parameter.data = draw(case, name, shape=parameter.shape)
    return _run(model, case)


def _run(model: nn.Module, case: Case) -> tuple[Tensor, dict[str, Tensor]]:
    ids = draw(case, "tokens", shape=(2, 2, 6)).abs() * 100 % case.vocab
    ids, targets = ids.long().unbind()
    loss = model(ids, torch.arange(ids.shape[1]), targets)
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


def put_together(
    rank: Rank, axes: Axes, table: dict, shapes: dict, gradients: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Whole gradients: each part is summed over ranks, and counts once, as the table has it."""
    course, results = rank.course, {}
    for name, gradient in gradients.items():
        for axis in table[name].sums:
            course.collectives.all_reduce(gradient, axes[axis])
        whole = gradient.new_zeros(shapes[name])
        if all(axes.ranks[axis] == 0 for axis in table[name].copies):
            place = course.placement.part(shapes[name], table[name].cuts, axes.ranks, axes.sizes)
            whole[place] = gradient
        results[f"gradient of {name}"] = course.collectives.all_reduce(whole, axes.world)
    return results
