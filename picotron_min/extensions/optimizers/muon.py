"""Muon: every update of a hidden matrix has about the same size in all directions.

A few directions make up most of a gradient; AdamW scales its elements, not its directions. Muon
keeps the directions and makes all their lengths equal:

    momentum  U S V^T  -- orthogonalise -->  about U V^T        (singular values 0.7 to 1.2)
               |  |  |
               |  |  +-- directions of the input             S of a gradient: 9, 2, 0.1, 0.01, ...
               +--+----- directions of the output, and how much each matters

A few products of matrices do it, without a decomposition. They need whole matrices. Where n ranks
have parts of them, an all-to-all makes n matrices whole at once, one on each rank, and another one
brings the directions back. Of a matrix of b bytes a rank sends b/n (n-1)/n each way.
"""

import math
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from picotron_min.collectives import Axis
from picotron_min.extensions.optimizers.whole_matrices import Batch, batches
from picotron_min.extensions.settings import Recipe
from picotron_min.parallelize import ParallelModel


class Matrices(NamedTuple):
    """Hidden matrices that become whole together."""

    batch: Batch
    parameters: list[nn.Parameter]  # this rank's parts; none where a matrix has too few rows
    axis: Axis | None  # of the ranks that have the parts; None: this rank has all of them


def hidden_matrices(model: ParallelModel) -> list[Matrices]:
    """The matrices of attention and of MLPs in this rank's layers, which Muon updates."""
    axes, mine, table = model.axes, model.parameters, model.placements
    shapes = model.pipeline.chunks[0].model.config.parameter_shapes()  # of all layers
    layers = {name.split(".")[2] for name in mine if ".layers." in name}  # it has their norms
    names = [n for n in table if ".layers." in n and n.split(".")[2] in layers]
    return [
        Matrices(b, [mine[n] for n in b.names if n in mine], axes[b.axis] if b.axis else None)
        for b in batches(names, shapes, table, axes.ranks, axes.sizes)
    ]


class Muon(torch.optim.Optimizer):
    """Muon for matrices; `rest`, an AdamW for all other parameters, steps along with it."""

    def __init__(self, matrices: list[Matrices], rest: torch.optim.AdamW, recipe: Recipe) -> None:
        defaults = {"lr": recipe.learning_rate, "weight_decay": recipe.weight_decay}
        parameters = [parameter for of in matrices for parameter in of.parameters]
        super().__init__([{"params": parameters}], defaults)  # none on some ranks
        self.matrices, self.rest, self.momentum = matrices, rest, recipe.momentum
        self.dtype = getattr(torch, recipe.dtype)
        for parameter in parameters:
            narrow = torch.bfloat16 if recipe.moments == "bfloat16" else parameter.dtype
            self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter, dtype=narrow)
        # One optimizer to the outside: a learning rate that is set in these groups is set for rest.
        self.param_groups += rest.param_groups
        self.state |= rest.state
        rest.state = self.state

    @torch.no_grad()
    def step(self) -> None:
        self.rest.step()
        rate, decay = self.param_groups[0]["lr"], self.param_groups[0]["weight_decay"]
        for batch, parameters, axis in self.matrices:
            updates = [self.update(parameter) for parameter in parameters]
            directions = orthogonalise_parts(updates, batch, axis, self.dtype)
            scale = 0.2 * math.sqrt(max(batch.shape))  # elements of about 0.2, as AdamW's updates
            for parameter, direction in zip(parameters, directions, strict=True):
                parameter.mul_(1 - rate * decay).add_(direction, alpha=-rate * scale)

    def update(self, parameter: nn.Parameter) -> Tensor:
        """Average the gradient -> what is orthogonalised."""
        gradient, stored = parameter.grad, self.state[parameter]["momentum_buffer"]
        average = stored.to(gradient.dtype).lerp_(gradient, 1 - self.momentum)
        stored.copy_(average)  # rounds a narrow one, else it is the average
        # Nesterov's: the average that the next step would have if its gradient were this one's.
        return gradient.lerp(average, self.momentum)


def orthogonalise_parts(
    updates: list[Tensor], batch: Batch, axis: Axis | None, dtype: torch.dtype
) -> list[Tensor]:
    """This rank's part [r, c] of each update -> of its direction, computed in the dtype."""
    if not axis:
        return [orthogonalise(update.to(dtype)) for update in updates]
    nothing = torch.empty(0, dtype=dtype, device=axis.device)
    leaving = torch.cat([nothing, *(update.flatten().to(dtype) for update in updates)])
    there, here = batch.numbers(axis.rank)
    arrived = exchange(leaving, there, here, axis)
    if len(arrived):  # else the batch has fewer matrices than there are ranks
        whole = arrived.new_empty(batch.shape)
        for part, piece in zip(batch.parts, arrived.split(here), strict=True):
            whole[part] = piece.view_as(whole[part])
        direction = orthogonalise(whole)
        arrived = torch.cat([direction[part].flatten() for part in batch.parts])
    mine = exchange(arrived, here, there, axis)
    return [part.view_as(u) for part, u in zip(mine.split(there[0]), updates, strict=False)]


def exchange(numbers: Tensor, to_each: list[int], from_each: list[int], axis: Axis) -> Tensor:
    """The first to_each[0] numbers go to rank 0, ...; from_each[0] of rank 0 arrive first."""
    axis.ledger.record("exchange", numbers[to_each[axis.rank] :])  # what leaves
    arriving = numbers.new_empty(sum(from_each))
    dist.all_to_all_single(arriving, numbers, from_each, to_each, group=axis.group)
    return arriving


def orthogonalise(update: Tensor) -> Tensor:
    """U S V^T [r, c] -> about U V^T, in the same dtype (Newton-Schulz, five times).

    x <- a x + b (x x^T) x + c (x x^T)^2 x changes singular values only, s <- a s + b s^3 + c s^5:
    with these three numbers, which rise steeply at 0, five times lead from 0.002..1 to 0.7..1.2.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    is_tall = update.shape[0] > update.shape[1]
    x = update.T if is_tall else update  # the smaller x x^T
    x = x / x.norm().clamp(min=1e-7)  # no singular value above 1
    for _ in range(5):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x
