r"""Optimizer: parameter groups, the learning rate of a step, the gradient norm.

    learning rate    /‾‾‾‾‾‾‾‾‾ constant      /‾\_       cosine      /‾‾‾‾‾‾‾\    wsd
                    /                        /    \__               /         \
                   warm-up

Source: AdamW, Loshchilov and Hutter 2019; cosine, Loshchilov and Hutter 2017; WSD (warm-up, stable,
decay), Hu et al. 2024, "MiniCPM", section 4, with the linear decay of Hägele et al. 2024.
"""

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from picotron_min.layout import Recipe
from picotron_min.placement import Placement

WSD_DECAY = 0.2  # the part of all steps in which WSD falls to the minimum


def build_optimizer(parameters: Iterable[nn.Parameter], recipe: Recipe) -> torch.optim.Optimizer:
    """AdamW or SGD."""
    groups, lr = parameter_groups(parameters, recipe), recipe.learning_rate
    if recipe.optimizer == "sgd":
        return torch.optim.SGD(groups, lr)  # tests use it: AdamW hides a wrong scale of gradients
    return torch.optim.AdamW(groups, lr, recipe.betas, fused=recipe.fused)


def parameter_groups(parameters: Iterable[nn.Parameter], recipe: Recipe) -> list[dict]:
    """Matrices decay; norm weights, which are vectors around 1, do not."""
    parameters = list(parameters)
    return [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": recipe.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]


def learning_rate_at(step: int, recipe: Recipe) -> float:
    """The rate of a step, counted from 0. It reaches its minimum one step after the last."""
    peak, minimum = recipe.learning_rate, recipe.min_learning_rate
    warmup, total = recipe.warmup_steps, recipe.total_train_steps
    if step < warmup:
        return peak * (step + 1) / warmup  # not 0 in the first step, which would be wasted
    if recipe.schedule == "constant":
        return peak
    if recipe.schedule == "cosine":
        progress = (step - warmup) / (total - warmup)  # 0 .. 1
        return minimum + (peak - minimum) * (1 + math.cos(math.pi * progress)) / 2
    assert recipe.schedule == "wsd", recipe.schedule
    decay_steps = min(WSD_DECAY * total, total - warmup)  # a long warm-up leaves less
    return minimum + (peak - minimum) * min(1.0, (total - step) / decay_steps)


def measure_gradient(
    parameters: dict[str, nn.Parameter],
    placements: dict[str, Placement],
    ranks: dict[str, int],
    count_zeros: bool = False,
) -> Tensor:
    """This rank's share of the gradient's squared norm and of its zeros, [2] in float64.

    If several ranks hold the same part of a parameter, only the first counts it, so that the sum
    over all ranks has each element once. Zeros are 0 without `count_zeros`: it costs a pass.
    """
    counted = [
        parameter.grad
        for name, parameter in parameters.items()
        if all(ranks[axis] == 0 for axis in placements[name].copies)
    ]
    device = next(iter(parameters.values())).device
    if not counted:  # the norm of no tensors would be on the CPU: its copy would make the host wait
        return torch.zeros(2, dtype=torch.float64, device=device)
    # One norm a parameter, then theirs: over the flat buckets, a float32 sum of millions of squares
    # loses three of its seven digits on a CPU.
    squares = torch.nn.utils.get_total_norm(counted).to(device, torch.float64).square()
    zeros = torch.zeros_like(squares)
    if count_zeros:
        zeros += sum(gradient.numel() - gradient.count_nonzero() for gradient in counted)
    return torch.stack([squares, zeros])
