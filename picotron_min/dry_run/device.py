"""What a GPU has and this machine lacks: stand-ins, within which the project's own code runs.

Tensors are torch's fake ones: a shape, a dtype and the device "cuda:0", and no memory. The process
group is torch's fake one, which sends nothing. A kernel's stand-in allocates what the kernel does,
and refuses what it refuses. Autograd of a build for CPUs would look for CUDA: so for C++ all fake
tensors are on the meta device, and only Python sees "cuda:0".
"""

import contextlib
from collections.abc import Iterator
from unittest import mock

import torch
import torch._dynamo  # before the patches: it compares signatures of what is patched
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
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
def as_on_a_gpu(capability: tuple[int, int] = (9, 0)) -> Iterator[FakeTensorMode]:
    """Within, tensors are fake, and torch believes in a GPU of this compute capability."""
    _borders.cache_clear()  # it may have fake tensors of an earlier dry run
    with contextlib.ExitStack() as stack:
        of_gpu = (torch.cuda, "get_device_capability", lambda *_: capability)
        for patch in (*STAND_INS, of_gpu):
            stack.enter_context(mock.patch.object(*patch))
        for kind in ("cuda", "cpu"):  # in C++ both are False
            value = property(lambda tensor, kind=kind: tensor.fake_device.type == kind)
            stack.enter_context(mock.patch.object(FakeTensor, f"is_{kind}", value, create=True))
        yield stack.enter_context(FakeTensorMode())


def as_meta(kind, *args, dispatch_device=False, make=Tensor._make_subclass, **options) -> Tensor:
    return make(kind, *args, **options)


def pinned(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, pin_memory=True).copy_(tensor)


def as_list(tensor: Tensor) -> list:
    """One wait, not one for each number; tokens are spread evenly over what they choose from."""
    return _nested(tensor.flatten()[0].item(), tensor.shape)


def _nested(number: float, shape: tuple[int, ...]) -> list | float:
    return [_nested(number, shape[1:]) for _ in range(shape[0])] if shape else number


def apply_by_replacing(module: nn.Module, function, recurse: bool = True) -> nn.Module:
    """nn.Module._apply swaps the tensors of parameters, which fake ones do not allow."""
    for child in module.children():
        apply_by_replacing(child, function)
    for name, old in module.named_parameters(recurse=False):
        module._parameters[name] = nn.Parameter(function(old.detach()), old.requires_grad)
    for name, old in module.named_buffers(recurse=False):
        module._buffers[name] = function(old)
    return module


def attention(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False, **_) -> Tensor:
    """TypeError for what a GPU's kernels refuse, and fake ones take."""
    if not q.dtype == k.dtype == v.dtype:
        raise TypeError(f"attention on a GPU of {q.dtype}, {k.dtype} and {v.dtype}")
    if q.dtype.itemsize == 2:
        return aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal)[0]
    return aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, is_causal)[0]


class FusedNorm(torch.autograd.Function):
    """CUDA's kernel keeps its input and a number a row; a CPU's parts keep more."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight, x.new_empty(*x.shape[:-1], 1, dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx, dy):
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


STAND_INS = [
    (Tensor, "_make_subclass", staticmethod(as_meta)),
    (Tensor, "pin_memory", pinned),
    (nn.Module, "_apply", apply_by_replacing),
    (FakeTensor, "tolist", as_list),
    (F, "scaled_dot_product_attention", attention),
    (F, "rms_norm", lambda x, shape, weight=None, eps=None: FusedNorm.apply(x, weight)),
    (torch.UntypedStorage, "data_ptr", lambda storage: storage._cdata),  # else 0 for all
    (torch.cuda, "is_bf16_supported", lambda *_: True),
    (torch.cuda.amp.common, "amp_definitely_not_available", lambda: False),  # else autocast is off
    *((torch.cuda, name, mock.MagicMock()) for name in ("Stream", "current_stream", "stream")),
    *((kind, "reset_parameters", lambda _: None) for kind in (nn.Linear, nn.Embedding, nn.RMSNorm)),
]
