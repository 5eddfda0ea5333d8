"""The update: parameter groups, the learning rate of a step, the gradient norm.

AdamW: Loshchilov and Hutter 2019. After the warm-up the learning rate is constant, or a cosine
(Loshchilov and Hutter 2017), or stable, then decaying: WSD (Hu et al. 2024, "MiniCPM", section 4).
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from picotron_min.collectives import Axis, all_reduce

WSD_DECAY = 0.2  # the part of all steps in which WSD falls to the minimum


def build_optimizer(
    parameters: Iterable[nn.Parameter],
    *,
    name: str,
    learning_rate: float,
    betas: tuple[float, float],
    weight_decay: float,
    fused: bool,
) -> torch.optim.Optimizer:
    """AdamW or SGD. Matrices decay; norm weights, which are vectors around 1, do not."""
    parameters = list(parameters)
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    if name == "sgd":
        return torch.optim.SGD(groups, lr=learning_rate)
    return torch.optim.AdamW(groups, lr=learning_rate, betas=betas, fused=fused)


def learning_rate_at(
    step: int, *, peak: float, minimum: float, schedule: str, warmup_steps: int, total_steps: int
) -> float:
    """The learning rate of a step, counted from 0.

    It would reach `minimum` one step after the last. WSD decays linearly, as in Hägele et al. 2024.
    """
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    if schedule == "constant":
        return peak
    if schedule == "cosine":
        progress = (step - warmup_steps) / (total_steps - warmup_steps)
        return minimum + (peak - minimum) * (1 + math.cos(math.pi * progress)) / 2
    assert schedule == "wsd", schedule
    decay_steps = min(WSD_DECAY * total_steps, total_steps - warmup_steps)
    return minimum + (peak - minimum) * min(1.0, (total_steps - step) / decay_steps)


def gradient_norm(sharded: list[Tensor], replicated: list[Tensor], tp: Axis, pp: Axis) -> Tensor:
    """The norm of the whole model's gradient as one vector, [] on the device: no host sync.

    What the tp ranks hold parts of is added up over them; what all of them hold counts once.
    """
    squares = all_reduce(_sum_of_squares(sharded), tp) + _sum_of_squares(replicated)
    return all_reduce(squares, pp).sqrt()


def _sum_of_squares(tensors: list[Tensor]) -> Tensor:
    # One norm a parameter, then theirs. Over the flat buckets it would be quicker to write, but on
    # a CPU a float32 sum of millions of squares loses three of its seven digits.
    return torch.nn.utils.get_total_norm(tensors).square()


class Diverged(Exception):
    """There is no use in going on."""


@dataclass
class SkippedSteps:
    """Steps whose gradient was not finite: the weights were left alone."""

    total: int = 0
    in_a_row: int = 0
    limit: int = 3
    has_learned: bool = False  # in this process

    def record(self, step: int, norm: float) -> bool:
        """True if this step must be skipped; raises Diverged at the third in a row."""
        if math.isfinite(norm):
            self.in_a_row, self.has_learned = 0, True
            return False
        self.total += 1
        self.in_a_row += 1
        if self.in_a_row == self.limit and not self.has_learned:
            raise Diverged(
                f"the gradient was not finite in the first {self.limit} steps, before any weight"
                " was changed: those that it started from are not finite, or much too large."
                " Start from others"
            )
        if self.in_a_row == self.limit:
            raise Diverged(
                f"the gradient was not finite in {self.limit} steps in a row, up to step {step}:"
                " the run has diverged. Go on from a checkpoint well before, by its name in"
                " checkpoint.load_path, with a lower learning_rate or a smaller grad_clip; or start"
                " anew, also with more warmup_steps"
            )
        return True
