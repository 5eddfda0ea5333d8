"""What only a GPU can show, skipped without one; and that the host leaves a GPU alone."""

from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from picotron_min import block_attention
from picotron_min.block_attention import FLASH_CUDA
from tests.test_layouts import MODEL, make_config, make_training


class Reads(TorchDispatchMode):
    """Counts the times that the host asks for a tensor's value, by `item()`, `if` and the like."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function.overloadpacket is torch.ops.aten._local_scalar_dense
        return function(*args, **(kwargs or {}))


def reads_of_steps(config) -> tuple[int, int]:
    training = make_training(config, MODEL.override(num_hidden_layers=4))
    training.step(0)  # the optimizer begins
    tolist = mock.Mock(side_effect=Tensor.tolist)
    with mock.patch.object(Tensor, "tolist", lambda tensor: tolist(tensor)), Reads() as reads:
        for step in (1, 2):
            training.step(step)
        training.evaluate()
    return tolist.call_count, reads.count


@pytest.mark.parametrize("sizes", [{}, {"pp": 2, "recompute": "full"}, {"tp": 2}], ids=str)
def test_the_host_reads_from_the_device_once_a_step(pool, sizes):
    config = make_config(micro_batches=4, optimizer="adamw", **sizes)
    for counts in pool.run(config.world_size, reads_of_steps, config):
        assert counts == (3, 0), "two steps and one evaluation, each with one tolist"


def test_the_kernel_of_a_gpu_gets_a_contiguous_lse(monkeypatch):
    aten = mock.Mock()
    monkeypatch.setattr(block_attention, "aten", aten)
    q, late = torch.randn(2, 4, 6, 8), slice(3, 6)
    lse = torch.randn(2, 4, 6)[:, :, late]
    FLASH_CUDA.backward(q[:, :, late], q[:, :, late], q, q, q[:, :, late], lse, False)
    (call,) = aten._scaled_dot_product_flash_attention_backward.call_args_list
    assert call.args[5].is_contiguous() and torch.equal(call.args[5], lse)
