"""What a GPU has and this machine lacks: stand-ins, within which the project's own code runs.

Tensors are torch's fake ones: a shape, a dtype and the device "cuda:0", and no memory. The process
group is torch's fake one, which sends nothing. A kernel's stand-in allocates what the kernel does.
Autograd of a build for CPUs would look for CUDA: so for C++ all fake tensors are on the meta
device, and only Python sees "cuda:0".
"""

import contextlib
from collections.abc import Iterator
from unittest import mock

import numpy as np
import torch
import torch._dynamo  # before the patches: it compares signatures of what is patched
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from picotron_min.extensions.documents.attention import _borders

aten, GPU = torch.ops.aten, torch.device("cuda", 0)


@contextlib.contextmanager
def as_rank(rank: int, world_size: int) -> Iterator[None]:
    """Within, this process is a rank of a world whose other ranks answer at once, with nothing."""
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def as_on_a_gpu() -> Iterator[FakeTensorMode]:
    """Within, tensors are fake, and torch believes in a GPU of compute capability 9.0, Hopper's."""
    _borders.cache_clear()  # it may have fake tensors of an earlier dry run
    with contextlib.ExitStack() as stack:
        for patch in STAND_INS:
            stack.enter_context(mock.patch.object(*patch))
        yield stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))


def as_meta(kind, *args, dispatch_device=False, make=Tensor._make_subclass, **options) -> Tensor:
    return make(kind, *args, **options)


def move(parameter: Tensor, new: Tensor) -> None:
    """What nn.Module.to_empty needs of torch.utils.swap_tensors, which refuses fake tensors."""
    torch._C._swap_tensor_impl(parameter, new)
    parameter.fake_device = new.fake_device


def attention(q, k, v, is_causal=False, **_):
    if q.dtype.itemsize == 2:
        return aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal)[0]
    return aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, is_causal)[0]


class Kernel(torch.autograd.Function):
    """One that CUDA has, and a build for CPUs takes apart, with more tensors than that keeps."""

    @staticmethod
    def forward(ctx, forward, backward, *tensors):
        with torch._C._AutoDispatchBelowAutograd():
            out, *kept = forward(*tensors)
        ctx.backward = backward
        ctx.save_for_backward(*tensors, *kept)
        return out

    @staticmethod
    def backward(ctx, dy):
        with torch._C._AutoDispatchBelowAutograd():
            return None, None, *ctx.backward(dy, *ctx.saved_tensors)


def rms_norm(x, shape, weight, eps, in_parts=F.rms_norm):
    if x.dtype != weight.dtype:  # a GPU has no kernel for two
        return in_parts(x, shape, weight, eps)

    def backward(dy, x, weight, rstd):
        return aten._fused_rms_norm_backward(dy, x, shape, rstd, weight, [True, True])

    return Kernel.apply(
        lambda x, weight: aten._fused_rms_norm(x, shape, weight, eps), backward, x, weight
    )


def silu(x):
    return Kernel.apply(lambda x: [aten.silu(x)], lambda dy, x: [aten.silu_backward(dy, x)], x)


def pinned(x: Tensor) -> Tensor:  # not by empty_like, which fails on the constant of one expert
    return torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x)


STAND_INS = [
    (Tensor, "_make_subclass", staticmethod(as_meta)),
    (FakeTensor, "is_cuda", property(lambda tensor: tensor.fake_device.type == "cuda")),
    # One wait, not one for each number: all are the same.
    (FakeTensor, "tolist", lambda x: np.full(x.shape, x.flatten()[0].item()).tolist()),
    (Tensor, "pin_memory", pinned),
    (torch.UntypedStorage, "data_ptr", lambda storage: storage._cdata),  # else 0 for all
    (torch.utils, "swap_tensors", move),
    (F, "scaled_dot_product_attention", attention),
    (F, "silu", silu),
    (F, "rms_norm", rms_norm),
    (torch.nn.utils.clip_grad, "_has_foreach_support", lambda *_: True),
    (torch.cuda, "get_device_capability", lambda *_: (9, 0)),
    (torch.cuda, "is_bf16_supported", lambda *_: True),
    (torch.cuda.amp.common, "amp_definitely_not_available", lambda: False),  # else autocast is off
    *((torch.cuda, name, mock.MagicMock()) for name in ("Stream", "current_stream")),
]
