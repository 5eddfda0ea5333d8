"""Products: float32 matrices multiplied by oneDNN, on AMD's processors with AVX-512.

torch multiplies float32 on CPUs with Intel's MKL, which uses only 256 of the 512 bits that AMD's
vector units have. oneDNN, with which torch multiplies bfloat16, uses all of them. Both add in
float32, in different orders.

torch.compile uses the same operator. It has no gradient, so it is called from linears that are
taken apart (overlap/linear.py).
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from picotron_min.extensions.overlap.boundary import apply_overlap
from picotron_min.extensions.overlap.linear import Linear
from picotron_min.mesh import Axes
from picotron_min.model import Head, Llama

# Multiplications of a product below which oneDNN's 10 us a call are more than what it saves.
LEAST = 2**21


def multiply(x: Tensor, weight: Tensor) -> Tensor:
    """x W^T of float32 on a CPU, without autograd: x [..., in], W [out, in] -> [..., out]."""
    if _is_small(x, len(weight)):
        return F.linear(x, weight)
    return torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")


def _is_small(x: Tensor, num_out: int) -> bool:
    return x.numel() * num_out < LEAST


class OneDnnLinear(Linear):
    """The three products by `multiply`, which reads transposed matrices where they lie."""

    def product(self, x: Tensor) -> Tensor:
        return multiply(x, self.operand)

    def input_gradient(self, dy: Tensor) -> Tensor:
        return multiply(dy, self.operand.T)

    def add_weight_gradient(self, x: Tensor, dy: Tensor) -> None:
        columns = dy.flatten(0, -2).T, x.flatten(0, -2).T
        if _is_small(columns[0], x.shape[-1]):
            super().add_weight_gradient(x, dy)
        else:  # not added in place, but a pass over the gradient is short beside the product
            self.add_gradient(multiply(*columns))


def apply_products(model: Llama, axes: Axes, *, compiles: bool, **options) -> None:
    """As apply_overlap, with all products by `multiply`."""
    apply_overlap(model, axes, linear=OneDnnLinear, compiles=compiles, **options)
    if isinstance(model.lm_head, Head) and not compiles:  # else another stage has it
        use_in_loss(model.lm_head)


def use_in_loss(head: Head) -> None:
    """Let a head's loss, whose forward has all three products, compute them by `multiply`."""
    head.loss = partial(_loss, head.loss)


def _loss(loss: Callable, x: Tensor, targets: Tensor) -> Tensor:
    with _Multiply():
        return loss(x, targets)


class _Multiply(TorchFunctionMode):
    """Where it is entered, x @ y is by `multiply`."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is Tensor.matmul and not _is_small(args[0], args[1].shape[1]):
            return multiply(args[0], args[1].T)
        return function(*args, **(kwargs or {}))


def is_faster(device_type: str, dtype: torch.dtype) -> bool:
    """Whether `multiply` is faster than F.linear for large matrices of `dtype` on this machine."""
    cpu_info, backends = Path("/proc/cpuinfo"), torch.backends
    is_amd = cpu_info.exists() and "AuthenticAMD" in cpu_info.read_text()
    is_wide = is_amd and backends.cpu.get_cpu_capability() == "AVX512"
    is_slow = is_wide and backends.mkl.is_available()
    suits = device_type == "cpu" and dtype == torch.float32 and backends.mkldnn.is_available()
    return is_slow and suits
