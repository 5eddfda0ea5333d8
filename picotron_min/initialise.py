"""Initial weights are a function of (seed, parameter name).

Nobody draws "the next" random numbers: the whole tensor is drawn from a generator of its own, and a
rank keeps its part. So every layout starts from bit-identical weights, and no two ranks can hold
the same slice where they should hold different ones.
"""

import hashlib
import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from picotron_min.mesh import Axes
from picotron_min.model_config import ModelConfig
from picotron_min.placement import Placement, part


def initialise(
    parameters: dict[str, nn.Parameter],
    model: ModelConfig,
    seed: int,
    placements: Mapping[str, Placement],
    axes: Axes,
) -> None:
    """Give parameters, by their names in the whole model, their initial weights.

    Drawn in float32 on the CPU, one tensor at a time.
    """
    shapes = model.parameter_shapes()
    for name, parameter in parameters.items():
        std = initial_std(name, model.num_hidden_layers)
        weight = initial_weight(name, shapes[name], seed, std)
        cuts = placements[name].cuts
        parameter.data.copy_(weight[part(weight.shape, cuts, axes.ranks, axes.sizes)])


def initial_weight(name: str, shape: tuple[int, ...], seed: int, std: float) -> Tensor:
    """Normal with mean 0 for matrices, ones for norms; float32 on the CPU."""
    if len(shape) < 2:
        return torch.ones(shape)
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little"))
    return torch.empty(shape).normal_(std=std, generator=generator)


def initial_std(name: str, num_hidden_layers: int) -> float:
    """Standard deviation of the initial normal distribution of a weight matrix.

    0.02 as in Hugging Face's Llama; divided by sqrt(2 layers) for the two projections per layer
    that write into the residual stream, so that its variance does not grow with depth (Radford et
    al. 2019, section 2.3).
    """
    writes_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
    return 0.02 / math.sqrt(2 * num_hidden_layers) if writes_residual else 0.02
