"""Narrow AdamW: its two moments are stored in bfloat16, which halves the optimizer's memory.

    m <- b1 m + (1 - b1) g        computed in the parameter's dtype, then rounded to bfloat16,
    v <- b2 v + (1 - b2) g^2      whose digits are 1/128 apart between 1 and 2

In bfloat16 v can get stuck. When gradients have become small, a step takes the fraction 1 - b2
of v away; if that is less than half a digit, rounding to nearest restores v. At b2 = 0.99 v
follows; README.md has numbers.

Source: Zamirai et al. 2020, "Revisiting BFloat16 Training".
"""

import math

import torch

from picotron_min.extensions.settings import LARGEST_BETA2


class NarrowAdamW(torch.optim.Optimizer):
    """torch's AdamW, but for the dtype of `exp_avg` and `exp_avg_sq`."""

    def __init__(self, groups: list[dict], lr: float, betas: tuple[float, float]) -> None:
        assert betas[1] <= LARGEST_BETA2, f"betas[1]={betas[1]}: its average would freeze"
        super().__init__(groups, {"lr": lr, "betas": betas})
        for parameter in (p for group in self.param_groups for p in group["params"]):
            state = self.state[parameter] = {"step": torch.zeros(())}
            for moment in ("exp_avg", "exp_avg_sq"):
                state[moment] = torch.zeros_like(parameter, dtype=torch.bfloat16)

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            lr, (beta1, beta2) = group["lr"], group["betas"]
            for parameter in group["params"]:
                gradient, state = parameter.grad, self.state[parameter]
                state["step"] += 1
                steps = state["step"].item()
                mean = state["exp_avg"].to(gradient.dtype).lerp_(gradient, 1 - beta1)
                square = state["exp_avg_sq"].to(gradient.dtype).mul_(beta2)
                square.addcmul_(gradient, gradient, value=1 - beta2)
                state["exp_avg"].copy_(mean)  # rounds
                state["exp_avg_sq"].copy_(square)
                spread = square.sqrt().div_(math.sqrt(1 - beta2**steps)).add_(1e-8)
                parameter.mul_(1 - lr * group["weight_decay"])
                parameter.addcdiv_(mean, spread, value=-lr / (1 - beta1**steps))
