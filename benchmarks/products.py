"""Products: the time of a step's products alone, below which no step with them can be.

    a step    product norm product Python product loss ... update message
    alone     product product product ...

Products of matrices and fused attention are recorded in one step and called again, in its order,
with its shapes, strides and dtypes, and nothing between them.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

from benchmarks.common import Done, Step

PRODUCTS = "mm addmm addmm_ bmm baddbmm baddbmm_ _grouped_mm _scaled_mm _linear_pointwise"


class Products(TorchDispatchMode):
    """Records the products that are called, and calls them again."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[Any, tuple] = {}  # one of each kind: a few tensors
        self.order: list[Any] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        if name in PRODUCTS.split() or "attention" in name:
            flat, _ = tree_flatten((args, kwargs))
            of = ((x.shape, x.stride(), x.dtype) if isinstance(x, Tensor) else x for x in flat)
            kind = (function, *of)
            if kind not in self.calls:  # whose inputs may change, or be freed
                copies = tree_map_only(Tensor, Tensor.clone, (args, kwargs or {}))
                self.calls[kind] = (function, *copies)
            self.order.append(kind)
        return function(*args, **(kwargs or {}))

    @torch.no_grad()
    def again(self) -> None:
        for kind in self.order:
            function, args, kwargs = self.calls[kind]
            function(*args, **kwargs)


def products_alone(step: Step, device: torch.device) -> Step:
    """A step of which nothing but the products is left: the limit of ours."""
    with Products() as recorded:
        step(0)

    def again(index: int) -> Done:
        recorded.again()
        if device.type == "cuda":  # a loss that is read waits for it in a real step
            torch.cuda.synchronize(device)
        return Done(math.nan, math.nan)

    return again
