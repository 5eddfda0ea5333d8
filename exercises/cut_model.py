"""A model of one layer whose matrices are cut by a placement table, and the same model, whole."""

from typing import TYPE_CHECKING

from exercises.exercise import Case, draw

if TYPE_CHECKING:
    from torch import Tensor

    from exercises.ranks import Rank
    from picotron_min.extensions.settings import ModelConfig
    from picotron_min.mesh import Axes


def model_config(case: Case) -> "ModelConfig":
    from picotron_min.extensions.settings import ModelConfig

    return ModelConfig(case.vocab, 2 * case.heads, case.inner, 1, case.heads, case.heads // 2)


def run_cut(
    rank: "Rank", case: Case, axes: "Axes", parts: dict[str, tuple[slice, ...]]
) -> tuple["Tensor", dict[str, "Tensor"]]:
    """The loss of this rank's part of the model, and the gradients of its parameters."""
    import torch
    from torch import nn

    course = rank.course
    model, queue = (
        course.model.Llama(model_config(case)),
        course.module("extensions.overlap.linear").WeightGradients(),
    )
    for name, parameter in list(model.named_parameters()):
        mine = draw(case, name, shape=parameter.shape)[parts[name]].clone()
        model.get_submodule(name.removesuffix(".weight")).weight = nn.Parameter(mine)
    queue.hold = True
    course.module("extensions.overlap.linear").apply_queue(model, queue)
    kind = "SequenceBoundary" if case.layout.get("sequence_parallel") else "Boundary"
    boundary = getattr(course.tensor_parallel, kind)(axes.tp, queue)
    course.tensor_parallel.apply_tensor_parallel(model, boundary)
    ids, targets = tokens(case)
    loss = model(ids, torch.arange(ids.shape[1]), targets)
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


def run_whole(case: Case) -> tuple["Tensor", dict[str, "Tensor"]]:
    """The loss of the whole model in one process, and its gradients."""
    import torch

    from picotron_min.model import Llama

    model = Llama(model_config(case)).double()
    for name, parameter in model.named_parameters():
        parameter.data = draw(case, name, shape=parameter.shape)
    ids, targets = tokens(case)
    loss = model(ids, torch.arange(ids.shape[1]), targets)
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


def tokens(case: Case) -> tuple["Tensor", "Tensor"]:
    ids = draw(case, "tokens", shape=(2, 2, 6)).abs() * 100 % case.vocab
    return ids.long().unbind()
