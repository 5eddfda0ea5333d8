"""The fast rotation of bfloat16 tensors, beside the one of the core."""

import pytest
import torch

from picotron_min.extensions.precision.extension import Rotate
from picotron_min.model import SelfAttention, rotary_table
from tests.assembled import MODELS


@pytest.mark.quick
def test_a_rotation_in_fewer_passes_is_the_same_to_the_last_bit():
    angles = rotary_table(torch.arange(1000, 1016), MODELS["untied"])
    x = torch.randn(2, 16, 3, angles[0].shape[-1], dtype=torch.bfloat16)
    one, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    out, plain = Rotate.apply(one, *angles), SelfAttention.rotate(other, *angles)
    for y in (out, plain):
        y.backward(x.flip(0))
    assert torch.equal(out, plain) and torch.equal(one.grad, other.grad)
