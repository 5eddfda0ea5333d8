"""Muon: every update of a hidden matrix has about the same size in all directions.

A few directions make up most of a gradient; AdamW scales its elements, not its directions. Muon
keeps the directions and makes all their lengths equal:

    momentum  U S V^T  -- orthogonalise -->  about U V^T        (singular values 0.7 to 1.2)
               |  |  |
               |  |  +-- directions of the input             S of a gradient: 9, 2, 0.1, 0.01, ...
               +--+----- directions of the output, and how much each matters

A few products of matrices do it, without a decomposition: 5 (4 k^2 l + 2 k^3) FLOPs for a matrix of
k x l, k <= l. They need the whole matrix: each tensor-parallel rank gathers the others' parts,
computes the same, and keeps its own part. AdamW updates the embedding, lm_head, norms and routers.

Source: Jordan et al. 2024, "Muon"; the size of an update, Liu et al. 2025, "Muon is Scalable for
LLM Training", section 2.2. In production: `torch.optim.Muon`, which knows no tensor parallelism.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from picotron_min.collectives import Axis, all_gather
from picotron_min.extensions.settings import Recipe
from picotron_min.mesh import Axes
from picotron_min.placement import Placement

Matrices = dict[nn.Parameter, tuple[Axis, int] | None]  # with the axis and dim that each is cut by


def hidden_matrices(
    parameters: Mapping[str, nn.Parameter], placements: Mapping[str, Placement], axes: Axes
) -> Matrices:
    """Those of the parameters, by saved name, that Muon updates: of attention and of MLPs."""
    matrices = {}
    for name, parameter in parameters.items():
        if placements[name].is_hidden_matrix:
            # tp cuts it, or etp an expert, of which its owner in ep has all.
            cuts = [(axes[cut.axis], cut.dim) for cut in placements[name].cuts if cut.owner is None]
            matrices[parameter] = next((cut for cut in cuts if cut[0].size > 1), None)
    return matrices


class Muon(torch.optim.Optimizer):
    """Muon for matrices; `rest`, an AdamW for all other parameters, steps along with it."""

    def __init__(self, matrices: Matrices, rest: torch.optim.AdamW, recipe: Recipe) -> None:
        defaults = {"lr": recipe.learning_rate, "weight_decay": recipe.weight_decay}
        super().__init__([{"params": list(matrices)}], defaults)  # none on some ranks
        self.matrices, self.rest, self.momentum = matrices, rest, recipe.momentum
        self.dtype = getattr(torch, recipe.dtype)
        for parameter in matrices:
            narrow = torch.bfloat16 if recipe.moments == "bfloat16" else parameter.dtype
            self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter, dtype=narrow)
        # One optimizer to the outside: a learning rate that is set in these groups is that of rest.
        self.param_groups += rest.param_groups
        self.state |= rest.state
        rest.state = self.state

    @torch.no_grad()
    def step(self) -> None:
        self.rest.step()
        rate, decay = self.param_groups[0]["lr"], self.param_groups[0]["weight_decay"]
        for parameter, cut in self.matrices.items():
            gradient, stored = parameter.grad, self.state[parameter]["momentum_buffer"]
            average = stored.to(gradient.dtype).lerp_(gradient, 1 - self.momentum)
            stored.copy_(average)  # rounds a narrow one, else it is the average
            # Nesterov's: the average that the next step would have if its gradient were this one's.
            update = gradient.lerp(average, self.momentum).to(self.dtype)
            axis, dim = cut or (None, 0)
            whole = all_gather(update, axis, dim) if axis else update
            direction = orthogonalise(whole)
            scale = 0.2 * math.sqrt(max(whole.shape))  # elements of about 0.2, as AdamW's updates
            mine = direction.chunk(axis.size, dim)[axis.rank] if axis else direction
            parameter.mul_(1 - rate * decay).add_(mine, alpha=-rate * scale)


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
