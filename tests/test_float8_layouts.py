"""FP8 in layouts: in float64 they train what one process trains that scales in the same blocks.

A layout decides which part of a tensor a rank has, and so which numbers share a scale. A
data-parallel rank's micro-batch is one of one process; with tensor and context parallelism the
reference rounds in blocks, and is written apart from float8.py.
"""

import functools
import math
from functools import partial
from unittest import mock

import pytest
import torch
from torch import Tensor

from picotron_min.linear import Linear
from picotron_min.runtime.config import Config
from tests import assembled
from tests.assembled import Run, assert_same, whole_run
from tests.test_layouts import make_config, make_training

STEPS, LAYERS = 2, 3
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def in_fp8(config: Config, sharding: str = "none", **options) -> Config:
    model = {"fp8": True, "num_hidden_layers": LAYERS} | options
    distributed = config.distributed.model_copy(update={"sharding": sharding})
    model = config.model.model_copy(update=model)
    return config.model_copy(update={"distributed": distributed, "model": model})


@functools.cache
def one_process(pool, micro_batches: int, skip: int, layers: int) -> Run:
    config = in_fp8(
        make_config(micro_batches=micro_batches), fp8_skip=skip, num_hidden_layers=layers
    )
    return whole_run(pool, config, "grouped-query", STEPS)


SAME_BLOCKS = {  # with the number of micro-batches that one process needs for the same
    "data": (in_fp8(make_config(dp=2)), 2),
    "pipeline, the middle": (
        in_fp8(make_config(pp=2, micro_batches=2), num_hidden_layers=4, fp8_skip=1),
        2,
    ),
    "zero bubble": (in_fp8(make_config(pp=2, micro_batches=3, engine="zb_h1")), 3),
    "selective": (in_fp8(make_config(recompute="selective")), 1),
    "parameters, full": (
        in_fp8(make_config(dp=2, recompute="full"), sharding="parameters"),
        2,
    ),
    "optimizer": (in_fp8(make_config(dp=2, micro_batches=2), sharding="optimizer"), 4),
}


@pytest.mark.parametrize("name", SAME_BLOCKS)
def test_layouts_with_the_same_blocks_train_the_same_model(pool, name):
    config, micro_batches = SAME_BLOCKS[name]
    sizes = micro_batches, config.model.fp8_skip, config.model.num_hidden_layers
    assert_same(whole_run(pool, config, "grouped-query", STEPS), one_process(pool, *sizes))


# The reference.


def rounded(x: Tensor, kind: torch.dtype) -> Tensor:
    """What 8 bits leave of a block."""
    amax = x.abs().max().item() or 1.0
    scale = 2.0 ** (math.frexp(torch.finfo(kind).max / amax)[1] - 1)
    return (x * scale).to(kind).double() / scale


class Reference(torch.autograd.Function):
    """y = x W^T with all factors rounded in the blocks of tp and cp ranks."""

    @staticmethod
    def forward(ctx, x, weight, is_first, tp, cp):
        parts = partial(over_ranks, tp=tp, cp=cp)
        x, weight = parts(x, E4M3, not is_first), cut(weight, E4M3, 0 if is_first else 1, tp)
        ctx.save_for_backward(x, weight)
        ctx.parts, ctx.is_first = parts, is_first
        return x @ weight.T

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        dy = ctx.parts(dy, E5M2, ctx.is_first)
        return dy @ weight, dy.flatten(0, 1).T @ x.flatten(0, 1), None, None, None


def cut(x: Tensor, kind: torch.dtype, dim: int, n: int) -> Tensor:
    return torch.cat([rounded(part, kind) for part in x.chunk(n, dim)], dim)


def over_ranks(x: Tensor, kind: torch.dtype, is_cut: bool, tp: int, cp: int) -> Tensor:
    """[B, S, E], of which cp ranks have positions, and tp ranks columns, if it is cut."""
    pieces = x.chunk(2 * cp, 1)  # rank r of a ring has pieces r and 2 cp - 1 - r
    blocks = [torch.cat([pieces[r], pieces[-1 - r]], 1) for r in range(cp)]
    blocks = [cut(block, kind, 2, tp if is_cut else 1).chunk(2, 1) for block in blocks]
    return torch.cat([first for first, _ in blocks] + [last for _, last in reversed(blocks)], 1)


def train_reference(config: Config, model: str, steps: int, tp: int, cp: int) -> Run:
    def make(config, model_config):
        training = make_training(config, model_config)
        for layer in training.chunks[0].model.model.layers.values():
            mlp = getattr(layer.mlp, "shared_experts", layer.mlp)
            for module in (layer.self_attn, mlp):
                for name, linear in module.named_children():
                    if isinstance(linear, Linear):
                        is_first = name not in ("o_proj", "down_proj")
                        product = partial(product_of, linear, is_first, tp, cp)
                        linear.forward = product
        return training

    with mock.patch.object(assembled, "make_training", make):
        return assembled.train_briefly(config, model, steps)


def product_of(linear: Linear, is_first: bool, tp: int, cp: int, x: Tensor) -> Tensor:
    return Reference.apply(x, linear.weight, is_first, tp, cp)


BLOCKS = {
    "one": {},
    "tensor": {"tp": 2},
    "tensor, full": {"tp": 4, "sequence_parallel": True, "recompute": "full"},
    "sequence": {"tp": 2, "sequence_parallel": True},
    "sequence, pipeline": {
        "tp": 2,
        "sequence_parallel": True,
        "pp": 2,
        "engine": "zb_h1",
        "recompute": "selective",
    },
    "context": {"cp": 2},
    "context, sequence": {"cp": 2, "tp": 2, "sequence_parallel": True},
}


@pytest.mark.parametrize("name", BLOCKS)
def test_layouts_train_what_one_process_does_in_their_blocks(pool, name):
    layout, model = BLOCKS[name], "untied"
    ours = whole_run(pool, in_fp8(make_config(**layout)), model, STEPS)
    assert_same(ours, reference(pool, layout.get("tp", 1), layout.get("cp", 1)))


@functools.cache
def reference(pool, tp: int, cp: int) -> Run:
    config = in_fp8(make_config(), fp8=False)
    train = partial(train_reference, tp=tp, cp=cp)
    return whole_run(pool, config, "untied", STEPS, train)
