"""Linear: a layer, taken apart into the three products that training computes with a weight.

                          needed by
    y  = x W^T            the next layer, at once
    dx = dy W             the layer before, at once
    dW = dy^T x           the optimizer, at the end of the step

autograd computes the last two together, but dW is better computed later: while a message travels
(boundary.py), or where a pipeline would be idle (zero_bubble.py). So backward here computes
only dx, and puts (layer, x, dy) into a queue. When the queue is run, dW is added to the gradient in
place. Each product is a method, so that a subclass can compute it in another way, for example in 8
bits.

A linear may have a bfloat16 copy of its weight, to compute these products with. The weight itself
stays in float32, because most updates are smaller than what bfloat16's three digits can hold.

Source: Micikevicius et al. 2018, "Mixed Precision Training", section 3.1. In production:
Megatron-LM's `gradient_accumulation_fusion`.
"""

import weakref
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Linear(nn.Linear):
    """y = x W^T, without a bias: x [..., in], W [out, in] -> y [..., out]."""

    copy: Tensor | None = None  # of the weight, in bfloat16; None: products are with the weight

    def __init__(self, weight: nn.Parameter) -> None:
        with torch.device("meta"):  # the weight exists already, and may be cut
            super().__init__(*reversed(weight.shape), bias=False)
        self.weight = weight

    def gradient_arrived(self) -> None:
        """To be called whenever the weight's gradient has grown without autograd."""
        if arrived := getattr(self.weight, "arrived", None):  # set by GradientBuckets
            arrived()

    @property
    def operand(self) -> Tensor:  # [out, in], what the products are computed with
        return self.weight if self.copy is None else self.copy

    @property
    def gradient(self) -> Tensor | None:  # a sharded weight may have been freed by now
        return None if self.weight is None else self.weight.grad

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x)  # without a queue, autograd then computes dx and dW

    def product(self, x: Tensor) -> Tensor:
        return F.linear(x, self.operand)

    def input_gradient(self, dy: Tensor) -> Tensor:
        return dy @ self.operand

    def add_weight_gradient(self, x: Tensor, dy: Tensor) -> None:
        """Add dy^T x to the weight's gradient: x [..., in], dy [..., out] -> [out, in]."""
        x, dy, gradient = x.flatten(0, -2), dy.flatten(0, -2), self.gradient
        # In place: one pass over the gradient, no temporary, and sums are never rounded to 16 bits.
        if gradient is not None and x.dtype == gradient.dtype:
            gradient.addmm_(dy.T, x)
        elif gradient is not None and x.is_cuda:  # torch has no such product on CPUs
            torch.addmm(gradient, dy.T, x, out_dtype=torch.float32, out=gradient)
        else:  # sharded, or in bfloat16 on a CPU
            return self.add_gradient(dy.T @ x)
        self.gradient_arrived()

    def make_copy(self, dtype: torch.dtype) -> None:
        """Compute with a copy of the weight from now on."""
        if self.weight is None:  # sharded: it is gathered in `dtype` already
            return
        self.copy = self.weight.detach().to(dtype).requires_grad_()
        weak = weakref.proxy(self)  # the garbage collector sees no cycle through such a hook

        def take(copy: Tensor) -> None:  # where autograd leaves the gradient
            weak.add_gradient(copy.grad)
            copy.grad = None

        self.copy.register_post_accumulate_grad_hook(take)

    def refresh(self) -> None:
        """To be called when the weight has changed: for what a subclass makes of it."""

    def add_gradient(self, gradient: Tensor) -> None:  # sharded: ShardedUnit.arrived
        if self.weight.grad is None:
            self.weight.grad = gradient
        else:
            self.weight.grad += gradient
        self.gradient_arrived()


class WeightGradients(list[tuple[Linear, Tensor, Tensor]]):
    """A queue of (layer, x, dy), whose weight gradients are still to be computed.

    It runs at once, in `run_during_message`, or after `detach`: chosen once, when it is built.
    """

    hold = False  # until `run_during_message`, while a message of tensor parallelism travels
    split = False  # until `detach`, even with `hold`: the plan cuts backward into B and W

    @property
    def waits(self) -> bool:
        return self.hold or self.split

    def put(self, layer: Linear, x: Tensor, dy: Tensor) -> None:
        self.append((layer, x, dy))
        if not self.waits:
            self.run()

    def run_during_message(self) -> None:  # a message travels: compute meanwhile, unless W will
        if not self.split:
            self.run()

    def detach(self) -> "WeightGradients":
        """Empty the queue; what it had, of one micro-batch, is returned as another queue."""
        taken = WeightGradients(self)
        self.clear()
        return taken

    @torch.no_grad()  # autograd has switched it off in a backward, but not after one
    def run(self) -> None:
        while self:
            linear, x, dy = self.pop(0)
            linear.add_weight_gradient(x, dy)


def linears(model: nn.Module) -> dict[str, Linear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, Linear)}


def take_apart(model: nn.Module, kind: type[Linear] = Linear) -> None:
    """Replace every nn.Linear of a model, but its head, by one of three products, in place."""
    for parent in list(model.modules()):
        for name, module in list(parent.named_children()):
            if type(module) is nn.Linear:
                if module.bias is not None:  # it would be left out without a word
                    raise ValueError(f"{name} has a bias: make it a module, as in qkv_bias/")
                setattr(parent, name, kind(module.weight))


def apply_queue(model: nn.Module, queue: WeightGradients, kind: type[Linear] = Linear) -> None:
    """Let the linears of a model put their weight gradients into a queue, in place."""
    take_apart(model, kind)
    for linear in linears(model).values():
        forward = partial(_Product.apply, linear, queue)
        linear.forward = torch.compiler.disable(forward)  # it cannot look into a queue


class _Product(torch.autograd.Function):
    """The linear's product; backward computes dx, and leaves dW to the queue."""

    @staticmethod
    def forward(ctx, linear, queue, x):  # no weight among them: autograd computes no dW
        ctx.linear, ctx.queue = linear, queue
        ctx.save_for_backward(x)
        return linear.product(x)

    @staticmethod
    def backward(ctx, dy):
        dx = ctx.linear.input_gradient(dy)  # before a sharded weight may be freed
        ctx.queue.put(ctx.linear, *ctx.saved_tensors, dy)
        return None, None, dx


def apply_copies(model: nn.Module, dtype: torch.dtype) -> None:
    """Let the linears of a model compute with copies of their weights, in place."""
    take_apart(model)
    # autocast makes such copies, too, but casts each gradient to float32 before it is added and, in
    # compiled layers, the weights again for each micro-batch.
    for linear in linears(model).values():
        linear.make_copy(dtype)
