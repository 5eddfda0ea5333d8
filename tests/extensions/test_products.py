"""Products by oneDNN against those in float64."""

from copy import deepcopy

import pytest
import torch
from torch import nn

from picotron_min.extensions.kernels.products import LEAST, OneDnnLinear, use_in_loss
from picotron_min.model import Head


@pytest.mark.parametrize("tokens", [4, 100])  # below and above LEAST
def test_products_equal_those_in_float64(tokens):
    torch.manual_seed(0)
    x, dy = torch.randn(3, tokens, 96), torch.randn(200, 3, tokens).movedim(0, -1)
    weight, before = nn.Parameter(torch.randn(200, 96)), torch.randn(200, 96)
    weight.grad, linear = before.clone(), OneDnnLinear(weight)
    assert (x.numel() * 200 > LEAST) == (tokens == 100)
    with torch.no_grad(), torch.profiler.profile() as profile:
        y, dx = linear.product(x), linear.input_gradient(dy)
        linear.add_weight_gradient(x, dy)
    names = {event.name for event in profile.events()}
    assert ("mkldnn::_linear_pointwise" in names) == (tokens == 100)
    x, dy, w = x.double(), dy.double(), weight.detach().double()
    expected = x @ w.T, dy @ w, before + torch.einsum("bto,bti->oi", dy, x)
    for a, b in zip((y, dx, weight.grad), expected, strict=True):
        assert (a - b).norm() < 1e-6 * b.norm()


def test_the_loss_equals_it_in_float64():
    torch.manual_seed(0)
    x, targets = torch.randn(2, 40, 64), torch.randint(600, (2, 40))
    head, results = Head(64, 600, bias=False), []
    for dtype in (torch.float64, torch.float32):
        model, own = deepcopy(head).to(dtype), x.to(dtype).requires_grad_()
        if dtype == torch.float32:
            use_in_loss(model)
        with torch.profiler.profile() as profile:
            loss = model.loss(own, targets)
        loss.backward()
        results.append((loss, own.grad, model.weight.grad))
    names = [event.name for event in profile.events()]
    assert names.count("mkldnn::_linear_pointwise") == 3 and "aten::mm" not in names
    for a, b in zip(*results, strict=True):
        assert (a - b).norm() < 1e-6 * a.norm()
