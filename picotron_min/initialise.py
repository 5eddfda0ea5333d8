"""Initial weights: a function of (seed, parameter name), the same in every layout.

    seed 42, "model.layers.0.mlp.up_proj.weight"  ->  the full matrix  ->  this rank's rows of it

So every layout starts from bit-identical weights, and no two tensor-parallel ranks draw the same.
"""

import hashlib
import math

import torch
from torch import Tensor, nn

from picotron_min.mesh import Axes
from picotron_min.model_config import ModelConfig
from picotron_min.placement import Placement, part


def initialise(
    parameters: dict[str, nn.Parameter],
    model_config: ModelConfig,
    seed: int,
    placements: dict[str, Placement],
    axes: Axes,
) -> None:
    """Give parameters, by their saved names, their initial weights, in place."""
    shapes = model_config.parameter_shapes()
    for name, parameter in parameters.items():
        std = initial_std(name, model_config.num_hidden_layers)
        whole = initial_weight(name, shapes[name], seed, std)  # one tensor at a time
        mine = part(whole.shape, placements[name].owned, axes.ranks, axes.sizes)
        parameter.data.copy_(whole[mine])  # rounds to its dtype, moves to its device


def initial_weight(name: str, shape: tuple[int, ...], seed: int, std: float) -> Tensor:
    """Normal with mean 0, ones of norms, zeros of biases; float32 on the CPU: devices agree."""
    if len(shape) < 2:
        return torch.full(shape, float("norm" in name))
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()  # hash() differs per process
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little"))  # 64 bits
    return torch.empty(shape).normal_(std=std, generator=generator)


def initial_std(name: str, num_hidden_layers: int) -> float:
    """0.02 as in Hugging Face's Llama; less where 2L outputs add up (Radford et al. 2019)."""
    writes_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
    return 0.02 / math.sqrt(2 * num_hidden_layers) if writes_residual else 0.02
