"""Narrow AdamW: its two moments are stored in bfloat16, which halves the optimizer's memory.

    m <- b1 m + (1 - b1) g        computed in the parameter's dtype, then rounded to bfloat16,
    v <- b2 v + (1 - b2) g^2      whose digits are 1/128 apart between 1 and 2

In bfloat16 v can get stuck. When gradients have become small, a step takes the fraction 1 - b2
of v away; if that is less than half a digit, rounding to nearest restores v. At b2 = 0.99 v
follows; README.md has numbers, and why each line of a step is one operation on a list of tensors.
"""

import math

import torch
from torch import Tensor, nn

# Elements that are updated together, by device: their wide moments exist at the same time, 8
# bytes each. On a CPU they stay in its cache; a GPU needs kernels that outlast the next start.
CHUNKS = {"cpu": 2**18, "cuda": 2**24}


class NarrowAdamW(torch.optim.Optimizer):
    """torch's AdamW, but for the dtype of `exp_avg` and `exp_avg_sq`."""

    def __init__(self, groups: list[dict], lr: float, betas: tuple[float, float]) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas})
        for parameter in (p for group in self.param_groups for p in group["params"]):
            state = self.state[parameter] = {"step": torch.zeros(())}
            for moment in ("exp_avg", "exp_avg_sq"):
                state[moment] = torch.zeros_like(parameter, dtype=torch.bfloat16)

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            lr, (beta1, beta2) = group["lr"], group["betas"]
            counts = [self.state[parameter]["step"] for parameter in group["params"]]
            if not counts:
                continue  # a stage may have no parameters of a group, and torch refuses empty lists
            torch._foreach_add_(counts, 1)
            for weights, gradients, means, squares in self.chunks(group["params"]):
                steps = counts[0].item()  # all are equal
                mean, square = (wide_copies(narrow, gradients) for narrow in (means, squares))
                torch._foreach_lerp_(mean, gradients, 1 - beta1)
                torch._foreach_mul_(square, beta2)
                torch._foreach_addcmul_(square, gradients, gradients, 1 - beta2)
                torch._foreach_copy_(means, mean)  # rounds
                torch._foreach_copy_(squares, square)
                torch._foreach_sqrt_(square)
                torch._foreach_div_(square, math.sqrt(1 - beta2**steps))
                torch._foreach_add_(square, 1e-8)
                torch._foreach_mul_(weights, 1 - lr * group["weight_decay"])
                torch._foreach_addcdiv_(weights, mean, square, -lr / (1 - beta1**steps))
                del mean, square  # before the next chunk's are made

    def chunks(self, parameters: list[nn.Parameter]) -> list[tuple[list[Tensor], ...]]:
        """Weights, gradients and both moments, some at a time; a large one in pieces."""
        chunks, size = [[]], 0
        for parameter in parameters:
            state, most = self.state[parameter], CHUNKS[parameter.device.type]
            whole = parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"]
            for piece in zip(*(tensor.view(-1).split(most) for tensor in whole), strict=True):
                if chunks[-1] and size + len(piece[0]) > most:
                    chunks.append([])
                    size = 0
                chunks[-1].append(piece)
                size += len(piece[0])
        return [tuple(map(list, zip(*chunk, strict=True))) for chunk in chunks]


def wide_copies(moments: list[Tensor], like: list[Tensor]) -> list[Tensor]:
    wide = [torch.empty_like(tensor) for tensor in like]
    torch._foreach_copy_(wide, moments)
    return wide
