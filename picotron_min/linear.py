"""A linear layer, taken apart into the three products that training computes with a weight.

                          needed by
    y  = x W^T            the next layer, at once
    dx = dy W             the layer before, at once
    dW = dy^T x           the optimizer, at the end of the step

autograd computes the last two together. The weight gradient can wait, though, and there are better
moments for it: behind a message (tensor_parallel.py), or in the bubble of a pipeline. So backward
here computes dx only and puts (layer, x, dy) into a queue. When the queue is run, dW is added to
the layer's gradient where it lies: autograd never sees the weight.

Each product is a method, so a subclass can compute it otherwise, in 8 bits for example.

Precision: with a `copy` in bfloat16 the products are computed in bfloat16. The weight itself stays
in float32, because most updates are smaller than what bfloat16's three digits can hold.
Source: Micikevicius et al. 2018, "Mixed Precision Training", section 3.1: master weights.
In production: Megatron-LM's `gradient_accumulation_fusion` and its embedding of dW in a queue.
"""

import weakref
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Linear(nn.Linear):
    """y = x W^T, without a bias: x [..., in], W [out, in] -> y [..., out]."""

    copy: Tensor | None = None  # what the products are computed with; None: the weight itself

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features, bias=False)
        self.gradient_arrived: Callable[[], None] = lambda: None  # see data_parallel.py

    @property
    def operand(self) -> Tensor:
        return self.weight if self.copy is None else self.copy

    def forward(self, x: Tensor) -> Tensor:
        """The three products by autograd, which torch.compile understands."""
        return F.linear(x, self.operand)

    def product(self, x: Tensor) -> Tensor:
        return F.linear(x, self.operand)

    def input_gradient(self, dy: Tensor) -> Tensor:
        return dy @ self.operand

    def add_weight_gradient(self, x: Tensor, dy: Tensor) -> None:
        """Add dy^T x to the weight's gradient, which must be there already."""
        x, dy = x.flatten(0, -2), dy.flatten(0, -2)
        if x.dtype == self.weight.grad.dtype:
            self.weight.grad.addmm_(dy.T, x)  # one pass over the gradient, no temporary
        else:
            self.weight.grad += dy.T @ x
        self.gradient_arrived()


class WeightGradients:
    """A queue of weight gradients that are still to be computed."""

    def __init__(self) -> None:
        self.hold = False  # True: they wait until somebody calls `run`
        self.waiting: list[tuple[Linear, Tensor, Tensor]] = []

    def put(self, linear: Linear, x: Tensor, dy: Tensor) -> None:
        self.waiting.append((linear, x, dy))
        if not self.hold:
            self.run()

    def run(self) -> None:
        waiting, self.waiting = self.waiting, []
        for linear, x, dy in waiting:
            linear.add_weight_gradient(x, dy)


def linears(model: nn.Module) -> dict[str, Linear]:
    """All layers of this kind in a model, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, Linear)}


def apply_queue(model: nn.Module, queue: WeightGradients) -> None:
    """Let the linears of a model put their weight gradients into a queue, in place."""
    for linear in linears(model).values():
        # torch.compile cannot look into a queue: it compiles what lies between the linears.
        linear.forward = torch.compiler.disable(partial(_Product.apply, linear, queue))


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, linear, queue, x):
        ctx.linear, ctx.queue = linear, queue
        ctx.save_for_backward(x)
        return linear.product(x)

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        ctx.queue.put(ctx.linear, x, dy)
        return None, None, ctx.linear.input_gradient(dy)


def apply_copies(model: nn.Module, dtype: torch.dtype) -> None:
    """Let the linears of a model compute with copies of their weights, in place.

    autocast would make such copies, too, but casts each gradient to float32 before it is added and,
    in compiled layers, the weights again for each micro-batch.
    """
    for linear in linears(model).values():
        linear.copy = linear.weight.detach().to(dtype).requires_grad_()
        # Weak: Python's garbage collector does not see a cycle that goes through such a hook.
        linear.copy.register_post_accumulate_grad_hook(partial(_add_to_weight, weakref.ref(linear)))


def _add_to_weight(reference: weakref.ref, copy: Tensor) -> None:
    """autograd has left a gradient at the copy: add it to the weight's."""
    linear = reference()
    linear.weight.grad += copy.grad
    copy.grad = None
    linear.gradient_arrived()


@torch.no_grad()
def refresh_copies(model: nn.Module) -> None:
    """Copy the weights, which the optimizer has changed, once a step."""
    for linear in linears(model).values():
        if linear.copy is not None:
            linear.copy.copy_(linear.weight)
