"""Linears in 8 bits over ranks: in float64, what one process trains that scales in the same blocks.

A layout decides which part of a tensor a rank has, and so which numbers share a scale. The
reference rounds in blocks, and is written apart from precision/float8.py. Layouts whose blocks are
micro-batches are rows of test_layouts.py; what linears keep is in test_memory.py.
"""

import math
from functools import partial
from unittest import mock

import pytest
import torch
from torch import Tensor

from picotron_min.extensions.overlap.linear import Linear
from picotron_min.extensions.settings import ModelConfig
from picotron_min.runtime.config import Config
from tests import assembled
from tests.assembled import Run, assert_same, make_training, whole_run
from tests.rows import lines, row

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


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


def train_reference(config: Config, model: ModelConfig, steps: int, tp: int, cp: int) -> Run:
    def make(config, model_config):
        training = make_training(config, model_config)
        for layer in training.chunks[0].model.model.layers.values():
            mlp = getattr(layer.mlp, "shared_experts", layer.mlp)
            for module in (layer.self_attn, mlp):
                for name, linear in module.named_children():
                    if isinstance(linear, Linear):
                        how = name not in ("o_proj", "down_proj"), tp, cp
                        linear.forward = lambda x, w=linear.weight, how=how: Reference.apply(
                            x, w, *how
                        )
        return training

    with mock.patch.object(assembled, "make_training", make):
        return assembled.train_briefly(config, model, steps)


# Ranks of tp have parts of a tensor; a ring, a schedule and recomputation change none of them.
BLOCKS = """
precision: tp=2 pp=2 engine=zb_h1 recompute=selective fp8
precision: cp=2 tp=2 sp tp_overlap fp8
precision: tp=2 ep=2 sp fp8 model=gated
"""


@pytest.mark.parametrize("text", lines(BLOCKS))
def test_layouts_train_what_one_process_does_in_their_blocks(pool, text):
    config, model_config = row(text, layers=3)
    words = f"precision: model={'gated' if 'gated' in text else 'untied'}"
    train = partial(train_reference, tp=config.layout.tp, cp=config.layout.cp)
    theirs = whole_run(pool, *row(words, layers=3), 2, train)
    assert_same(whole_run(pool, config, model_config, 2), theirs)
