"""A rank's step as on a GPU of a cluster, in one process without a GPU.

Tensors are torch's fake ones: a shape, a dtype and the device "cuda:0", and no memory. The process
group is torch's fake one, and sends nothing. So the project's own build and step run unchanged, and
what is counted is where the host would wait for its GPU. Kernels themselves are not seen.
"""

import contextlib
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import torch
import torch._dynamo  # before the patches: it compares signatures of what is patched
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from picotron_min.data import Batch, Batches
from picotron_min.extensions.build import build_model
from picotron_min.extensions.documents.attention import _borders
from picotron_min.extensions.settings import ModelConfig
from picotron_min.mesh import build_axes
from picotron_min.runtime.config import Config
from picotron_min.runtime.inputs import open_data
from picotron_min.runtime.token_file import TokenFile
from train import build_run, train_step

aten, GPU, ROOT = torch.ops.aten, torch.device("cuda", 0), Path(__file__).parent.parent
READS = {aten._local_scalar_dense, aten.nonzero, aten.masked_select, aten.equal, aten.bincount}


def waits_of_a_step(config: Config, rank: int, model_config: ModelConfig) -> Counter[str]:
    """The lines at which a rank's host waits for its GPU in the second of two steps."""
    layout = config.layout
    here = layout.coordinates(rank)
    dist.init_process_group("fake", rank=rank, world_size=layout.world_size, store=FakeStore())
    try:
        axes = build_axes(GPU, layout)
        tokens = np.arange(100 * config.training.seq_length) ** 2 % model_config.vocab_size
        text = TokenFile(tokens.astype(np.uint16), len(tokens), 2, np.array([7, len(tokens)]))
        batches = open_data(config, text, here.dp, here.cp, model_config.num_nextn_predict_layers)
        with as_on_a_gpu() as host:
            host.uses_meta = True
            model = build_model(model_config, layout, config.workload, axes, GPU)
            model.weights_changed()
            run = build_run(model, config.recipe, as_fake(batches))
            host.uses_meta = False
            for step in range(2):
                host.waits.clear()
                train_step(run, step)
        return +host.waits  # those that are not 0
    finally:
        dist.destroy_process_group()


def as_fake(batches: Batches) -> SimpleNamespace:
    mode = torch._guards.detect_fake_mode()

    def batch(step: int, micro_batch: int) -> Batch:
        with unset_fake_temporarily():
            real = batches.batch(step, micro_batch)
        return type(real)(*map(mode.from_tensor, real[:3]), real.extra)

    return SimpleNamespace(batch=batch, num_micro_batches=batches.num_micro_batches)


@contextlib.contextmanager
def as_on_a_gpu() -> Iterator["Host"]:
    """Within, tensors are fake, and what a GPU has and this machine lacks has a stand-in."""
    _borders.cache_clear()  # it may have fake tensors of an earlier call
    with contextlib.ExitStack() as stack:
        for patch in PATCHES:
            stack.enter_context(mock.patch.object(*patch))
        for kind in ("cuda", "cpu"):  # in C++ both are False
            value = property(lambda tensor, kind=kind: tensor.fake_device.type == kind)
            stack.enter_context(mock.patch.object(FakeTensor, f"is_{kind}", value, create=True))
        stack.enter_context(FakeTensorMode())
        yield stack.enter_context(Host())


class Host(TorchDispatchMode):
    """Counts what makes the host wait."""

    def __init__(self) -> None:
        super().__init__()
        self.waits, self.uses_meta = Counter(), False

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kind, options = function.overloadpacket, kwargs or {}
        if not self.uses_meta and getattr(options.get("device"), "type", "") == "meta":
            options |= {"device": GPU}  # of C++, which takes all fake tensors for meta ones
        if kind in READS:
            self.waits[our_line()] += any(getattr(x, "is_cuda", False) for x in tree_leaves(args))
        if kind is aten._local_scalar_dense:
            return 1.0
        if kind is aten._grouped_mm and torch.cuda.get_device_capability()[0] < 9:
            self.waits[our_line()] += 1  # the sizes are read
        if function is aten.addmm.dtype_out:  # torch 2.11 has mixed up its fake one's arguments
            return options["out"]
        out = function(*args, **options)
        if options.get("pin_memory"):
            out.is_page_locked = True
        if kind in (aten._to_copy, aten.copy_):
            source, target = (args[0], out) if kind is aten._to_copy else (args[1], args[0])
            is_async = options.get("non_blocking") or args[2:] == (True,)
            is_async &= not source.is_cpu or hasattr(source, "is_page_locked")  # else it is staged
            crosses = source.numel() > 0 and source.is_cuda != target.is_cuda
            self.waits[our_line()] += crosses and not is_async
        return out


def our_line() -> str:
    frame = sys._getframe(2)
    while ROOT not in Path(frame.f_code.co_filename).parents:
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def apply_by_replacing(module: nn.Module, function, recurse: bool = True) -> nn.Module:
    """nn.Module._apply swaps the tensors of parameters, which fake ones do not allow."""
    for child in module.children():
        apply_by_replacing(child, function)
    for name, old in module.named_parameters(recurse=False):
        module._parameters[name] = nn.Parameter(function(old.detach()), old.requires_grad)
    for name, old in module.named_buffers(recurse=False):
        module._buffers[name] = function(old)
    return module


def fused_attention(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False, **_) -> Tensor:
    if q.dtype.itemsize == 2:
        return aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal)[0]
    return aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, is_causal)[0]


def ones_as_list(tensor: Tensor) -> list:
    tensor.flatten()[0].item()  # one wait, not one for each number
    with unset_fake_temporarily():
        return torch.ones(tensor.shape, dtype=tensor.dtype).tolist()


def plain_subclass(kind, *args, dispatch_device=False, make=Tensor._make_subclass, **options):
    return make(kind, *args, **options)


PATCHES = [
    (Tensor, "_make_subclass", staticmethod(plain_subclass)),  # autograd would look for CUDA
    (Tensor, "pin_memory", lambda tensor: torch.empty_like(tensor, pin_memory=True).copy_(tensor)),
    (nn.Module, "_apply", apply_by_replacing),
    (FakeTensor, "tolist", ones_as_list),
    (F, "scaled_dot_product_attention", fused_attention),
    (torch.UntypedStorage, "data_ptr", lambda storage: storage._cdata),
    (torch.cuda, "get_device_capability", lambda *_: (9, 0)),
    (torch.cuda, "is_bf16_supported", lambda *_: True),
    (torch.cuda.amp.common, "amp_definitely_not_available", lambda: False),  # else autocast is off
    *((torch.cuda, name, mock.MagicMock()) for name in ("Stream", "current_stream", "stream")),
    *((kind, "reset_parameters", lambda _: None) for kind in (nn.Linear, nn.Embedding, nn.RMSNorm)),
]
