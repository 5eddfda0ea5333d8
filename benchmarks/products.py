"""Products: the time of a step's products alone, below which no step with them can be.

    a step    product norm product Python product loss ... update message
    alone     product product product ...

Products of matrices and fused attention are recorded in one step and called again, in its order,
with its shapes, strides and dtypes, and nothing between them. docs/speed.md has what else a step
cannot do without.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

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
            if kind not in self.calls:
                copies = tree_map_only(Tensor, Tensor.clone, (args, kwargs or {}))
                self.calls[kind] = (function, *copies)
            self.order.append(kind)
        return function(*args, **(kwargs or {}))

    @torch.no_grad()
    def again(self) -> None:
        for kind in self.order:
            function, args, kwargs = self.calls[kind]
            function(*args, **kwargs)
